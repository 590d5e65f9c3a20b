"""Steps that change NNX objects behave as under `nnx.jit`, whatever they do to the objects."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.step.frameworks.nnx_training import (
    COUNT,
    ROWS,
    WIDTH,
    Network,
    accumulated,
    arrays,
    batch,
    check_equal,
    loss,
    mesh,
    objects,
    step_of,
)

plain_step = step_of(nnx.value_and_grad(loss))
looped_step = step_of(value_and_grad(loss))


def scan_step(model: Network, optimizer: nnx.Optimizer, batches: jax.Array) -> jax.Array:
    """A step with its own loop over micro-batches, written with `nnx.scan`."""
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})

    @nnx.scan(in_axes=(nnx.Carry, axes, 0), out_axes=(nnx.Carry, 0))
    def microbatch(total: Any, model: Network, rows: jax.Array) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, rows)
        return jax.tree.map(jnp.add, total, gradients), value

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    total, values = microbatch(zeros, model, batches)
    optimizer.update(model, jax.tree.map(lambda x: x / COUNT, total))
    return values.mean()


@pytest.mark.parametrize("tree_mode", [False, True])
def test_training_is_nnx_jits_to_the_last_bit(tree_mode: bool) -> None:
    options: dict[str, Any] = {"graph_updates": False} if tree_mode else {}
    reference = nnx.jit(plain_step, **options)
    step = strand_interleave(nnx.jit(plain_step, **options) if tree_mode else plain_step)
    expected, actual = objects(), objects()
    for _ in range(2):
        np.testing.assert_array_equal(reference(*expected, batch()), step(*actual, batch()))
    check_equal(expected, actual)


def test_own_loop_becomes_strands_to_the_last_bit() -> None:
    reference, step = nnx.jit(scan_step), strand_interleave(scan_step, strict=True)
    batches = batch().reshape(COUNT, ROWS // COUNT, WIDTH)
    expected, actual = objects()[:2], objects()[:2]
    for _ in range(2):
        np.testing.assert_array_equal(reference(*expected, batches), step(*actual, batches))
    check_equal(expected, actual)
    assert step.report(*actual, batches)["strand-duplication"].changed


@pytest.mark.parametrize("off", [False, True])
def test_microbatches_train_as_accumulated_gradients(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if off:
        monkeypatch.setenv("DHELIX", "off")
    reference = nnx.jit(step_of(accumulated))
    step = strand_interleave(looped_step, microbatches=COUNT, donate_argnums=(0, 1, 2), strict=not off)
    expected, actual = objects(), objects()
    for _ in range(2):
        np.testing.assert_allclose(reference(*expected, batch()), step(*actual, batch()), rtol=1e-6)
    check_equal(expected, actual, 1e-6)
    model = actual[0]
    assert model.last is model.first
    assert model.dropout.rngs.count[...] == 2 * COUNT
    assert off or step.report(*actual, batch())["strand-duplication"].changed


def test_only_a_call_changes_objects() -> None:
    step = strand_interleave(looped_step, microbatches=COUNT)
    given = objects()
    before = arrays(*given)
    lowered = step.lower(*given, batch())
    assert step.preview(*given, batch()).changed and step.report(*given, batch()).changed
    assert step.eval_shape(*given, batch()).shape == () and step.trace(*given, batch()).out_info
    for want, got in zip(before, arrays(*given), strict=True):
        np.testing.assert_array_equal(want, got)
    other = objects()
    np.testing.assert_array_equal(lowered.compile()(*given, batch()), step(*other, batch()))
    check_equal(given, other)


def test_verification_runs_on_copies() -> None:
    step = strand_interleave(looped_step, microbatches=COUNT, verify=True)
    reference = nnx.jit(step_of(accumulated))
    expected, actual = objects(), objects()
    for model in (expected[0], actual[0]):
        model.eval()
    for _ in range(2):
        np.testing.assert_allclose(reference(*expected, batch()), step(*actual, batch()), rtol=1e-6)
    check_equal(expected, actual, 1e-6)


def test_one_object_in_two_arguments_is_one() -> None:
    def step(one: Network, other: Network) -> Any:
        one.first.kernel[...] += 1
        other.first.kernel[...] *= 2
        return one is other, other.last

    for decorate in (nnx.jit, strand_interleave):
        model = objects()[0]
        kernel = model.first.kernel[...]
        same, last = decorate(step)(model, model)
        assert same and last is model.first
        np.testing.assert_array_equal(model.first.kernel[...], (kernel + 1) * 2)


def test_inconsistent_shardings_of_one_variable() -> None:
    step = strand_interleave(plain_step, in_shardings=(None, NamedSharding(mesh(), P()), None, None))
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        model = objects()[0]
        step(model, model, objects()[2], batch())


def test_shardings_by_variable() -> None:
    rows = NamedSharding(mesh(), P("dp"))
    shardings = nnx.StateSharding({nnx.Param: rows, ...: None})

    @strand_interleave(in_shardings=(shardings,), out_shardings=None)
    def step(linear: nnx.Linear) -> jax.Array:
        linear.kernel[...] += 1
        return linear.kernel.sum()

    linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    step(linear)
    assert linear.kernel[...].sharding == rows


def test_the_graph_may_change() -> None:
    traces = []

    @strand_interleave
    def step(model: Any, x: jax.Array) -> nnx.Module:
        traces.append(1)
        if not hasattr(model, "calls"):
            model.seen = nnx.BatchStat(jnp.zeros(()))
        model.calls = getattr(model, "calls", 0) + 1
        model.seen[...] += x.sum()
        model.last = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        return model.last

    model = objects()[0]
    for calls in (1, 2):
        assert step(model, batch()) is model.last
        assert model.calls == calls and len(traces) == calls  # a changed static attribute makes another program
    np.testing.assert_allclose(model.seen[...], 2 * batch().sum(), rtol=1e-6)
    assert model.last.kernel.shape == (2, 3)


def test_random_streams_and_metadata() -> None:
    def step(rngs: nnx.Rngs, weights: dict[str, nnx.Param]) -> jax.Array:
        assert weights["w"].get_metadata()["role"] == "bias"
        weights["w"][...] += 1
        return jax.random.normal(rngs.noise(), (4,))

    expected, actual = nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    reference, decorated = nnx.jit(step), strand_interleave(step)
    weights = {"w": nnx.Param(jnp.zeros(4), role="bias")}
    for _ in range(2):
        np.testing.assert_array_equal(reference(expected, weights), decorated(actual, weights))
    assert actual.noise.count[...] == 2
    np.testing.assert_array_equal(weights["w"][...], 4 * np.ones(4))


def test_static_arguments_and_donation() -> None:
    @strand_interleave(static_argnums=1, donate_argnums=0)
    def step(model: Network, factor: int) -> int:
        model.first.kernel[...] *= factor
        return factor

    model = objects()[0]
    kernel = model.first.kernel.get_raw_value()
    expected = kernel * 6
    assert step(model, 3) == 3 and step(model, 2) == 2
    assert kernel.is_deleted()
    np.testing.assert_allclose(model.first.kernel[...], expected, rtol=1e-6)


def test_state_is_data_as_under_jax_jit() -> None:
    @strand_interleave
    def step(state: Any) -> Any:
        state["kernel"][...] += 1
        return state

    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    before = np.asarray(state["kernel"][...])
    np.testing.assert_allclose(step(state)["kernel"][...], before + 1)
    np.testing.assert_array_equal(state["kernel"][...], before)


def test_partial_forms_and_methods() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.sum = nnx.Param(jnp.zeros(()))

        @strand_interleave
        def add(self, x: jax.Array) -> None:
            self.sum[...] += x.sum()

    method, cached, partial = Counter(), Counter(), Counter()
    add = Counter.add
    of_cached = nnx.cached_partial(add, cached)
    of_partial = strand_interleave(nnx.jit_partial(add.__wrapped__, partial, graph=False))
    for calls in (1, 2):
        for one, call in ((method, method.add), (cached, of_cached), (partial, of_partial)):
            call(jnp.ones(3))
            assert one.sum[...] == 3 * calls
    assert method.add.eval_shape(jnp.ones(3)) is None and method.sum[...] == 6


GLOBAL = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


def test_captured_objects_are_named() -> None:
    model, optimizer, metrics = objects()

    def of_closure(batch: jax.Array) -> jax.Array:
        return plain_step(model, optimizer, metrics, batch)

    def of_module(x: jax.Array) -> None:
        GLOBAL.kernel[...] = x[:WIDTH]

    bound = functools.partial(plain_step, model, optimizer)
    for step, args, names in (
        (of_closure, (), "of_closure changes an NNX object that it captures .metrics, model, optimizer.: pass it"),
        (of_module, (), "captures .GLOBAL.: pass it as an argument"),
        (bound, (metrics,), "captures .argument 0 of functools.partial, argument 1 of functools.partial."),
    ):
        with pytest.raises(DhelixError, match=names):
            strand_interleave(step)(*args, batch())  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_captured_objects_survive_the_refusal() -> None:
    model, optimizer, metrics = objects()

    def of_closure(batch: jax.Array) -> jax.Array:
        return looped_step(model, optimizer, metrics, batch)

    before = arrays((model, optimizer, metrics))
    with pytest.raises(DhelixError, match="captures"):
        strand_interleave(of_closure, microbatches=COUNT)(batch())
    jax.tree.map(np.testing.assert_array_equal, arrays((model, optimizer, metrics)), before)
