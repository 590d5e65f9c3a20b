"""For tests of `value_and_grad`: gradient functions over micro-batches, and comparisons with JAX's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.runtime.step.microbatches.value_and_grad import microbatching

ROWS, WIDTH = 16, 8


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.RandomState(sum(shape)).standard_normal(shape), dtype)


def mean_square(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def split(function: Callable[..., Any], microbatches: int = 4, reduce: str = "mean") -> Any:
    """`function` jitted; its value_and_grad calls loop over micro-batches."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with microbatching(microbatches, reduce):
            return function(*args, **kwargs)

    return jax.jit(traced)


def assert_same_types(expected: Any, actual: Any) -> None:
    """Asserts that all leaves of two results of jitted functions have equal types."""
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        name = jax.tree_util.keystr(path)
        assert (want.dtype, want.shape) == (got.dtype, got.shape), name
        assert getattr(want, "weak_type", False) == getattr(got, "weak_type", False), name


def assert_close(expected: Any, actual: Any, tolerance: float = 1e-6, terms: float = 0.0) -> None:
    """Asserts equal types, and numbers that differ by at most `tolerance` times a scale.

    The scale is each leaf's largest magnitude, or `terms` if that is larger. `terms` is the magnitude of the summed
    terms, because a sum of terms that cancel has no scale of its own.
    """
    assert_same_types(expected, actual)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        if want.dtype != jax.dtypes.float0:
            want, got = _wide(want), _wide(got)
            scale = max(float(np.max(np.abs(want), initial=0)), terms, 1e-30)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)
