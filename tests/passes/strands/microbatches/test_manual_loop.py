"""Losses that are a shard_map as a whole: their micro-batch loop moves inside, and five steps equal the plain ones.

The mesh is dp 2 x tp 4. The optimizer is SGD with momentum, whose factors are powers of two, because XLA's CPU compiler
may multiply and add in one instruction or in two. The loop is made by `value_and_grad` or by the step itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad
from dhelix.passes.framework.report import Report
from dhelix.tests.quick import slow_but

LAYERS, WIDTH, INNER, ROWS, MICROBATCHES = 4, 8, 16, 32, 4
SPECS = {"up": P(None, None, "tp"), "down": P(None, "tp"), "head": P()}
OPTIMIZER = optax.sgd(0.125, momentum=0.5)
Params = dict[str, jax.Array]
Function = Callable[..., Any]


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)


MESH = make_mesh()


def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
    return x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "tp"), None


def scanned(x: jax.Array, w: Params) -> jax.Array:
    return lax.scan(layer, x, w)[0]


def unrolled(x: jax.Array, w: Params) -> jax.Array:
    for n in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda leaf, n=n: leaf[n], w))
    return x


def rematerialized(x: jax.Array, w: Params) -> jax.Array:
    return lax.scan(jax.jit(jax.checkpoint(layer)), x, w)[0]


def scanned_hops(one: Function, carry: Any) -> Any:
    return lax.scan(one, carry, None, length=4)[0]


def unrolled_hops(one: Function, carry: Any) -> Any:
    for _ in range(4):
        carry, _ = one(carry, None)
    return carry


def ring(hops: Function) -> Function:
    """Layers that send their activations around a ring of devices."""

    def one(carry: Any, _: Any) -> Any:
        total, part, w = carry
        after = lax.ppermute(part, "tp", [(i, (i + 1) % 4) for i in range(4)])
        return (total + jnp.tanh(part @ w["up"]) @ w["down"], after, w), None

    def ring_layer(x: jax.Array, w: Params) -> Any:
        part = lax.pcast(x, "tp", to="varying")
        return x + lax.psum(hops(one, (jnp.zeros_like(part), part, w))[0], "tp") / 4, None

    return lambda x, w: lax.scan(jax.checkpoint(ring_layer), x, w)[0]


def mapped(
    layers: Function = scanned, axes: tuple[str, ...] = ("dp", "tp"), mesh: Mesh = MESH, **options: Any
) -> Function:
    """A loss under a shard_map over `axes`, with a value and a count as auxiliary outputs."""

    loss = functools.partial(local_loss, layers=layers, over_rows="dp" in axes)
    specs = {"in_specs": (SPECS, P("dp") if "dp" in axes else P()), "out_specs": P()}
    return jax.shard_map(loss, mesh=mesh, axis_names=set(axes), **specs, **options)


def local_loss(params: Params, x: jax.Array, layers: Function = scanned, over_rows: bool = True) -> Any:
    y = layers(x, {name: params[name] for name in ("up", "down")}) @ params["head"]
    value, positive = jnp.mean(y**2), jnp.sum(y > 0)
    if over_rows:
        value, positive = lax.pmean(value, "dp"), lax.psum(positive, "dp")
    return value, {"value": 2 * value, "positive": positive}


def by_value_and_grad(loss: Function) -> Function:
    def step(state: Any, x: jax.Array) -> Any:
        (value, aux), gradients = value_and_grad(loss, has_aux=True)(state[0], x)
        return update(state, gradients), (value, aux)

    return step


def by_own_loop(gradients_of: Function) -> Function:
    """A step with its own loop over micro-batches; `gradients_of` returns gradients and auxiliary outputs."""

    def step(state: Any, x: jax.Array) -> Any:
        def micro_batch(total: Params, x: jax.Array) -> Any:
            gradients, value = gradients_of(state[0], x)
            return jax.tree.map(jnp.add, total, gradients), value

        rows = x.reshape(ROWS // MICROBATCHES, MICROBATCHES, WIDTH).swapaxes(0, 1)
        gradients, values = lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, state[0]), rows)
        return update(state, jax.tree.map(lambda g: g / (8 * MICROBATCHES), gradients)), values

    return step


def update(state: Any, gradients: Params) -> Any:
    params, momentum = state
    updates, momentum = OPTIMIZER.update(gradients, momentum)
    return optax.apply_updates(params, updates), momentum


def gradients_inside(params: Params, x: jax.Array) -> Any:
    """Takes gradients inside the shard_map, which each micro-batch calls once."""

    def local(params: Params, x: jax.Array) -> Any:
        return jax.grad(lambda p: local_loss(p, x)[0])(params), 0

    return jax.shard_map(local, mesh=MESH, in_specs=(SPECS, P("dp")), out_specs=(SPECS, P()))(params, x)


def arguments(mesh: Mesh = MESH) -> tuple[Any, jax.Array]:
    random = np.random.RandomState(0)
    sizes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH), "head": (WIDTH, 2)}
    params = {
        name: jax.device_put(0.3 * random.standard_normal(s).astype(np.float32), NamedSharding(mesh, SPECS[name]))
        for name, s in sizes.items()
    }
    rows = jax.device_put(random.standard_normal((ROWS, WIDTH)).astype(np.float32), NamedSharding(mesh, P("dp")))
    return (params, OPTIMIZER.init(params)), rows


def five_steps(step: Function, mesh: Mesh) -> Any:
    state, rows = arguments(mesh)
    said = []
    for _ in range(5):
        state, out = step(state, rows)
        said.append(out)
    return jax.tree.map(np.asarray, (state, said))


def compare(step: Function, microbatches: int | None = None, mesh: Mesh = MESH) -> Report:
    """Checks that five steps with strands equal the plain ones. Returns the report of the LOWERED passes."""
    interleaved = strand_interleave(step, microbatches=microbatches, strict=True)
    strands = five_steps(interleaved, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DHELIX", "off")
        plain = five_steps(strand_interleave(step, microbatches=microbatches), mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, strands)
    return interleaved.preview(*arguments(mesh))


def merged(report: Report) -> list[str]:
    """Trip counts of the merged loops."""
    (note,) = [n for n in report["strand-duplication"].notes if n.message == "two strands"]
    loops = note.facts["merged_loops"]
    assert isinstance(loops, list)
    return [loop.rpartition(" x ")[2] for loop in loops]


def outside(report: Report) -> list[str]:
    """Reasons why a loop was not moved into the shard_map that it calls."""
    return [n.message for n in report["strand-duplication"].notes if "cannot move into" in n.message]


LOSSES: dict[str, tuple[Function, list[str]]] = {
    "scanned layers": (mapped(), ["4"]),
    "unrolled layers": (mapped(unrolled), []),
    "checkpoint and jit in each layer": (mapped(rematerialized), ["4"]),
    "manual over tp alone": (mapped(axes=("tp",)), ["4"]),
    "scanned ring": (mapped(ring(scanned_hops)), ["4", "4"]),
}
OF_OWN_LOOPS: dict[str, tuple[Function, list[str]]] = {
    "without check_vma": (mapped(check_vma=False), ["4"]),
    "checkpoint around the shard_map": (jax.checkpoint(mapped()), ["4"]),
    "manual over tp alone, without check_vma": (mapped(axes=("tp",), check_vma=False), ["4"]),
    "unrolled ring, without check_vma": (mapped(ring(unrolled_hops), check_vma=False), ["4"]),
}


@pytest.mark.parametrize(
    "name", slow_but(["unrolled layers", "checkpoint and jit in each layer", "scanned ring"], LOSSES)
)
def test_value_and_grad_of_a_shard_map(name: str) -> None:
    loss, loops = LOSSES[name]
    report = compare(by_value_and_grad(loss), MICROBATCHES)
    assert merged(report) == loops and not outside(report)
    assert loops == [] or report["gradient-accumulation"].outcome == "changed"


@pytest.mark.parametrize("name", slow_but(OF_OWN_LOOPS.keys() - {"without check_vma"}, OF_OWN_LOOPS))
def test_an_own_loop_over_calls_of_a_shard_map(name: str) -> None:
    loss, loops = OF_OWN_LOOPS[name]

    def gradients_of(params: Params, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        return gradients, value

    report = compare(by_own_loop(gradients_of))
    assert merged(report) == loops and not outside(report)


def test_gradients_inside_of_the_shard_map() -> None:
    report = compare(by_own_loop(gradients_inside))
    assert merged(report) == ["4"] and not outside(report)


def test_explicit_axes() -> None:
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        report = compare(by_value_and_grad(mapped(mesh=mesh)), MICROBATCHES, mesh)
    assert merged(report) == ["4"] and not outside(report)


def test_sums_beside_the_shard_map() -> None:
    """Weights of micro-batches, and terms added to the shard_map's loss, are sums along split dimensions."""

    def decayed(params: Params, x: jax.Array) -> Any:
        value, aux = mapped()(params, x)
        return value + jnp.sum(params["up"] ** 2) / 128, aux

    def step(state: Any, x: jax.Array) -> Any:
        weigh = {"reduce": "weighted", "weights": lambda params, x: jnp.sum(x > 0)}
        (value, aux), gradients = value_and_grad(decayed, has_aux=True, **weigh)(state[0], x)
        return update(state, gradients), (value, aux)

    report = compare(step, MICROBATCHES)
    assert merged(report) == ["4"] and not outside(report)


def half_by_hand(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layers are a shard_map; the partitioner handles the head and the mean over rows."""
    weights = {name: params[name] for name in ("up", "down")}
    specs = {name: SPECS[name] for name in weights}
    y = jax.shard_map(scanned, mesh=MESH, in_specs=(P("dp"), specs), out_specs=P("dp"))(x, weights)
    value = jnp.mean((y @ params["head"]) ** 2)
    return value, value


def test_a_head_outside_of_the_shard_map() -> None:
    """The micro-batch loop stays outside. The shard_maps of both strands merge, and so do their layer loops."""
    report = compare(by_value_and_grad(half_by_hand), MICROBATCHES)
    assert merged(report) == ["4"]
    (why,) = outside(report)
    assert "do not share residual buffers" in why


def put_together_for_each_call(params: Params, x: jax.Array) -> Any:
    """Parameters that are stored in parts over dp."""
    kept = NamedSharding(MESH, P(None, None, ("tp", "dp")))
    return mapped()(params | {"up": lax.with_sharding_constraint(params["up"], kept)}, x)


def with_a_callback(params: Params, x: jax.Array) -> Any:
    value, aux = mapped()(params, x)
    jax.debug.callback(lambda v: None, value)
    return value, aux


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (put_together_for_each_call, "a sharding constraint contradicts the shard_maps"),
        (with_a_callback, "an operation outside the shard_maps cannot run on every device"),
    ],
)
def test_what_keeps_the_loop_outside(loss: Function, reason: str) -> None:
    step = strand_interleave(by_value_and_grad(loss), microbatches=MICROBATCHES, strict=True)
    (why,) = outside(step.preview(*arguments()))
    assert reason in why


def test_parameters_that_are_kept_in_more_parts_than_the_shard_map_takes() -> None:
    state, rows = arguments()
    state[0]["head"] = jax.device_put(state[0]["head"], NamedSharding(MESH, P("dp")))
    step = strand_interleave(by_value_and_grad(mapped()), microbatches=MICROBATCHES, strict=True)
    (why,) = outside(step.preview(state, rows))
    assert 'is split over "dp" outside of the shard_map' in why
