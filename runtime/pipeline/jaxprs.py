"""Slices of traced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.sharding import NamedSharding


def part(jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """The part of `jaxpr` that computes variables `outputs` from variables `inputs`, as a function."""
    needed = variables(outputs) - set(inputs)
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed -= set(equation.outvars)
            needed |= variables(equation.invars) - set(inputs)
    return jex_core.jaxpr_as_fun(jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=equations[::-1]))


def depending(jaxpr: Any, inputs: Sequence[Any]) -> set[Any]:
    """Variables of `jaxpr` that depend on `inputs`."""
    reached = set(inputs)
    for equation in jaxpr.eqns:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


def variables(atoms: Sequence[Any]) -> set[Any]:
    """Those of `atoms` that are no literals."""
    return {atom for atom in atoms if not isinstance(atom, jex_core.Literal)}


def shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def communicates_over(jaxpr: Any, axis: str) -> bool:
    """Whether a collective, or a device's place, over mesh axis `axis` is part of `jaxpr`."""
    return any(
        any(_names(value, axis) for value in equation.params.values())
        or any(communicates_over(inner, axis) for inner in _inner(equation))
        for equation in jaxpr.eqns
    )


def with_context_mesh(jaxpr: Any) -> Any:
    """`jaxpr` with its sharding constraints on the mesh of the context, in which some axes may be manual."""
    mesh = jax.sharding.get_abstract_mesh()

    def moved(value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return NamedSharding(mesh, value.spec)
        if isinstance(value, jex_core.Jaxpr):
            return with_context_mesh(value)
        return tuple(map(moved, value)) if type(value) is tuple else value

    if mesh.empty:
        return jaxpr
    return jaxpr.replace(
        eqns=[e.replace(params={name: moved(value) for name, value in e.params.items()}) for e in jaxpr.eqns]
    )


def _names(value: Any, axis: str) -> bool:
    return value == axis if isinstance(value, str) else isinstance(value, tuple) and axis in value


def _inner(equation: Any) -> list[Any]:
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if isinstance(value, jex_core.Jaxpr)]
