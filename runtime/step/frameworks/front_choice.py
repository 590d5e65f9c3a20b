"""Chooses the front for a call of a step, and explains errors about NNX objects that a step captures.

A front turns arguments that `jax.jit` does not accept into arrays for an inner step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.runtime.step.frameworks import fixed_leaves, nnx_front
from dhelix.runtime.step.frameworks.fixed_leaves import FixedLeavesFront
from dhelix.runtime.step.frameworks.nnx_front import NnxFront

Front = NnxFront | FixedLeavesFront


def kind_of(function: Callable[..., Any], arguments: Any) -> type[Front] | None:
    """Returns the class of the front for these arguments; None if `jax.jit` accepts them unchanged.

    `arguments` does not contain static arguments. A function that is already jitted by `jax.jit` has no front, because
    `jax.jit` then decides how to treat objects.
    """
    if jax_compat.is_jitted(function):
        return None
    if nnx_front.is_nnx_jitted(function) or nnx_front.has_objects(arguments):
        return NnxFront
    return FixedLeavesFront if fixed_leaves.has_fixed_leaves(arguments) else None


class Jit(Protocol):
    """The `jit` that a front gives its inner step. It turns the step into a function of arrays that JAX compiles."""

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jits `function`. Returns a function of arrays, as made by `jax.jit`."""
        ...

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns a function of the same arrays as the result of `__call__`. It returns the results of `function`."""
        ...


@contextlib.contextmanager
def captured_objects_named(function: Callable[..., Any], name: str) -> Iterator[None]:
    """Wraps the tracing of a step. If the step changes NNX objects that it captures, an error names these objects."""
    try:
        yield
    except Exception as error:
        of_nnx = type(error).__name__ == "TraceContextError" or "different trace level" in str(error)
        if not of_nnx or not (names := _captured(function)):
            raise
        raise DhelixError(
            f"{name} changes an NNX object that it captures ({', '.join(names)}): pass it as an argument, because "
            "captured objects are constants inside a jitted step"
        ) from error


def _captured(function: Any) -> list[str]:
    """The names of the NNX objects that a function uses, but does not get as arguments."""
    found: list[str] = []
    while isinstance(function, functools.partial):
        values = [*enumerate(function.args), *function.keywords.items()]
        found += [f"argument {key} of functools.partial" for key, x in values if nnx_front.has_objects(x)]
        function = function.func
    function = inspect.unwrap(function)
    if inspect.ismethod(function):
        if nnx_front.is_object(function.__self__):
            found.append("self")
        function = function.__func__
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found += [k for k, x in {**variables.globals, **variables.nonlocals}.items() if nnx_front.has_objects(x)]
    return found
