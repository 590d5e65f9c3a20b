"""A decorated step trains as the plain one does, whatever the state is made of."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dhelix.runtime.strand_interleave import strand_interleave
from dhelix.tests.runtime.steps import STEPS


@pytest.mark.parametrize("name", STEPS)
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
