"""Slices of traced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, NamedSharding

from dhelix.passes import jax_compat


def part(jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """The part of `jaxpr` that computes variables `outputs` from variables `inputs`, as a function."""
    needed = variables(outputs) - set(inputs)
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed -= set(equation.outvars)
            needed |= variables(equation.invars) - set(inputs)
    return _runner(jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=equations[::-1]))


def traced(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """`function` as traced here for arguments of these shapes, to be run under any mesh of the same devices."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    structure, run = jax.tree.structure(shapes), _runner(jaxpr)
    return lambda *arguments: structure.unflatten(run(*jax.tree.leaves(arguments)))


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


def holds(jaxpr: Any, primitive: str) -> bool:
    """Whether a primitive of this name is part of `jaxpr`."""
    return any(e.primitive.name == primitive or any(holds(i, primitive) for i in _inner(e)) for e in jaxpr.eqns)


def _runner(jaxpr: Any) -> Callable[..., list[Any]]:
    """A function that runs `jaxpr` with what it says of a mesh said of the mesh where it runs."""

    def run(*arguments: Any) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        return jex_core.jaxpr_as_fun(jaxpr if mesh.empty else _on_mesh(jaxpr, mesh))(*arguments)

    return run


def _on_mesh(jaxpr: Any, mesh: AbstractMesh) -> Any:
    moved: dict[Any, Any] = {}

    def variable(atom: Any) -> Any:
        sharding = getattr(atom.aval, "sharding", None)
        if isinstance(atom, jex_core.Literal) or not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return atom
        if atom not in moved:
            aval = atom.aval.update(sharding=NamedSharding(mesh, sharding.spec))
            moved[atom] = jex_core.DropVar(aval) if isinstance(atom, jex_core.DropVar) else jex_core.Var(aval)
        return moved[atom]

    def parameter(value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return NamedSharding(mesh, value.spec)
        if isinstance(value, jex_core.Jaxpr):
            return _on_mesh(value, mesh)
        return tuple(map(parameter, value)) if type(value) is tuple else value

    equations = [
        equation.replace(
            invars=[variable(atom) for atom in equation.invars],
            outvars=[variable(var) for var in equation.outvars],
            params={name: parameter(value) for name, value in equation.params.items()},
            ctx=jax_compat.context_on_mesh(equation.ctx, mesh),  # with `jax.set_mesh` that was another
        )
        for equation in jaxpr.eqns
    ]
    return jaxpr.replace(
        constvars=[variable(var) for var in jaxpr.constvars],
        consts=jaxpr.consts,
        invars=[variable(var) for var in jaxpr.invars],
        outvars=[variable(atom) for atom in jaxpr.outvars],
        eqns=equations,
    )


def _names(value: Any, axis: str) -> bool:
    return value == axis if isinstance(value, str) else isinstance(value, tuple) and axis in value


def _inner(equation: Any) -> list[Any]:
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if isinstance(value, jex_core.Jaxpr)]
