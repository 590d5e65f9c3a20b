"""Makes keys from the arguments of a step, and a name from its function. A step is specialized once for each key."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax


def name_of(function: Any) -> str:
    """The name of a function, or of the function that a `functools.partial` holds."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        return leaf.aval, place(leaf.sharding), leaf.committed
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return type(leaf), jax.typeof(leaf)


def place(sharding: jax.sharding.Sharding) -> Hashable:
    """Returns a key that is equal for shardings with the same layout.

    The shardings of a step's results often lack mesh axes of size 1 that the arguments' shardings have. `jax.jit`
    compiles one program for both kinds of shardings, so their keys are equal.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec, sizes = sharding.spec, sharding.mesh.shape
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    parts = [tuple(axis for axis in part if sizes[axis] > 1) for part in parts]
    while parts and not parts[-1]:
        parts.pop()
    return sharding.mesh, tuple(parts), spec.unreduced, spec.reduced, sharding.memory_kind
