"""Reads and writes one entry of an array at an index that is known only at run time.

Each access is one dynamic slice or one dynamic update. In the state of a loop, XLA performs these in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def at(array: jax.Array, *index: Any) -> jax.Array:
    """Returns `array[index]`, computed by one dynamic slice."""
    if array.shape[0] == 1 and len(index) == 1:
        return array[0]
    return _slice(array, index).reshape(array.shape[len(index) :])


def put(array: jax.Array, value: jax.Array, *index: Any) -> jax.Array:
    """Returns `array` with `value` at `index`."""
    if array.shape[0] == 1 and len(index) == 1:
        return value[None]
    return _update(array, value.reshape([1] * len(index) + list(value.shape)), index)


def add(total: jax.Array, value: jax.Array, counts: jax.Array, *index: Any) -> jax.Array:
    """Returns `total` with `value` added at `index` if `counts` is True, else `total`.

    The code is one slice and one update, so XLA works in place.
    """
    value = value.astype(total.dtype).reshape([1] * len(index) + list(value.shape))
    return _update(total, _slice(total, index) + jnp.where(counts, value, 0), index)


def _slice(array: jax.Array, index: Sequence[Any]) -> jax.Array:
    sizes = [1] * len(index) + list(array.shape[len(index) :])
    return lax.dynamic_slice(array, _starts(array, index), sizes)


def _update(array: jax.Array, part: jax.Array, index: Sequence[Any]) -> jax.Array:
    return lax.dynamic_update_slice(array, part, _starts(array, index))


def _starts(array: jax.Array, index: Sequence[Any]) -> list[jax.Array]:
    """Start indices, all int32. With JAX_ENABLE_X64, a loop counter is wider than a table's entries."""
    return [jnp.int32(place) for place in (*index, *[0] * (array.ndim - len(index)))]


def choose(condition: jax.Array, yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """Returns the arrays of `yes` if the condition holds, else the arrays of `no`."""
    return [jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def where[T](condition: jax.Array, yes: T, no: T) -> T:
    """Returns the tree of arrays `yes` if the condition holds, else `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def zeros(like: Any, *leading: int, dtype: Any = None) -> jax.Array:
    """Returns zeros of shape [*leading, *like.shape]."""
    return jnp.zeros((*leading, *like.shape), dtype or like.dtype)


def fill(like: Sequence[Any], places: Sequence[int], values: list[Any]) -> list[Any]:
    """A list as long as `like`, with `values` at `places` and None elsewhere."""
    result: list[Any] = [None] * len(like)
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result


def wide(like: Any) -> Any:
    """The type in which values like `like` are summed: at least float32, if they are floats."""
    return jnp.promote_types(like.dtype, jnp.float32) if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype
