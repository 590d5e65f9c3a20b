"""Takes parts out of traced functions, and runs traced functions under another mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dhelix.passes import jax_compat


def part(jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns a function that computes the variables `outputs` of `jaxpr` from its variables `inputs`."""
    needed = variables(outputs) - set(inputs)
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed -= set(equation.outvars)
            needed |= variables(equation.invars) - set(inputs)
    return _runner(jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=equations[::-1]))


def traced(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Traces `function` for arguments of these shapes.

    The result can be called under another mesh of the same devices: shardings in it move to the current mesh.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    structure, run = jax.tree.structure(shapes), _runner(jaxpr)
    return lambda *arguments: structure.unflatten(run(*jax.tree.leaves(arguments)))


def depending(jaxpr: Any, inputs: Sequence[Any]) -> set[Any]:
    """The variables of `jaxpr` that depend on `inputs`, and `inputs` themselves."""
    reached = set(inputs)
    for equation in jaxpr.eqns:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


def variables(atoms: Sequence[Any]) -> set[Any]:
    """The elements of `atoms` that are not literals."""
    return {atom for atom in atoms if not isinstance(atom, jex_core.Literal)}


def shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def as_numbers(values: Sequence[Any]) -> list[Any]:
    """Returns `values` with each random key replaced by its key data. Key data can be stored and sent like numbers."""
    return [jax.random.key_data(value) if _is_key(value) else value for value in values]


def as_keys(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The inverse of `as_numbers`. `like` has the shapes and types of the original values."""
    return [_as_key(value, of) if _is_key(of) else value for value, of in zip(values, like, strict=True)]


def communicates_over(jaxpr: Any, axis: str) -> bool:
    """Whether `jaxpr` contains a collective or an axis index over mesh axis `axis`."""
    return any(
        any(_names(value, axis) for value in equation.params.values())
        or any(communicates_over(inner, axis) for inner in _inner(equation))
        for equation in jaxpr.eqns
    )


def holds(jaxpr: Any, primitive: str) -> bool:
    """Whether `jaxpr` contains a primitive of this name."""
    return any(e.primitive.name == primitive or any(holds(i, primitive) for i in _inner(e)) for e in jaxpr.eqns)


def _runner(jaxpr: Any) -> Callable[..., list[Any]]:
    """A function that runs `jaxpr`. When it is called, shardings in `jaxpr` are moved to the current mesh."""

    def run(*arguments: Any) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return jex_core.jaxpr_as_fun(jaxpr)(*arguments)
        consts = [_const_on_mesh(value, mesh) for value in jaxpr.consts]
        return jex_core.jaxpr_as_fun(_on_mesh(jaxpr, mesh).replace(consts=consts))(*arguments)

    return run


def _on_mesh(jaxpr: Any, mesh: AbstractMesh) -> Any:
    moved: dict[Any, Any] = {}

    def there(old: Any) -> AbstractMesh:
        return mesh.update_axis_types({name: AxisType.Manual for name in old.manual_axes})

    def variable(atom: Any) -> Any:
        sharding = getattr(atom.aval, "sharding", None)
        if isinstance(atom, jex_core.Literal) or not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return atom
        if atom not in moved:
            aval = atom.aval.update(sharding=NamedSharding(there(sharding.mesh), sharding.spec))
            moved[atom] = jex_core.DropVar(aval) if isinstance(atom, jex_core.DropVar) else jex_core.Var(aval)
        return moved[atom]

    def parameter(value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return NamedSharding(there(value.mesh), value.spec)
        if isinstance(value, (AbstractMesh, Mesh)):
            return there(value)
        if isinstance(value, jex_core.Jaxpr):
            return _on_mesh(value, mesh)
        return tuple(map(parameter, value)) if type(value) is tuple else value

    equations = [
        equation.replace(
            invars=[variable(atom) for atom in equation.invars],
            outvars=[variable(var) for var in equation.outvars],
            params={name: parameter(value) for name, value in equation.params.items()},
            ctx=equation.ctx
            if equation.ctx.cur_abstract_mesh.empty
            else jax_compat.context_on_mesh(equation, there(equation.ctx.cur_abstract_mesh)),
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


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _as_key(numbers: jax.Array, like: Any) -> jax.Array:
    kinds: list[Any] = []  # the implementation of the keys; JAX returns it for a key, but not for the shape of a key
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(numbers, impl=kinds[0])


def _const_on_mesh(value: Any, mesh: AbstractMesh) -> Any:
    """Moves a constant that the loss function captured, such as a random key, to `mesh`."""
    sharding = getattr(jax.typeof(value), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or sharding.mesh == mesh:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec(*(None for _ in value.shape))))


def _names(value: Any, axis: str) -> bool:
    return value == axis if isinstance(value, str) else isinstance(value, tuple) and axis in value


def _inner(equation: Any) -> list[Any]:
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if isinstance(value, jex_core.Jaxpr)]
