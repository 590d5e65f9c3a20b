"""A decorated step trains as the plain one does, with any kind of state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.steps import STEPS, batch, squared_error, weights


@pytest.mark.parametrize("name", slow_after(1, STEPS))
def test_three_steps_of_training(name: str) -> None:
    step, state, batch = STEPS[name]()
    plain = jax.jit(step)
    interleaved = strand_interleave(step, microbatches=4, donate_argnums=0, strict=True)
    expected, actual = state, jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
    for _ in range(3):
        expected, expected_metrics = plain(expected, batch)
        actual, metrics = interleaved(actual, batch)
        pairs = zip(jax.tree.leaves(expected_metrics), jax.tree.leaves(metrics), strict=True)
        for want, got in pairs:
            np.testing.assert_allclose(want, got, rtol=1e-5)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(want, got, atol=1e-5)
    assert interleaved.report(actual, batch)["strand-duplication"].changed


def test_own_loop_is_used_as_it_stands_to_the_last_bit() -> None:
    def step(w: jax.Array, batches: Any) -> Any:
        def microbatch(carry: Any, one: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(squared_error)(w, one)), None

        zeros = jnp.float32(0), jnp.zeros_like(w)
        (loss, grads), _ = jax.lax.scan(microbatch, zeros, batches)
        return w - 0.1 * grads, loss

    batches = jax.tree.map(lambda x: x.reshape(4, 4, -1), batch())
    plain, interleaved = jax.jit(step), strand_interleave(step, strict=True, donate_argnums=0)
    expected, actual = weights(), weights()
    for _ in range(3):
        expected, expected_loss = plain(expected, batches)
        actual, loss = interleaved(actual, batches)
        np.testing.assert_array_equal(expected, actual)
        np.testing.assert_array_equal(expected_loss, loss)
    assert interleaved.report(actual, batches)["strand-duplication"].changed


def test_step_without_a_backward_pass_runs_as_it_is(caplog: Any) -> None:
    def evaluate(w: jax.Array, batches: Any) -> jax.Array:
        return jax.lax.map(lambda one: squared_error(w, one), batches)

    batches = jax.tree.map(lambda x: x.reshape(4, 4, -1), batch())
    decorated = strand_interleave(evaluate)
    np.testing.assert_array_equal(decorated(weights(), batches), jax.jit(evaluate)(weights(), batches))
    (record,) = caplog.records
    assert "jit_evaluate: pass strand-duplication changes nothing" in record.getMessage()
