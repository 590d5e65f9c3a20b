"""Which front a call of a step goes through, and the error for objects that a step captures."""

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
    """The front for these arguments, static ones left out; None: `jax.jit` takes them as they are.

    A function that is jitted by `jax.jit` already keeps what that makes of objects.
    """
    if jax_compat.is_jitted(function):
        return None
    if nnx_front.is_nnx_jitted(function) or nnx_front.has_objects(arguments):
        return NnxFront
    return FixedLeavesFront if fixed_leaves.has_fixed_leaves(arguments) else None


class Jit(Protocol):
    """What a front gives to its inner step: what makes a function of arrays, traced and compiled by JAX, of a step."""

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        """A result of `jax.jit`."""
        ...

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function of the same arrays that returns what `function` returns."""
        ...


@contextlib.contextmanager
def captured_objects_named(function: Callable[..., Any], name: str) -> Iterator[None]:
    """An error that says which NNX objects are to be arguments, where a step changes some that it captures."""
    try:
        yield
    except Exception as error:
        of_nnx = type(error).__name__ == "TraceContextError" or "different trace level" in str(error)
        if not of_nnx or not (names := _captured(function)):
            raise
        raise DhelixError(
            f"{name} changes an NNX object that it captures ({', '.join(names)}): pass it as an argument, for inside a"
            " jitted step captured objects are constants"
        ) from error


def _captured(function: Any) -> list[str]:
    """Names under which a function finds NNX objects that nobody passes to it."""
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
