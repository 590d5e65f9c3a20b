"""A step without a loop to make strands of is told what it has instead, and what to do about that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.microbatches.missing_loop import no_loop
from dhelix.runtime.lowering import hlo_bytes

LAYERS, MICROBATCHES, WIDTH = 4, 3, 8
Loss = Callable[..., jax.Array]


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2)


def written_out(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of layers as wide as a micro-batch has rows, so that gradients of weights and of activations look alike."""
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ w[layer])
    return jnp.mean(x**2)


def python_loop(loss: Loss) -> Callable[..., Any]:
    return lambda w, batch: sum(jax.grad(loss)(w, x) for x in batch)


def python_loop_over_a_jitted_function(loss: Loss) -> Callable[..., Any]:
    gradient = jax.jit(jax.grad(loss))
    return lambda w, batch: sum(gradient(w, x) for x in batch)


def unrolled_scan(loss: Loss) -> Callable[..., Any]:
    def add(total: jax.Array, w: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.grad(loss)(w, x), None

    return lambda w, batch: jax.lax.scan(lambda t, x: add(t, w, x), jnp.zeros_like(w), batch, unroll=True)[0]


def whole_batch(loss: Loss) -> Callable[..., Any]:
    return lambda w, batch: jax.grad(loss)(w, batch.reshape(-1, WIDTH))


def forward_alone(loss: Loss) -> Callable[..., Any]:
    return lambda w, batch: sum(loss(w, x) for x in batch)


def reason(step: Callable[..., Any]) -> str:
    w = jnp.ones((LAYERS, WIDTH, WIDTH))
    batch = jnp.asarray(np.ones((MICROBATCHES, WIDTH, WIDTH), np.float32))
    return no_loop(HloModule.from_bytes(hlo_bytes(jax.jit(step).lower(w, batch)))).reason


@pytest.mark.parametrize("loss", [scanned, written_out])
@pytest.mark.parametrize("step", [python_loop, python_loop_over_a_jitted_function, unrolled_scan])
def test_micro_batches_that_are_written_out_are_counted(step: Callable[..., Any], loss: Loss) -> None:
    found = reason(step(loss))
    assert "takes gradients 3 times over" in found and "a Python loop or unroll= has written out" in found


@pytest.mark.parametrize("loss", [scanned, written_out])
def test_layers_that_are_written_out_are_no_micro_batches(loss: Loss) -> None:
    assert "no loop over micro-batches that takes gradients" in reason(whole_batch(loss))


def test_a_step_without_gradients() -> None:
    assert "holds no backward pass" in reason(forward_alone(scanned))


def test_gradients_of_two_losses_are_no_micro_batches() -> None:
    """Neither operation is the other's: they have other names."""

    def step(w: jax.Array, batch: jax.Array) -> Any:
        generator = jax.grad(scanned)(w, batch[0])
        with jax.named_scope("critic"):
            return generator, jax.grad(lambda w, x: jnp.mean((x @ w[0]) ** 4))(w, batch[1])

    assert "no loop over micro-batches that takes gradients" in reason(step)
