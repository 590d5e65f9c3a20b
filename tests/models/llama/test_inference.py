"""Prefill and decode give the logits of the training forward pass, on one device and split over several."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.models import make_mesh
from dhelix.models.common.parallel import SINGLE_DEVICE, AutoParallel, TensorParallel
from dhelix.models.llama.inference import (
    Cache,
    cache_shapes,
    cache_specs,
    column_embedding_specs,
    decode,
    prefill,
)
from dhelix.models.llama.model import init_params, logits, param_specs
from dhelix.runtime.collective_matmul import CollectiveMatmuls
from dhelix.tests.models.tiny import TINY

CONFIG = dataclasses.replace(TINY, heads=16, kv_heads=8, rope_factor=8.0)
BATCH, PROMPT, SEQ, CAPACITY = 8, 5, 8, 10

# The tests only compare values, so optimization by LLVM would cost more time than it saves.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def tokens() -> Any:
    return np.random.default_rng(0).integers(0, CONFIG.vocab, (BATCH, SEQ)).astype(np.int32)


@functools.cache
def params(scan_layers: bool) -> Any:
    """Parameters whose matrices are ten times their initial values, so every layer affects the logits."""
    unrolled = init_params(dataclasses.replace(CONFIG, scan_layers=False), jax.random.key(0))
    made = jax.tree.map(lambda weight: weight * (10 if weight.ndim > 1 else 1), unrolled)
    return made | {"layers": jax.tree.map(lambda *all_: jnp.stack(all_), *made["layers"])} if scan_layers else made


@functools.cache
def expected() -> jax.Array:
    """Logits `[batch, predicted tokens, vocab]`, from the last token of the prompt on."""
    return fast_jit(logits, static_argnums=0)(CONFIG, params(True), tokens())[:, PROMPT - 1 :]


def generated(start: Any, go_on: Any, weights: Any) -> tuple[jax.Array, Cache]:
    """Logits in the form of `expected`, and the final cache."""
    found, cache = start(weights, tokens()[:, :PROMPT])
    all_logits = [found]
    for position in range(PROMPT, SEQ):
        found, cache = go_on(weights, tokens()[:, position], cache)
        all_logits.append(found)
    return jnp.stack(all_logits, axis=1), cache


@pytest.mark.slow
def test_one_device_predicts_what_training_does() -> None:
    start = fast_jit(lambda weights, prompt: prefill(CONFIG, weights, prompt, CAPACITY))
    go_on = fast_jit(functools.partial(decode, CONFIG), donate_argnums=2)
    found, cache = generated(start, go_on, params(True))
    np.testing.assert_allclose(found, expected(), rtol=1e-4, atol=1e-4)
    assert cache.length == SEQ
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, cache_shapes(CONFIG, BATCH, CAPACITY))
    keys, values = cache.layers
    assert np.all(np.any(np.asarray(keys)[:, :, :, :SEQ] != 0, axis=-1)) and not np.any(keys[:, :, :, SEQ:])
    assert not np.any(values[:, :, :, SEQ:])


@pytest.mark.parametrize(
    ("devices", "scan_layers", "form"),
    [
        pytest.param(4, True, None, marks=pytest.mark.slow),
        pytest.param(8, False, None, marks=pytest.mark.slow),
        pytest.param(4, False, "monolithic", marks=pytest.mark.slow),
        (4, True, "hybrid:2"),
        (4, False, "bidirectional_ring"),
        pytest.param(8, False, "ring", marks=pytest.mark.slow),
    ],
)
def test_devices_that_share_heads_predict_what_training_does(devices: int, scan_layers: bool, form: str | None) -> None:
    config = dataclasses.replace(CONFIG, scan_layers=scan_layers)
    parallel = TensorParallel(collective_matmuls=None if form is None else CollectiveMatmuls(form))
    weights, cached, split = param_specs(config), cache_specs(config), P(None, "tp")
    on_each = functools.partial(jax.shard_map, mesh=make_mesh(1, devices), check_vma=False)

    def start(weights: Any, prompt: jax.Array) -> tuple[jax.Array, Cache]:
        return prefill(config, weights, prompt, CAPACITY, parallel)

    def go_on(weights: Any, new: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return decode(config, weights, new, cache, parallel)

    found, cache = generated(
        fast_jit(on_each(start, in_specs=(weights, P()), out_specs=(split, cached))),
        fast_jit(on_each(go_on, in_specs=(weights, P(), cached), out_specs=(split, cached)), donate_argnums=2),
        params(scan_layers),
    )
    np.testing.assert_allclose(found, expected(), rtol=1e-4, atol=1e-4)
    assert cache.length == SEQ
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, cache_shapes(config, BATCH, CAPACITY))


@pytest.mark.parametrize(("specs", "form"), [(param_specs, "hybrid:2"), (column_embedding_specs, None)])
def test_every_device_has_the_logits_of_the_whole_vocabulary(specs: Any, form: str | None) -> None:
    parallel = TensorParallel(collective_matmuls=None if form is None else CollectiveMatmuls(form))
    weights, cached = specs(CONFIG), cache_specs(CONFIG)
    on_each = functools.partial(jax.shard_map, mesh=make_mesh(1, 4), check_vma=False)

    def start_and_go_on(weights: Any, prompt: jax.Array) -> tuple[jax.Array, Cache]:
        found, cache = prefill(CONFIG, weights, prompt[:, :PROMPT], CAPACITY, parallel, whole_logits=True)
        after, cache = decode(CONFIG, weights, prompt[:, PROMPT], cache, parallel, whole_logits=True)
        return jnp.stack([found, after], axis=1)[None], cache

    run = fast_jit(on_each(start_and_go_on, in_specs=(weights, P()), out_specs=(P("tp"), cached)))
    of_devices, _ = run(params(True), tokens())
    for found in of_devices:
        np.testing.assert_allclose(found, expected()[:, :2], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(found, of_devices[0])


def test_xla_gathers_whole_logits_under_automatic_sharding() -> None:
    mesh = make_mesh(1, 4)
    run = fast_jit(
        lambda weights, prompt: prefill(CONFIG, weights, prompt, CAPACITY, AutoParallel(mesh), whole_logits=True)[0],
        in_shardings=(jax.tree.map(lambda spec: NamedSharding(mesh, spec), column_embedding_specs(CONFIG)), None),
    )
    found = run(params(True), tokens()[:, :PROMPT])
    assert found.sharding.is_fully_replicated
    np.testing.assert_allclose(found, expected()[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("specs", "whole_logits", "in_the_ends"),
    [
        (param_specs, False, ["all_reduce"]),
        (param_specs, True, ["all_reduce", "all_gather"]),
        (column_embedding_specs, False, ["all_gather"]),
        (column_embedding_specs, True, ["all_gather", "all_gather"]),
    ],
)
def test_a_layer_has_two_all_reduces_and_no_other_collective(
    specs: Any, whole_logits: bool, in_the_ends: list[str]
) -> None:
    mesh, config = make_mesh(1, 4), dataclasses.replace(CONFIG, scan_layers=False)
    weights, cached = specs(config), cache_specs(config)
    step = jax.shard_map(
        lambda weights, new, cache: decode(config, weights, new, cache, TensorParallel(), whole_logits),
        mesh=mesh,
        in_specs=(weights, P(), cached),
        out_specs=(P() if whole_logits else P(None, "tp"), cached),
        check_vma=False,
    )
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    new = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    text = jax.jit(step).lower(shapes, new, cache_shapes(config, BATCH, CAPACITY)).as_text()
    found = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter)", text)
    assert sorted(found) == sorted(["all_reduce"] * 2 + in_the_ends)  # the layer is lowered once
    assert text.count("call @layer") == config.layers


def test_a_tied_embedding_has_no_split_columns() -> None:
    with pytest.raises(ValueError, match="split over the vocabulary; take llama.param_specs"):
        column_embedding_specs(dataclasses.replace(CONFIG, tie_embeddings=True))


def test_a_prompt_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="room for 4 tokens, but there are 5; give more capacity"):
        prefill(CONFIG, params(True), tokens()[:, :PROMPT], 4, SINGLE_DEVICE)
