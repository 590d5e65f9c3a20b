"""Runs a step that takes objects of Flax NNX and changes them in place.

`nnx.jit` takes the arrays out of the objects, lets `jax.jit` run a pure function of the arrays, and writes the results
back into the same objects. It handles aliases, changes of the graph, and static attributes. This front lets `nnx.jit`
do all this work, but replaces the jitted function by an `InterleavedStep` of the pure function. So the step has the
semantics of `nnx.jit`, in all its modes (`nnx.set_graph_mode`, `nnx.cached_partial`, `nnx.StateSharding`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat


def loaded() -> Any:
    """Returns the module `flax.nnx` if the program has imported it, else None."""
    return sys.modules.get("flax.nnx")


def is_object(x: Any) -> bool:
    """Whether `x` is an NNX object: a module, optimizer, metric, random streams or variable."""
    nnx = loaded()
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def has_objects(tree: Any) -> bool:
    """Whether `tree` holds an NNX object outside of an `nnx.State`. (`jax.jit` accepts an `nnx.State` as data.)"""
    nnx = loaded()
    if nnx is None:
        return False
    kinds = nnx.Pytree, nnx.Variable, nnx.State
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(map(is_object, leaves))


def map_values(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `function` to all leaves, like `jax.tree.map`. In the result, values stand in place of NNX variables."""
    nnx = loaded()
    if nnx is None:
        return jax.tree.map(function, tree)

    def one(x: Any) -> Any:
        return jax.tree.map(function, x.get_raw_value() if isinstance(x, nnx.Variable) else x)

    return jax.tree.map(one, tree, is_leaf=is_object)


def is_nnx_jitted(function: Any) -> bool:
    """Whether `function` is the result of `nnx.jit` or `nnx.jit_partial`."""
    return type(function).__module__.startswith("flax.nnx.") and hasattr(function, "jitted_fn")


def has_state_shardings(jit_options: dict[str, Any]) -> bool:
    """Whether the options contain an `nnx.StateSharding`, which only `nnx.jit` accepts."""
    nnx = loaded()
    return nnx is not None and any(isinstance(x, nnx.StateSharding) for x in jax.tree.leaves(jit_options))


class NnxJit:
    """Jits functions with `nnx.jit` instead of `jax.jit`.

    Attributes:
      made: the result of `nnx.jit`; None before the first call.
    """

    made: Any = None

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        """Returns the function of arrays that `nnx.jit` makes with `jax.jit`."""
        compiler_options = options.pop("compiler_options", None)  # nnx.jit does not accept this option
        self.made = function if is_nnx_jitted(function) else loaded().jit(function, **options)
        if not is_nnx_jitted(self.made):
            version = sys.modules["flax"].__version__
            raise DhelixError(f"nnx.jit of flax {version} has no jitted_fn, which dhelix needs: use flax 0.12")
        jitted = self.made.jitted_fn
        return jax_compat.with_compiler_options(jitted, compiler_options) if compiler_options else jitted

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns a function of the same arrays as the result of `__call__`.

        The function returns only the results of `function`, not the changed objects.
        """
        made = loaded().jit(function, **{k: v for k, v in options.items() if k != "compiler_options"})

        def run(*args: Any, **kwargs: Any) -> Any:
            with loaded().update_context(made):
                outputs = made.jitted_fn(*args, **kwargs)
            return outputs[2] if len(outputs) == 3 else outputs[0]  # without set_graph_updates there are two outputs

        return run


class NnxFront:
    """Runs a step on arguments that hold NNX objects."""

    def __init__(self, step: Any):
        jit = NnxJit()
        self.inner = step.with_jit(jit)
        self._made = jit.made

    def run(self, method: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Calls `method` of the inner step on the arrays in the objects. Only the method `__call__` changes objects."""
        if method in ("__call__", "lower"):
            return self._as_nnx_does(method, self.inner, args, kwargs)
        if method in ("eval_shape", "trace"):
            return getattr(self._made, method)(*args, **kwargs)
        results = []

        def catch(*args: Any, **kwargs: Any) -> None:
            results.append(getattr(self.inner, method)(*args, **kwargs, **options))

        self._as_nnx_does("lower", _Lowers(catch), args, kwargs)
        return results[0]

    def clear_cache(self) -> None:
        self.inner.clear_cache()

    def _as_nnx_does(self, method: str, jitted: Any, args: Any, kwargs: Any) -> Any:
        return getattr(type(self._made), method)(_InPlaceOf(self._made, jitted), *args, **kwargs)


class _Lowers:
    """Takes the place of a jitted function of which only the method `lower` is called."""

    def __init__(self, lower: Callable[..., Any]):
        self.lower = lower


class _InPlaceOf:
    """A result of `nnx.jit` with another jitted function inside.

    It is equal to the original, because NNX finds its contexts by the original.
    """

    def __init__(self, original: Any, jitted: Any):
        self._original = original
        self.jitted_fn = jitted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: object) -> bool:
        return other is self._original or (isinstance(other, _InPlaceOf) and other._original is self._original)

    def __hash__(self) -> int:
        return hash(self._original)
