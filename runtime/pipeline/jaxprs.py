"""Slices of traced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core


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
