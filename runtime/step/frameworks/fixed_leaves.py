"""Arguments whose leaves are partly no arrays: functions, names, flags, as modules of Equinox have them.

They are part of the program, as under `eqx.filter_jit`: each becomes a `Fixed`, which JAX counts to the structure of
its tree. Another value is another structure, and so another program. Where arrays are expected nothing changes:
positions of arguments stay, and with them donation and shardings.

A call goes this way only if `jax.jit` would refuse it, or where an Equinox module has a number of Python's among its
leaves (`eqx.nn.Dropout.inference`), which its methods ask for its value.
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
_MANY = 8  # programs of one step that differ in Fixed leaves alone


@jax.tree_util.register_static
class Fixed:
    """A leaf that is part of the program. Equal to one of the same type and value."""

    def __init__(self, value: Any):
        self.value = value
        sign = str(value) if isinstance(value, float | complex) else ""  # -0.0 == 0.0
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
    """Whether it is an array, or has a type and no value; numbers of Python's are none."""
    return isinstance(leaf, _ARRAYS) or (not isinstance(leaf, _NUMBERS) and _has_type(leaf))


def fixed(tree: Any) -> Any:
    """Leaves that are no arrays as `Fixed`; those without a hash stay, and JAX refuses them by name."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else _fixed(leaf), tree)


def free(tree: Any) -> Any:
    """The inverse of `fixed`."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Fixed) else x, tree, is_leaf=lambda x: isinstance(x, Fixed))


def has_fixed_leaves(tree: Any) -> bool:
    """Whether `jax.jit` would refuse a leaf, or an Equinox module has a number among its leaves."""
    if not all(isinstance(leaf, (*_ARRAYS, *_NUMBERS)) or _has_type(leaf) for leaf in jax.tree.leaves(tree)):
        return True
    return not all(is_array(leaf) for leaf in jax.tree.leaves(equinox_modules(tree)))


def equinox_modules(tree: Any) -> list[Any]:
    """The outermost modules of Equinox in a tree."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, equinox.Module))
    return [x for x in nodes if isinstance(x, equinox.Module)]


class FixedLeavesJit:
    """`jax.jit` for functions of trees that have been `fixed`; results come back fixed, too."""

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        @functools.wraps(function)
        def pure(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = free((args, kwargs))
            return fixed(function(*args, **kwargs))

        return jax.jit(pure, **options)

    results = __call__


class FixedLeavesFront:
    """What a step does with arguments that have leaves to fix."""

    def __init__(self, step: Any):
        self._name = step.__name__
        self.inner = step.with_jit(FixedLeavesJit())
        self._structures: set[Any] = set()

    def run(self, method: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """The inner step's `method`, with results as the user's function returns them."""
        args, kwargs = self._fixed(args, kwargs)
        self._count(args, kwargs)
        return free(getattr(self.inner, method)(*args, **kwargs, **options))

    def clear_cache(self) -> None:
        self._structures.clear()
        self.inner.clear_cache()

    def _fixed(self, args: Any, kwargs: Any) -> Any:
        """Static arguments stay as they are."""
        numbers, names = self.inner.static_positions(args)
        args = tuple(arg if index in numbers else fixed(arg) for index, arg in enumerate(args))
        return args, {name: arg if name in names else fixed(arg) for name, arg in kwargs.items()}

    def _count(self, args: Any, kwargs: Any) -> None:
        """A line where every step compiles anew because a number that changes is not an array."""
        if len(self._structures) >= _MANY:
            return
        self._structures.add(jax.tree.structure((args, kwargs)))
        if len(self._structures) == _MANY:
            reason = (
                f"was called with {_MANY} values of arguments that are no arrays (numbers, names, functions), and is"
                " compiled for each of them, as under eqx.filter_jit: pass a number that changes as jnp.asarray(number)"
            )
            say_once(f"{self._name} {reason}", (self._name, reason))


def unwrap_filter_jit(function: Any) -> tuple[Any, dict[str, Any]] | None:
    """The function that `eqx.filter_jit` was given, and what it donates as options of `jax.jit`; None of others."""
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
    """Whether JAX can tell its type: that of an array, or shape and type without values."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True
