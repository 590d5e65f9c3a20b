"""A step without a loop for strands gets a message that says what it has instead, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.strands.microbatches.why_no_loop import no_loop
from dhelix.passes.strands.strand_duplication import partitions
from dhelix.runtime.compiler.lowering import hlo_bytes
from dhelix.tests.passes.strands.microbatches.written_out import WIDTH, arguments, scanned, written_out

MICROBATCHES = 3
Loss = Callable[..., jax.Array]


def whole_batch(loss: Loss) -> Callable[..., Any]:
    return lambda w, batch: jax.grad(loss)(w, batch.reshape(-1, WIDTH))


def forward_alone(loss: Loss) -> Callable[..., Any]:
    return lambda w, batch: sum(loss(w, x) for x in batch)


def reason(step: Callable[..., Any]) -> str:
    w, batch = arguments(MICROBATCHES)
    module = HloModule.from_bytes(hlo_bytes(jax.jit(step).lower(w, batch)))
    assert not list(partitions(module, refusals := [])) and not refusals
    return no_loop(module).reason


@pytest.mark.parametrize("loss", [scanned, written_out])
def test_layers_that_are_written_out_are_no_micro_batches(loss: Loss) -> None:
    assert "does not take gradients in a loop over micro-batches" in reason(whole_batch(loss))


def test_a_step_without_gradients() -> None:
    assert "has no backward pass" in reason(forward_alone(scanned))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("loss", [scanned, written_out])
def test_steps_of_an_optimizer_are_named(loss: Loss, jitted: bool) -> None:
    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        for x in batch:
            w = w - gradient(w, x)
        return w

    assert "several optimizer steps" in reason(step)


def test_gradients_of_gradients_are_named() -> None:
    def penalty(w: jax.Array, x: jax.Array) -> jax.Array:
        return scanned(w, x) + jnp.sum(jax.grad(scanned)(w, x) ** 2)

    assert "gradients of gradients" in reason(whole_batch(penalty))


def test_gradients_of_two_losses_are_no_micro_batches() -> None:
    """The operations of the two losses have different names, so they are not one loss of two micro-batches."""

    def step(w: jax.Array, batch: jax.Array) -> Any:
        generator = jax.grad(scanned)(w, batch[0])
        with jax.named_scope("critic"):
            return generator, jax.grad(lambda w, x: jnp.mean((x @ w[0]) ** 4))(w, batch[1])

    assert "does not take gradients in a loop over micro-batches" in reason(step)
