"""Unrolled micro-batches become a loop of two strands that computes the same bits.

StableHLO's reference interpreter runs both programs and rounds after each operation. XLA fuses unrolled micro-batches
differently than a loop's, and sums several in float32 where the program rounds to bfloat16 in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.strands.microbatches.written_out.equal_parts import Unequal, equal_parts
from dhelix.passes.strands.strand_duplication import partitions
from dhelix.runtime.compiler.lowering import hlo_bytes
from dhelix.tests.passes.strands.microbatches import written_out as steps
from dhelix.tests.passes.strands.microbatches.written_out import same_bits

Step = Callable[..., Any]


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize(
    "step",
    [
        steps.from_zeros, steps.from_the_first, steps.own_mean, steps.rows_of_a_batch, steps.auxiliary_outputs,
        steps.jitted_gradient, steps.jitted_addition, steps.jitted_loop, steps.named_scopes,
        steps.written_out_layers, steps.norms, steps.unrolled_scan(True), steps.steps_of_written_out,
    ],
    ids=lambda step: step.__qualname__.partition(".")[0],
)  # fmt: skip
def test_the_same_bits_in_two_strands(step: Step, microbatches: int) -> None:
    assert same_bits(step, microbatches) == [microbatches]


@pytest.mark.parametrize("keys", ["split", "folded in", "a chain"])
def test_each_micro_batch_keeps_its_random_numbers(keys: str) -> None:
    assert same_bits(steps.dropout(keys), 3) == [3]


def test_sums_in_few_bits_are_rounded_after_each_micro_batch() -> None:
    def step(w: jax.Array, batch: jax.Array) -> Any:
        total: Any = sum(jax.grad(steps.scanned)(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)) for x in batch)
        return total.astype(jnp.float32)

    assert same_bits(step, 4) == [4]


def refusal(step: Step, microbatches: int = 4) -> str:
    """The reason why no strands are made. Checks that the step is left alone."""
    module = HloModule.from_bytes(hlo_bytes(jax.jit(step).lower(*steps.arguments(microbatches))))
    refusals: list[Any] = []
    assert not list(partitions(module, refusals))
    assert not any("microbatches" in i.name for i in module.entry.instructions)
    return refusals[0].reason if refusals else ""


def grads_of(losses: Callable[[int], Step]) -> Step:
    return lambda w, batch: sum(jax.grad(losses(n))(w, x) for n, x in enumerate(batch))


def test_another_loss_for_one_micro_batch() -> None:
    other = grads_of(lambda n: lambda w, x: steps.scanned(jnp.sin(w) if n == 2 else w, x))
    assert "micro-batch 3 has f32[3,4,4] multiply" in refusal(other)


def test_micro_batches_of_several_sizes() -> None:
    def step(w: jax.Array, batch: jax.Array) -> Any:
        rows = batch.reshape(-1, steps.WIDTH)
        return sum(jax.grad(steps.scanned)(w, x) for x in (rows[:2], rows[2:4], rows[4:5], rows[5:]))

    found = refusal(step)
    assert (
        "takes 4 independent gradients" in found
        and "micro-batch 3 has another shape than the first one: (s32[], f32[1,4]" in found
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_side_effects(ordered: bool) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        value = steps.scanned(w, x)
        jax.debug.callback(lambda value: None, value, ordered=ordered)
        return value

    assert "has ordered side effects" in refusal(lambda w, batch: steps.from_zeros(w, batch, loss))


def test_what_is_kept_of_each_micro_batch_is_small() -> None:
    def step(w: jax.Array, batch: jax.Array) -> Any:
        grads = [jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x) for x in batch]
        return jnp.stack(grads)

    w, batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((2, 8, 4096), jnp.float32)
    module = HloModule.from_bytes(hlo_bytes(jax.jit(step).lower(w, batch)))
    with pytest.raises(Unequal, match="kept of each micro-batch and not summed"):
        equal_parts(module.entry)


def test_layers_that_are_written_out_are_no_micro_batches() -> None:
    assert not refusal(lambda w, batch: jax.grad(steps.written_out)(w, batch.reshape(-1, steps.WIDTH)))


def test_steps_of_an_optimizer_are_no_micro_batches() -> None:
    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        for x in batch:
            w = steps.updated(w, jax.grad(steps.scanned)(w, x))
        return w

    assert not refusal(step)
