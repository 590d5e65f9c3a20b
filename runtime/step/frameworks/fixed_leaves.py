"""Runs a step on arguments with leaves that are not arrays, such as functions, names and flags in Equinox modules.

Such leaves are part of the program, as in `eqx.filter_jit`. Each of them becomes a `Fixed`, which JAX treats as part of
the tree's structure. Another value of the leaf gives another structure, and so another program. Arrays stay where they
are among the arguments, so options for donation and shardings stay valid.

A call uses this front in two cases only: `jax.jit` would refuse the call, or an Equinox module has a Python number
among its leaves. Methods of such a module may need the number's value while they are traced, as for
`eqx.nn.Dropout.inference`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dhelix.passes.framework.manager import say_once

_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_MANY = 8  # number of argument structures of one step at which a warning is logged


@jax.tree_util.register_static
class Fixed:
    """A leaf that is part of the program. Two `Fixed` are equal if the types and values of their leaves are equal."""

    def __init__(self, value: Any):
        self.value = value
        sign = str(value) if isinstance(value, float | complex) else ""  # tells -0.0 from 0.0, whose programs differ
        self._key = type(value), sign
        self._hash = hash((self._key, value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fixed) or self._key != other._key:
            return False
        return self.value is other.value or bool(self.value == other.value)

    def __repr__(self) -> str:
        return f"Fixed({self.value!r})"


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, or describes an array (`jax.ShapeDtypeStruct`). Python numbers are not arrays."""
    return isinstance(leaf, _ARRAYS) or (not isinstance(leaf, _NUMBERS) and _has_type(leaf))


def fixed(tree: Any) -> Any:
    """Wraps leaves that are not arrays in `Fixed`. Unhashable leaves stay as they are; JAX rejects them by name."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else _fixed(leaf), tree)


def free(tree: Any) -> Any:
    """Replaces each `Fixed` in a tree by its value. This is the inverse of `fixed`."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Fixed) else x, tree, is_leaf=lambda x: isinstance(x, Fixed))


def has_fixed_leaves(tree: Any) -> bool:
    """Whether `jax.jit` would reject a leaf, or an Equinox module has a leaf that is not an array."""
    if not all(isinstance(leaf, (*_ARRAYS, *_NUMBERS)) or _has_type(leaf) for leaf in jax.tree.leaves(tree)):
        return True
    return not all(is_array(leaf) for leaf in jax.tree.leaves(equinox_modules(tree)))


def equinox_modules(tree: Any) -> list[Any]:
    """The outermost Equinox modules in a tree."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, equinox.Module))
    return [x for x in nodes if isinstance(x, equinox.Module)]


class FixedLeavesJit:
    """Jits functions with `jax.jit`. The arguments are trees made by `fixed`; results pass through `fixed`, too."""

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        @functools.wraps(function)
        def pure(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = free((args, kwargs))
            return fixed(function(*args, **kwargs))

        return jax.jit(pure, **options)

    results = __call__


class FixedLeavesFront:
    """Runs a step on arguments with leaves that are not arrays."""

    def __init__(self, step: Any):
        self._name = step.__name__
        self.inner = step.with_jit(FixedLeavesJit())
        self._structures: set[Any] = set()

    def run(self, method: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Calls `method` of the inner step on fixed arguments. Returns the results without `Fixed`."""
        args, kwargs = self._fixed(args, kwargs)
        self._count(args, kwargs)
        return free(getattr(self.inner, method)(*args, **kwargs, **options))

    def clear_cache(self) -> None:
        self._structures.clear()
        self.inner.clear_cache()

    def _fixed(self, args: Any, kwargs: Any) -> Any:
        """Applies `fixed` to all arguments except static arguments."""
        numbers, names = self.inner.static_positions(args)
        args = tuple(arg if index in numbers else fixed(arg) for index, arg in enumerate(args))
        return args, {name: arg if name in names else fixed(arg) for name, arg in kwargs.items()}

    def _count(self, args: Any, kwargs: Any) -> None:
        """Logs a warning if many calls have compiled new programs because of changing leaves that are not arrays."""
        if len(self._structures) >= _MANY:
            return
        self._structures.add(jax.tree.structure((args, kwargs)))
        if len(self._structures) == _MANY:
            reason = (
                f"was called with {_MANY} values of arguments that are not arrays (numbers, names, functions) and is "
                "compiled for each, as under eqx.filter_jit: pass changing numbers as jnp.asarray(number)"
            )
            say_once(f"{self._name} {reason}", (self._name, reason))


def unwrap_filter_jit(function: Any) -> tuple[Any, dict[str, Any]] | None:
    """Unwraps a result of `eqx.filter_jit`; returns None for other functions.

    Returns the function inside, and the arguments that `eqx.filter_jit` donates, as options of `jax.jit`.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if not type(function).__module__.startswith("equinox.") or not hasattr(function, "donate_first") or wrapped is None:
        return None
    parameters = inspect.signature(wrapped).parameters.values()
    positions = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    numbers = [i for i in range(len(positions)) if (function.donate_rest if i else function.donate_first)]
    donated = {"donate_argnums": numbers, "donate_argnames": names if function.donate_rest else []}
    return wrapped, {option: tuple(value) for option, value in donated.items() if value}


def _fixed(leaf: Any) -> Any:
    try:
        return Fixed(leaf)
    except TypeError:
        return leaf


def _has_type(leaf: Any) -> bool:
    """Whether JAX knows the leaf's type, because the leaf is an array or a number, or has a shape and a dtype."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True
