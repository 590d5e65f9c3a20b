"""Five optimizer steps: any mesh against one device, and strands against the plain step."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dhelix import strand_interleave
from dhelix.models.common.mesh import make_mesh
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.models.moe.moe_config import MOE_PRESETS, MoeConfig
from dhelix.models.train_step import Sharding, make_train_step
from dhelix.tests.quick import slow_but

CONFIG = dataclasses.replace(
    MOE_PRESETS["phi-moe-demo"], vocab=64, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=16, seq=16
)
ROOMY = dataclasses.replace(CONFIG, capacity_factor=8.0, balance_weight=0.0, z_weight=0.0)
"""Nothing is dropped, and no loss depends on how tokens are divided among devices."""
BIASED = dataclasses.replace(
    ROOMY, norm="layer", attention_bias=True, head_bias=True, routing="sparsemixer", jitter=0.2
)
"""All that Phi-3.5-MoE has and the presets lack."""
TOKENS = np.random.default_rng(0).integers(0, 64, (24, 17)).astype(np.int32)
MICROBATCHES = 3


@functools.cache
def train(
    config: MoeConfig, dp: int, ep: int, tp: int, strands: bool = False, sharding: Sharding = "shard_map"
) -> tuple[Any, list[dict[str, float]]]:
    optimizer = optax.sgd(0.5, momentum=0.9)
    training = make_train_step(config, make_mesh(dp, tp, ep=ep), optimizer, MICROBATCHES, sharding)
    step: Any = strand_interleave(training.train_step, strict=True) if strands else jax.jit(training.train_step)
    state, found = training.init(jax.random.key(0)), []
    batch = {"tokens": jax.device_put(TOKENS, training.batch_sharding)}
    for _ in range(5):
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    return jax.device_get(state.params), found


@pytest.mark.slow
@pytest.mark.parametrize(("config", "mesh"), [(ROOMY, (1, 8, 1)), (ROOMY, (2, 2, 2)), (BIASED, (2, 2, 2))])
def test_any_mesh_trains_as_one_device(config: MoeConfig, mesh: tuple[int, int, int]) -> None:
    (params, metrics), (expected, wanted) = train(config, *mesh), train(config, 1, 1, 1)
    alike = ("loss", "grad_norm", "z", "dropped")  # the balance is a mean over groups of tokens
    for one, other in zip(metrics, wanted, strict=True):
        assert [one[name] for name in alike] == pytest.approx([other[name] for name in alike], rel=2e-5, abs=1e-5)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)
    assert wanted[-1]["loss"] < wanted[0]["loss"]


@pytest.mark.parametrize("mesh", slow_but([(1, 2, 1)], [(1, 2, 1), (2, 2, 2)]))
def test_strands_train_as_the_plain_step_and_drop_the_same_tokens(mesh: tuple[int, int, int]) -> None:
    (params, metrics), (expected, wanted) = train(CONFIG, *mesh, strands=True), train(CONFIG, *mesh)
    assert [m["dropped"] for m in metrics] == [m["dropped"] for m in wanted] and wanted[0]["dropped"] > 0.0
    for one, other in zip(metrics, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "strands"), [(True, True), (False, False)])
def test_fsdp_trains_as_replicas_do(scanned: bool, strands: bool) -> None:
    mesh = 2, 2, 1
    config = dataclasses.replace(CONFIG, scan_layers=scanned)
    (params, metrics), (expected, wanted) = train(config, *mesh, strands, "fsdp"), train(config, *mesh)
    for one, other in zip(metrics, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scanned", [True, False])
def test_fsdp_splits_matrices_over_replicas(scanned: bool) -> None:
    config = dataclasses.replace(BIASED, scan_layers=scanned)
    training = make_train_step(config, make_mesh(2, 1, ep=4), optax.sgd(0.5), MICROBATCHES, "fsdp")
    state = training.abstract_state()
    split = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    for name, leaf in split.items():
        vector = any(word in name for word in ("norm", "['b", "head_bias"))
        assert ("dp" in jax.tree.leaves(tuple(leaf.sharding.spec))) != vector, name


@pytest.mark.slow
def test_layers_that_are_not_scanned_train_the_same() -> None:
    mesh = 1, 2, 1
    (params, metrics), (expected, wanted) = (
        train(dataclasses.replace(CONFIG, scan_layers=False), *mesh, strands=True),
        train(CONFIG, *mesh),
    )
    for one, other in zip(metrics, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    stacked = jax.tree.map(lambda *layers: np.stack(layers), *params["layers"])
    for name, weights in expected["layers"].items():
        np.testing.assert_allclose(stacked[name], weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "ep", "sharding", "words"),
    [
        ({"experts": 6}, 4, "shard_map", "experts = 6 is not divisible by ep = 4"),
        ({}, 4, "auto", "sharding='auto' is not supported for experts; use 'shard_map' or 'fsdp'"),
        ({"kv_heads": 1}, 4, "shard_map", "kv_heads = 1 is not divisible by tp = 2"),
    ],
)
def test_what_does_not_fit_is_one_error(changes: dict[str, Any], ep: int, sharding: Any, words: str) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=words):
        make_train_step(config, make_mesh(1, 2, ep=ep), optax.sgd(0.1), MICROBATCHES, sharding)


def test_without_the_axis_every_device_has_all_experts() -> None:
    training = make_train_step(CONFIG, make_mesh(4, 2), optax.sgd(0.1), MICROBATCHES)
    assert "ep" not in str(training.abstract_state().params["layers"]["w_up"].sharding.spec)


def test_experts_of_a_model_without_them_are_refused() -> None:
    with pytest.raises(ValueError, match="the mesh has ep = 2, but the model has no experts; leave ep out"):
        make_train_step(LLAMA_PRESETS["llama-demo"], make_mesh(1, 2, ep=2), optax.sgd(0.1), MICROBATCHES)
