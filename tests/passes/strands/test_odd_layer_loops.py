"""Hand-written layer loops in custom derivatives: strands keep them exact, or leave them alone.

JAX's own scans read and write each slot of a stack once, hand each value on once, and count in one type. These do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import FAILED
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.runtime.step.pass_lists import strand_passes
from dhelix.tests.passes.strands.test_generated_programs import interpret
from dhelix.tests.quick import slow_but

MICROBATCHES, LAYERS, ROWS, WIDTH = 5, 4, 3, 4
_ODD = (
    "nothing", "indices are unsigned", "indices are of two types", "a stack starts with numbers of its own",
    "residuals are read after the loop", "a sum is handed on twice", "gradients are handed on twice",
    "slots lie beyond the stack",
)  # fmt: skip


def weights() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((LAYERS, WIDTH, WIDTH)) / 2).astype(np.float32)


def step_of(odd: str) -> Callable[[Any, Any], Any]:
    """A step that sums over micro-batches, with layer loops that are odd in one way."""
    ahead_in = np.uint32 if odd.startswith("indices") else np.int32
    back_in = np.uint32 if odd == "indices are unsigned" else np.int32

    def slot(stack: Any, i: Any) -> Any:
        zero = jnp.zeros((), i.dtype)
        return jax.lax.dynamic_slice(stack, (i, zero, zero), (1, *stack.shape[1:]))[0]

    def put(stack: Any, value: Any, i: Any) -> Any:
        zero = jnp.zeros((), i.dtype)
        return jax.lax.dynamic_update_slice(stack, value[None], (i, zero, zero))

    def ahead(x: Any, w: Any) -> Any:
        residuals = jnp.zeros((LAYERS, *x.shape))
        if odd == "a stack starts with numbers of its own":
            own = jax.lax.iota(jnp.float32, LAYERS) * x[0, 0]
            residuals = jax.lax.broadcast_in_dim(own, residuals.shape, (0,))

        def layer(state: Any) -> Any:
            i, x, residuals = state
            y = jnp.tanh(x @ slot(w, i))
            return i + ahead_in(1), y, put(residuals, y, i)

        return jax.lax.while_loop(lambda s: s[0] < ahead_in(LAYERS), layer, (ahead_in(0), x, residuals))[1:]

    def back(saved: Any, g: Any) -> Any:
        residuals, w, sums, others = saved
        # beyond the stack, each index is clamped to the last slot
        place = LAYERS if odd == "slots lie beyond the stack" else 0

        def layer(state: Any) -> Any:
            i, g, sums, others, made, twice, residuals = state
            y = slot(residuals, i)
            h = g * (1 - y * y)
            at = i + back_in(place)
            sums = put(sums, slot(sums, at) * 0.7 + y.T @ h, at)
            made = put(made, y.T @ h, i)
            others = sums if odd == "a sum is handed on twice" else others
            twice = made if odd == "gradients are handed on twice" else twice
            return i - back_in(1), h @ slot(w, i).T, sums, others, made, twice, jax.jit(lambda x: x)(residuals)

        start = back_in(LAYERS - 1), g, sums, others, jnp.zeros_like(w), jnp.zeros_like(w), residuals
        last = np.array(-1).astype(back_in)
        _, g, sums, others, made, twice, residuals = jax.lax.while_loop(lambda s: s[0] != last, layer, start)
        if odd == "gradients are handed on twice":
            others = others + twice
        if odd == "residuals are read after the loop":
            made = made * (1 + jnp.sum(residuals))
        return g, made, sums, others

    @jax.custom_vjp
    def layers(x: Any, w: Any, sums: Any, others: Any) -> Any:
        return ahead(x, w)[0]

    def saving(x: Any, w: Any, sums: Any, others: Any) -> Any:
        y, residuals = ahead(x, w)
        return y, (residuals, w, sums, others)

    layers.defvjp(saving, back)

    def step(w: Any, batch: Any) -> Any:
        def micro_batch(state: Any, x: Any) -> Any:
            total, sums = state

            def loss(w: Any, sums: Any, others: Any) -> Any:
                return jnp.mean(layers(x, w, sums, others) ** 2)

            made, sums, others = jax.grad(loss, argnums=(0, 1, 2))(w, sums, jnp.zeros_like(w))
            return (total + made, sums), others

        return jax.lax.scan(micro_batch, (jnp.zeros_like(w), jnp.zeros_like(w)), batch)

    return step


def check(step: Callable[[Any, Any], Any], skew: int) -> None:
    batch = np.random.default_rng(1).standard_normal((MICROBATCHES, ROWS, WIDTH)).astype(np.float32)
    lowered = jax.jit(step).lower(weights(), batch)
    changed, report = PassManager(strand_passes(skew)).run(Stage.LOWERED, hlo_bytes(lowered))
    assert changed is not None
    assert [f"{entry.name}: {entry.notes[-1]}" for entry in report.passes if entry.outcome == FAILED] == []
    both = interpret(lowered, (weights(), batch)), interpret(with_hlo(lowered, changed), (weights(), batch))
    assert [n for n, (x, y) in enumerate(zip(*both, strict=True)) if not np.array_equal(x, y)] == []


@pytest.mark.parametrize("skew", slow_but([0, 2], [0, 1, 2]))
@pytest.mark.parametrize("odd", _ODD)
def test_same_bits(odd: str, skew: int) -> None:
    check(step_of(odd), skew)


@pytest.mark.parametrize("skew", [0, 1])
def test_two_sums_that_continue_one(skew: int) -> None:
    """The second sum adds other gradients to the first sum, and is overwritten in each micro-batch."""

    def loss(w: Any, v: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, both: (jnp.tanh(x @ both[0]) @ both[1] + x, None), x, (w, v))[0] ** 2)

    def step(w: Any, batch: Any) -> Any:
        def micro_batch(state: Any, x: Any) -> Any:
            made = jax.grad(loss, argnums=(0, 1))(w, 0.5 * w, x)
            return (state[0] + made[0], state[0] + made[1]), None

        return jax.lax.scan(micro_batch, (jnp.zeros_like(w), jnp.zeros_like(w)), batch)[0]

    check(step, skew)
