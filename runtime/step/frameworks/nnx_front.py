"""A step that takes objects of Flax NNX and changes them in place.

`nnx.jit` takes the arrays out of the objects, has `jax.jit` run a pure function of them, and puts the results back into
the same objects. Aliases, changes of the graph and static attributes are its business. Here it does all of that, and an
`InterleavedStep` of the pure function runs in place of the jitted one. So the semantics are those of `nnx.jit` by
construction, in all its modes (`nnx.set_graph_mode`, `nnx.cached_partial`, `nnx.StateSharding`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat


def loaded() -> Any:
    """The module `flax.nnx` if the program has imported it."""
    return sys.modules.get("flax.nnx")


def is_object(x: Any) -> bool:
    """Whether it is a module, an optimizer, a metric, random streams or a variable of NNX."""
    nnx = loaded()
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def has_objects(tree: Any) -> bool:
    """Whether there is one outside of `nnx.State`, which is data, for `jax.jit`, too."""
    nnx = loaded()
    if nnx is None:
        return False
    kinds = nnx.Pytree, nnx.Variable, nnx.State
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(map(is_object, leaves))


def map_values(function: Callable[[Any], Any], tree: Any) -> Any:
    """`jax.tree.map`, with what a variable of NNX holds in its place; the path to that is the variable's."""
    nnx = loaded()
    if nnx is None:
        return jax.tree.map(function, tree)

    def one(x: Any) -> Any:
        return jax.tree.map(function, x.get_raw_value() if isinstance(x, nnx.Variable) else x)

    return jax.tree.map(one, tree, is_leaf=is_object)


def is_nnx_jitted(function: Any) -> bool:
    """Whether it is the result of `nnx.jit` or `nnx.jit_partial`."""
    return type(function).__module__.startswith("flax.nnx.") and hasattr(function, "jitted_fn")


def has_state_shardings(jit_options: dict[str, Any]) -> bool:
    """Whether options have shardings by variable, which `nnx.jit` alone takes."""
    nnx = loaded()
    return nnx is not None and any(isinstance(x, nnx.StateSharding) for x in jax.tree.leaves(jit_options))


class NnxJit:
    """`nnx.jit` in the place of `jax.jit`.

    Attributes:
      made: the result of `nnx.jit`, once there is one.
    """

    made: Any = None

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        """What `nnx.jit` has `jax.jit` make of the function: one of arrays."""
        compiler_options = options.pop("compiler_options", None)  # nnx.jit does not take them
        self.made = function if is_nnx_jitted(function) else loaded().jit(function, **options)
        if not is_nnx_jitted(self.made):
            version = sys.modules["flax"].__version__
            raise DhelixError(f"nnx.jit of flax {version} has no jitted_fn, by which dhelix takes part: take flax 0.12")
        jitted = self.made.jitted_fn
        return jax_compat.with_compiler_options(jitted, compiler_options) if compiler_options else jitted

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function of the same arrays that returns what `function` does, without what became of its arguments."""
        made = loaded().jit(function, **{k: v for k, v in options.items() if k != "compiler_options"})

        def run(*args: Any, **kwargs: Any) -> Any:
            with loaded().update_context(made):
                outputs = made.jitted_fn(*args, **kwargs)
            return outputs[2] if len(outputs) == 3 else outputs[0]  # the latter without set_graph_updates

        return run


class NnxFront:
    """What a step does with NNX objects among its arguments."""

    def __init__(self, step: Any):
        jit = NnxJit()
        self.inner = step.with_jit(jit)
        self._made = jit.made

    def run(self, method: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """`method` of the inner step, of the arrays in the objects. Only a call changes the objects."""
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
    """Stands for a jitted function that is only lowered."""

    def __init__(self, lower: Callable[..., Any]):
        self.lower = lower


class _InPlaceOf:
    """A result of `nnx.jit` with another jitted function; equal to it, since NNX finds its contexts by it."""

    def __init__(self, original: Any, jitted: Any):
        self._original = original
        self.jitted_fn = jitted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: object) -> bool:
        return other is self._original or (isinstance(other, _InPlaceOf) and other._original is self._original)

    def __hash__(self) -> int:
        return hash(self._original)
