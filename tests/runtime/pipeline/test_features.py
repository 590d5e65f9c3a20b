"""Features of loss functions in a pipeline: metrics, weights, random keys, masks, casts, several values as state.

Each test compares `dhelix.value_and_grad` in a pipeline of two stages with its loop over micro-batches on one device.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix import Fold
from dhelix.runtime.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from dhelix.tests.quick import slow_but
from dhelix.tests.runtime.pipeline.models import (
    Axes,
    assert_close,
    embed,
    folded,
    gradients_of,
    in_microbatches,
    init_params,
    layer,
    nll,
    tokens,
    unfolded,
)

STAGES, MICROBATCHES, LAYERS, ROWS = 2, 3, 5, 12
SPECS = {"embedding": P(), "layers": {"norm": P("pp"), "w_in": P("pp"), "w_out": P("pp")}, "scale": P(), "head": P()}
PARAMS, TOKENS = init_params(LAYERS), tokens(ROWS)
Loss = Callable[..., Any]


def two_stages() -> Mesh:
    return Mesh(np.array(jax.devices()[:STAGES]), ("pp",), axis_types=(AxisType.Auto,))


def in_pipeline(
    loss_fn: Loss, *batch: Any, specs: Any = None, reduce: str = "mean", schedule: str = "w", **options: Any
) -> Any:
    """A function from parameters to (value, gradients in the model's order) of a pipeline; it compiles once."""
    fold = Fold(STAGES, layers=LAYERS, schedule=schedule)
    arguments = specs or tuple(P() for _ in batch)
    function = in_microbatches(
        gradients_of(loss_fn, two_stages(), SPECS, arguments, **options), MICROBATCHES, reduce, fold
    )

    def run(params: Any) -> Any:
        value, gradients = function(folded(params, fold.layout()), *batch)
        return value, unfolded(gradients, fold.layout())

    return run


def in_loop(loss_fn: Loss, *batch: Any, reduce: str = "mean", **options: Any) -> Any:
    function = in_microbatches(dhelix.value_and_grad(loss_fn, **options), MICROBATCHES, reduce)
    return function(PARAMS, *batch)


def everything(p: Any, batch: dict[str, Any], key: jax.Array) -> Any:
    """Noise per key and layer, a counter and two arrays as state, a mask per micro-batch, metrics of both kinds."""
    rows, mask = batch["rows"], batch["mask"]
    phase = jax.random.key_data(key)[0] % 64

    def body(state: Any, w: Any) -> Any:
        x, memory, count = state
        memory = 0.5 * memory + jnp.mean(x, axis=-1)
        x = layer(x, w) * (1 + 0.1 * jnp.sin(phase + count)) + mask[..., None] * memory[..., None]
        return (x, memory, count + 1), None

    x = p["embedding"][rows[:, :-1]]
    (x, memory, count), _ = lax.scan(body, (x, jnp.zeros(mask.shape), jnp.int32(0)), p["layers"])
    losses = nll(p, x, rows[:, 1:])
    metrics = {"tokens": jnp.sum(mask > 0), "perplexity": jnp.exp(jnp.mean(losses)), "layers": count}
    return jnp.mean(losses) + 0.1 * jnp.mean(memory**2), metrics


def test_state_masks_keys_and_metrics() -> None:
    mask = np.random.RandomState(0).randint(0, 2, (ROWS, TOKENS.shape[1] - 1)).astype(np.float32)
    batch = {"rows": TOKENS, "mask": mask}, jax.random.key(3)
    options = {"has_aux": True, "rng_argnums": 2}
    run = in_pipeline(everything, *batch, **options)
    (loss, metrics), gradients = run(PARAMS)
    expected = in_loop(everything, *batch, **options)
    assert int(metrics["tokens"]) == np.count_nonzero(mask)
    assert int(metrics["layers"]) == LAYERS * MICROBATCHES
    assert_close(((loss, metrics), gradients), expected)
    again = run(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, again, ((loss, metrics), gradients))


@pytest.mark.slow
def test_a_random_key_that_goes_from_layer_to_layer() -> None:
    def dropout(p: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
        @jax.checkpoint  # so that the key is kept for the backward pass
        def body(state: Any, w: Any) -> Any:
            x, key = state
            key, own = jax.random.split(key)
            return (layer(jnp.where(jax.random.bernoulli(own, 0.8, x.shape), x, 0), w), key), None

        (x, _), _ = lax.scan(body, (p["embedding"][rows[:, :-1]], key), p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:]))

    batch = TOKENS, jax.random.key(3, impl="rbg")
    result = in_pipeline(dropout, *batch, rng_argnums=2)(PARAMS)
    assert_close(result, in_loop(dropout, *batch, rng_argnums=2))


def weighted_loss(p: Any, batch: dict[str, Any]) -> jax.Array:
    """NaN in layers and head for a micro-batch without tokens. Layers divide by a norm that is zero in masked work."""
    rows, mask = batch["rows"], batch["mask"]
    share = jnp.max(mask) / jnp.sum(mask)

    def body(x: jax.Array, w: Any) -> Any:
        return x + (1 + share) * layer(x / jnp.linalg.norm(x, axis=-1, keepdims=True), w), None

    x, _ = lax.scan(body, p["embedding"][rows[:, :-1]], p["layers"])
    return jnp.sum(nll(p, x, rows[:, 1:]) * mask) / jnp.sum(mask)


@pytest.mark.parametrize("schedule", slow_but(["1f1b"], ["w", "1f1b"]))
def test_weights_and_not_a_number_where_nothing_counts(schedule: str) -> None:
    mask = np.random.RandomState(1).randint(0, 2, (ROWS, TOKENS.shape[1] - 1)).astype(np.float32)
    mask[1::MICROBATCHES] = 0  # all of the second micro-batch
    batch = {"rows": TOKENS, "mask": mask}
    options = {"reduce": "weighted", "weights": lambda params, batch: jnp.sum(batch["mask"])}
    loss, gradients = in_pipeline(weighted_loss, batch, schedule=schedule, **options)(PARAMS)
    assert np.isfinite(loss)
    assert_close((loss, gradients), in_loop(weighted_loss, batch, **options))


def cast_loss(p: Any, rows: jax.Array) -> jax.Array:
    """A loss in bfloat16, except its last mean."""
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    x, _ = lax.scan(lambda x, w: (layer(x, w).astype(x.dtype), None), p["embedding"][rows[:, :-1]], p["layers"])
    return jnp.mean(nll(p, x, rows[:, 1:]).astype(jnp.float32))


def test_weights_cast_in_the_loss_function_and_sums() -> None:
    loss, gradients = in_pipeline(cast_loss, TOKENS, reduce="sum", schedule="1f1b")(PARAMS)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))
    assert_close((loss, gradients), in_loop(cast_loss, TOKENS, reduce="sum"), tolerance=2e-2)


@pytest.mark.parametrize("schedule", slow_but(["1f1b"], ["w", "1f1b"]))
def test_weights_that_are_frozen_or_that_no_layer_reads(schedule: str) -> None:
    def frozen(p: Any, rows: jax.Array) -> jax.Array:
        weights = lax.stop_gradient(p["layers"]["w_in"]), p["layers"]["w_out"]
        x = p["embedding"][rows[:, :-1]]
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, weights)
        return jnp.mean(nll(p, x, rows[:, 1:]))

    loss, gradients = in_pipeline(frozen, TOKENS, schedule=schedule)(PARAMS)
    assert np.any(gradients["layers"]["w_out"])
    assert not np.any(gradients["layers"]["w_in"])
    assert not np.any(gradients["layers"]["norm"])
    assert_close((loss, gradients), in_loop(frozen, TOKENS))


@pytest.mark.slow
def test_outside_of_shard_map_other_axes_stay_automatic() -> None:
    def metric(p: Any, rows: jax.Array) -> Any:
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), p["embedding"][rows[:, :-1]], p["layers"])
        losses = nll(p, x, rows[:, 1:])
        return jnp.mean(losses), {"worst": jnp.max(losses), "tokens": jnp.int32(losses.size)}

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "dp"), axis_types=(AxisType.Auto,) * 2)
    fold = Fold(STAGES, layers=LAYERS, mesh=mesh, schedule="interleaved")
    function = in_microbatches(dhelix.value_and_grad(metric, has_aux=True), MICROBATCHES, fold=fold)
    batch = jax.device_put(TOKENS, NamedSharding(mesh, P("dp")))
    value, gradients = function(folded(PARAMS, fold.layout()), batch)
    assert_close((value, unfolded(gradients, fold.layout())), in_loop(metric, TOKENS, has_aux=True))


# the last layer is on the first stage in the first schedule, and on the last stage in the others
@pytest.mark.parametrize("schedule", slow_but(["1f1b"], ["w", "interleaved_si", "1f1b"]))
def test_sums_over_layers_are_outputs_of_shared_ends(schedule: str) -> None:
    def metric(axes: Axes, p: Any, rows: jax.Array) -> Any:
        def block(carry: Any, w: Any) -> Any:
            x, total = carry
            x = layer(x, w, axes)
            return (x, total + jnp.mean(x * x)), None

        start = embed(p, rows[:, :-1], axes), jnp.float32(0)
        (x, total), _ = lax.scan(block, start, p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:], axes)), {"total": total}

    specs = SPECS | {"embedding": P("pp"), "head": P(None, "pp")}
    fold = Fold(STAGES, layers=LAYERS, schedule=schedule)
    shared, alone = (functools.partial(metric, axes) for axes in (Axes(ends="pp"), Axes()))
    function = gradients_of(shared, two_stages(), specs, (P(),), has_aux=True)
    value, gradients = in_microbatches(function, MICROBATCHES, fold=fold)(folded(PARAMS, fold.layout()), TOKENS)
    assert_close((value, unfolded(gradients, fold.layout())), in_loop(alone, TOKENS, has_aux=True))


@pytest.mark.parametrize("under", [contextlib.nullcontext, pytest.param(jax.set_mesh, marks=pytest.mark.slow)])
def test_what_lies_on_the_mesh_around_the_loss(under: Any) -> None:
    """A key, an argument outside the batch and a captured array on the mesh; and the mesh around the step."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "dp"), axis_types=(AxisType.Auto,) * 2)
    key, scale = jax.device_put((jax.random.key(3), 1.5), NamedSharding(mesh, P()))
    table = jax.device_put(np.linspace(0.5, 1, 6), NamedSharding(mesh, P("dp")))

    def noisy(p: Any, rows: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
        x = p["embedding"][rows[:, :-1]]
        x = x + jax.random.normal(jax.random.fold_in(key, 1), x.shape) * table.mean()
        if under is jax.set_mesh:
            x = lax.with_sharding_constraint(x, P("dp"))
        x, _ = lax.scan(lambda x, w: (layer(x, w) * scale, None), x, p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:]))

    options: dict[str, Any] = {"batch_argnums": 1, "rng_argnums": 2}
    fold = Fold(STAGES, layers=LAYERS, mesh=mesh, schedule="1f1b")
    with under(mesh):
        function = in_microbatches(dhelix.value_and_grad(noisy, **options), MICROBATCHES, fold=fold)
        batch = jax.device_put(TOKENS, NamedSharding(mesh, P("dp")))
        value, gradients = function(folded(PARAMS, fold.layout()), batch, key, scale)
        expected = in_loop(noisy, batch, key, scale, **options)
    assert_close((value, unfolded(gradients, fold.layout())), expected)


@pytest.mark.parametrize("schedule", slow_but(["1f1b"], ["w", "1f1b"]))
def test_a_shard_map_inside_of_a_layer(schedule: str) -> None:
    """The shard_map is over an axis that the pipeline leaves automatic. Its rings rendezvous in each layer."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def rings(p: Any, rows: jax.Array) -> Any:
        def local(x: jax.Array, w: Any) -> jax.Array:
            (h,) = all_gather_matmul(x, (w["w_in"],), "tp", "ring")
            return x + matmul_reduce_scatter(jnp.tanh(h), w["w_out"], "tp", "ring")

        split = {"norm": P(), "w_in": P(None, "tp"), "w_out": P("tp")}
        one = jax.shard_map(
            local, mesh=mesh, in_specs=(P(None, "tp"), split), out_specs=P(None, "tp"), axis_names={"tp"}
        )
        x, _ = lax.scan(lambda x, w: (one(x, w), None), p["embedding"][rows[:, :-1]], p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:]))

    fold = Fold(STAGES, layers=LAYERS, mesh=mesh, schedule=schedule)
    function = in_microbatches(dhelix.value_and_grad(rings), MICROBATCHES, fold=fold)
    value, gradients = function(folded(PARAMS, fold.layout()), TOKENS)
    expected = in_microbatches(dhelix.value_and_grad(rings), MICROBATCHES)(PARAMS, TOKENS)
    assert_close((value, unfolded(gradients, fold.layout())), expected)


@pytest.mark.slow
def test_stages_that_must_meet_in_a_layer_do() -> None:
    """The layer takes a part of a split axis, so XLA's partitioner sends rows by a collective-permute. CPU devices of
    all stages wait for it, but some stages have no work in a tick of 1F1B.
    """

    def split(p: Any, rows: jax.Array) -> Any:
        def one(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            left, _, right = jnp.split(x @ w["w_in"][:, : w["w_in"].shape[1] // 3 * 3], 3, axis=-1)
            return x + jnp.tanh(left * right) @ w["w_out"][: left.shape[-1]], None

        x, _ = lax.scan(one, p["embedding"][rows[:, :-1]], p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:]))

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "tp"), axis_types=(AxisType.Auto,) * 2)
    fold = Fold(STAGES, layers=LAYERS, mesh=mesh, schedule="1f1b")
    function = in_microbatches(dhelix.value_and_grad(split), MICROBATCHES, fold=fold)
    params = folded(PARAMS, fold.layout())
    params["layers"]["w_in"] = jax.device_put(params["layers"]["w_in"], NamedSharding(mesh, P("pp", None, None, "tp")))
    value, gradients = function(params, TOKENS)
    assert_close((value, unfolded(gradients, fold.layout())), in_loop(split, TOKENS))


@pytest.mark.slow
def test_a_ring_inside_of_a_layer() -> None:
    def ring(p: Any, rows: jax.Array) -> Any:
        def one(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return layer(lax.ppermute(x, "tp", [(0, 1), (1, 0)]), w), None

        x, _ = lax.scan(one, p["embedding"][rows[:, :-1]], p["layers"])
        return jnp.mean(nll(p, x, rows[:, 1:]))

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "tp"), axis_types=(AxisType.Auto,) * 2)
    losses = {}
    for schedule in ("w", "1f1b"):
        fold = Fold(STAGES, layers=LAYERS, schedule=schedule)
        function = in_microbatches(gradients_of(ring, mesh, SPECS, (P(),)), MICROBATCHES, "mean", fold)
        value, gradients = function(folded(PARAMS, fold.layout()), TOKENS)
        losses[schedule] = value, unfolded(gradients, fold.layout())
    assert_close(losses["1f1b"], losses["w"])
