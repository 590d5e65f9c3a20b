"""Gradients that are split in each micro-batch of a shard_map: reduce-scattered where they appear."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dhelix.passes.hlo import shapes
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.manual_steps import (
    Gradients,
    Loss,
    P,
    at_once,
    depth,
    in_groups,
    program,
    sharded,
    summed,
    whole_stacks,
)
from dhelix.tests.passes.sharding.states.programs import WIDTH
from dhelix.tests.quick import slow_after

ZERO2 = {"gradients": ("dp",)}
SLOT = [1, WIDTH // 8, WIDTH]


@pytest.mark.parametrize("spec", slow_after(1, [P(None, "dp"), P(None, None, "dp")]), ids=["rows", "columns"])
@pytest.mark.parametrize("gradients", [summed, at_once], ids=lambda g: g.__name__)
def test_each_layer_is_reduce_scattered_in_each_micro_batch(gradients: Gradients, spec: P) -> None:
    before, given = program(gradients=gradients, spec=spec)
    after = sharded(before, **ZERO2)
    (size,) = programs.sizes(after, "reduce-scatter")
    assert sorted(size) == sorted(SLOT) and not [s for s in programs.sizes(after, "all-reduce") if s]
    assert depth(after, "reduce-scatter") == [2 if gradients is summed else 1]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_accumulators_have_the_size_of_shards() -> None:
    assert whole_stacks(program()[0]) > 0
    assert whole_stacks(sharded(program()[0])) == 0


def test_layers_in_groups() -> None:
    before, given = program(in_groups)
    after = sharded(before, **ZERO2)
    assert depth(after, "reduce-scatter") == [3]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def weighted(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """Scaled in each micro-batch and after all, and converted."""

    def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + 0.5 * jax.grad(loss, argnums=1)(x, w.astype(jnp.bfloat16)).astype(jnp.float32) / 3.0, None

    return lax.scan(add, jnp.zeros(w.shape, jnp.float32), xs.astype(jnp.bfloat16))[0] / 2.0


def test_a_gradient_is_summed_in_the_type_in_which_it_appears() -> None:
    before, given = program(gradients=weighted)
    after = sharded(before, **ZERO2)
    (scatter,) = programs.instructions(after, "reduce-scatter")
    assert scatter.shape.element_type == shapes.BF16 and depth(after, "reduce-scatter") == [2]
    assert scatter.called[0].root.shape.element_type == shapes.BF16
    programs.same(before.compile()(*given), after.compile()(*given), 1e-2)


def embedded(x: jax.Array, w: jax.Array) -> jax.Array:
    """A parameter that no loop over layers reads."""
    return jnp.sum(jnp.tanh(jnp.einsum("bi,lij->blj", x, w)))


def test_outside_of_layers_each_micro_batch_reduces_once() -> None:
    before, given = program(embedded)
    after = sharded(before, **ZERO2)
    assert depth(after, "reduce-scatter") == [1]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def read_in_each(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """The mean of the squares of the sum so far is read, too."""

    add = lambda total, x: (total + jnp.mean(total**2) + jax.grad(loss, argnums=1)(x, w), None)  # noqa: E731
    return lax.scan(add, jnp.zeros_like(w), xs)[0]


def scaled_by_device(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """Each device has another factor, so the factor must come before the sum over devices."""
    factor = lax.axis_index("dp").astype(jnp.float32)
    return summed(loss, w, xs) * factor


def started(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """The sum starts from something else than zeros."""
    add = lambda total, x: (total + jax.grad(loss, argnums=1)(x, w), None)  # noqa: E731
    return lax.scan(add, jnp.sin(w), xs)[0]


def decayed(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """A transposed copy of the sum is added in each micro-batch."""
    add = lambda total, x: (total + total.swapaxes(1, 2) + jax.grad(loss, argnums=1)(x, w), None)  # noqa: E731
    return lax.scan(add, jnp.zeros_like(w), xs)[0]


@pytest.mark.parametrize(
    ("gradients", "loops"), [(read_in_each, 0), (scaled_by_device, 0), (decayed, 0), (started, 2)],
    ids=["read", "scaled by device", "transposed", "started"],
)  # fmt: skip
def test_sums_that_are_not_only_added_up_are_reduced_behind_the_loop(gradients: Gradients, loops: int) -> None:
    before, given = program(gradients=gradients)
    after, report = programs.changed(before, programs.state_sharding(gradients=("dp",)))
    assert max(depth(after, "reduce-scatter")) == loops
    said: list[Any] = [note.message for note in report.notes]
    assert ("gradients stay whole until the last micro-batch" in said) == (gradients in (read_in_each, decayed))
    programs.same(before.compile()(*given), after.compile()(*given), 1e-5)
