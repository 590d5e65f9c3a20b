"""If `unroll=` put several micro-batches into an iteration, the loop gets one iteration per micro-batch again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dhelix.tests.passes.strands.microbatches import written_out as steps
from dhelix.tests.passes.strands.microbatches.written_out import same_bits


@pytest.mark.parametrize(
    "step, microbatches",
    [
        (steps.unrolled_scan(2), 4), (steps.unrolled_scan(4), 8), (steps.unrolled_scan(2, layers=3), 4),
        (steps.unrolled_fori, 4), (steps.carried_keys, 4),
    ],
)  # fmt: skip
def test_an_iteration_for_each_micro_batch(step: Callable[..., Any], microbatches: int) -> None:
    assert same_bits(step, microbatches) == [microbatches]


@pytest.mark.parametrize(
    "step, microbatches",
    [
        (steps.unrolled_scan(2), 5), (steps.unrolled_scan(4), 7), (steps.unrolled_fori, 5), (steps.first_one_apart, 4),
    ],
)  # fmt: skip
def test_micro_batches_beside_the_loop_join_it(step: Callable[..., Any], microbatches: int) -> None:
    assert same_bits(step, microbatches) == [microbatches]


def test_an_iteration_that_reads_the_sum_stays() -> None:
    """The share of the second gradient depends on the sum so far, so the two gradients are not two micro-batches."""

    def step(w: jax.Array, batch: jax.Array) -> Any:
        def one(total: jax.Array, x: jax.Array) -> Any:
            most = jnp.max(jnp.abs(total))
            for part in (x[:1], x[1:]):
                total = total + jax.grad(steps.scanned)(w, part) / (1 + most)
            return total, None

        return jax.lax.scan(one, jnp.zeros_like(w), batch)[0]

    assert same_bits(step, 3) == [3]


@pytest.mark.parametrize("layers", [1, 3])
def test_loops_over_several_layers_an_iteration_merge(layers: int) -> None:
    assert same_bits(steps.unrolled_scan(1, layers=layers), 4) == [4]
