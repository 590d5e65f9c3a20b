"""What tells the arguments of a step apart: for which of them it is specialized."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax


def leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        return leaf.aval, place(leaf.sharding), leaf.committed
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return type(leaf), jax.typeof(leaf)


def place(sharding: jax.sharding.Sharding) -> Hashable:
    """Equal for shardings that lay an array out alike. A step's results are often told otherwise than its arguments
    were, without axes of one device, and `jax.jit` compiles once for both."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec, sizes = sharding.spec, sharding.mesh.shape
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    parts = [tuple(axis for axis in part if sizes[axis] > 1) for part in parts]
    while parts and not parts[-1]:
        parts.pop()
    return sharding.mesh, tuple(parts), spec.unreduced, spec.reduced, sharding.memory_kind
