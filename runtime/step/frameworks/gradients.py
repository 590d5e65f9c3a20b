"""Differentiates losses whose arguments are objects of Flax NNX or Equinox, for `dhelix.value_and_grad`.

Objects of Flax NNX: `nnx.DiffState` names the variables that have gradients; the default is `nnx.Param`. Changes that
the loss makes to the objects take effect (`nnx_gradients`). `nnx.value_and_grad` behaves in the same way.

Modules of Equinox, and other trees with leaves that are not arrays: inexact arrays have gradients, and the gradient of
every other leaf is None. `eqx.filter_value_and_grad` behaves in the same way; `jax.value_and_grad` would raise an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dhelix.runtime.step.frameworks import fixed_leaves, nnx_front
from dhelix.runtime.step.frameworks.nnx_gradients import NnxGradients
from dhelix.runtime.step.microbatches.batch_split import indices


class Differentiate(Protocol):
    """The type of a function that differentiates a loss of arrays, at once or in a loop over micro-batches."""

    def __call__(self, loss_fn: Callable[..., Any], carried: Any = None) -> Callable[..., Any]:
        """
        Args:
          loss_fn: function of arrays; `loss_fn(*args, **kwargs)` returns `(loss, aux)`. If `carried` is given, it also
            takes the keyword `carried`, and its `aux` is a pair `(carried, aux)`.
          carried: loop-carried value for the first micro-batch. Each later micro-batch gets the `carried` that the
            previous micro-batch returned.

        Returns:
          A function that returns `((loss, aux), gradients)`. If `carried` is given, `aux` is a pair whose first part
          is the `carried` that the last micro-batch returned.
        """
        ...


def numbers_of(argnums: Any) -> Any:
    """Returns `argnums` with each `nnx.DiffState` replaced by its position."""
    if isinstance(argnums, Sequence):
        return tuple(map(numbers_of, argnums))
    nnx = nnx_front.loaded()
    return argnums.argnum if nnx is not None and isinstance(argnums, nnx.DiffState) else argnums


def of_objects(
    loss_fn: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> NnxGradients | FilteredGradients | None:
    """Returns an object that differentiates a loss of these arguments; None if `jax.value_and_grad` can do it."""
    if nnx_front.has_objects((args, kwargs)):
        return NnxGradients(loss_fn, argnums, has_aux)
    numbers = indices(argnums)
    differentiated = [args[number] for number in numbers if -len(args) <= number < len(args)]
    if fixed_leaves.has_fixed_leaves(differentiated):
        return FilteredGradients(loss_fn, numbers, has_aux)
    return None


class FilteredGradients:
    """Differentiates a loss as `eqx.filter_value_and_grad` does, but with respect to one or several arguments."""

    def __init__(self, loss_fn: Callable[..., Any], numbers: tuple[int, ...], has_aux: bool):
        self._loss_fn = loss_fn
        self._numbers = numbers
        self._has_aux = has_aux

    def run(self, differentiate: Differentiate, splits: bool, args: Any, kwargs: Any) -> Any:
        del splits  # `differentiate` handles micro-batches
        numbers = {number % len(args) for number in self._numbers}
        taken = [i in numbers or fixed_leaves.has_fixed_leaves(arg) for i, arg in enumerate(args)]
        differentiated = [
            jax.tree.map(lambda leaf, i=i: leaf if i in numbers and _is_inexact(leaf) else None, arg) if take else arg
            for i, (arg, take) in enumerate(zip(args, taken, strict=True))
        ]

        def pure(*some: Any, **kwargs: Any) -> Any:
            whole = [_filled(x, arg) if take else x for x, arg, take in zip(some, args, taken, strict=True)]
            result = self._loss_fn(*whole, **kwargs)
            loss, aux = result if self._has_aux else (result, None)
            return loss, jax.tree.map(_fixed_unless_number, aux)

        (loss, aux), gradients = differentiate(pure)(*differentiated, **kwargs)
        return (loss, fixed_leaves.free(aux)) if self._has_aux else loss, gradients


def _is_inexact(leaf: Any) -> bool:
    return fixed_leaves.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _filled(some: Any, tree: Any) -> Any:
    """The leaves of `some`, with each None replaced by the leaf of `tree` in its place."""
    return jax.tree.map(lambda x, leaf: leaf if x is None else x, some, tree, is_leaf=lambda x: x is None)


def _fixed_unless_number(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | complex) else fixed_leaves.fixed(leaf)
