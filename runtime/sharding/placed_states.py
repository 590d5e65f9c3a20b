"""Places the state of a train step in shards, and brings it together again.

    state = shard_state(state, "zero1")          # each device holds its share of parameters and optimizer states
    state, metrics = train_step(state, batch)    # @strand_interleave(sharding="zero1"): takes and returns shards
    whole = gather_state(state, "zero1")         # as before shard_state: for evaluation, or for another plan

Between steps, all states are split over the devices of the optimizer's factor, parameters too: the next step gathers
parameters when it needs them. A checkpoint stores such a state like any other sharded state. `state_shardings` gives
the shardings into which a checkpoint is restored, also under another plan. If a plan has groups, the path of an array
says which factors are its own (`parameter_groups.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.states.state_axes import SplitAxes
from dhelix.runtime.sharding.nnx_objects import check_unshared
from dhelix.runtime.sharding.parameter_groups import group_numbers, paths_of
from dhelix.runtime.sharding.state_plan import StatePlan, sharding_plan


def shard_state[T](state: T, plan: Any, mesh: Mesh | None = None) -> T:
    """Places a state in shards.

    Args:
      state: parameters, optimizer states and whatever belongs to them: a pytree of arrays. Arrays may be split over
        other mesh axes, such as "tp". Of objects of Flax NNX, new ones are returned.
      plan: what `sharding_plan` takes.
      mesh: the mesh; default: that of the state's arrays.

    Returns:
      The same state. The first dimension that allows it is split over the axes of the plan, but not the dimension of
      stacked layers, which a scan reads one after the other; in a pipeline's state, nor the layers of a chunk. Arrays
      without such a dimension stay whole.

    Raises:
      ShardingError: the mesh is unknown, or does not fit the plan, or no array of the state or of a group can be
        split, or a group matches no path, or objects of Flax NNX share a variable.
    """
    check_unshared(state)
    placed = state_shardings(state, plan, mesh)
    _check_split(state, sharding_plan(plan), placed)
    return jax.device_put(state, placed)


def _check_split(state: Any, plan: StatePlan, placed: Any) -> None:
    """Refuses a plan that splits no array, or none of a group."""
    shardings = jax.tree.leaves(placed)
    if not shardings:
        return
    numbers, axes, groups = _axes_of(state, plan, shardings[0].mesh)
    leaves = jax.tree.leaves(state)
    any_split = any(entry for sharding in shardings for entry in sharding.spec)
    arrays = any(number is None and np.ndim(leaf) for number, leaf in zip(numbers, leaves, strict=True))
    if groups and axes.optimizer and not any_split and not arrays:
        raise ShardingError(
            f"the groups of the plan keep all parameters whole, and leave none that {plan.factors} could split; "
            'write "dp" instead of the plan, or give less to the groups'
        )
    for number, over in [(None, axes), *enumerate(groups)]:
        ours = [n for n, found in enumerate(numbers) if found == number]
        if not over.optimizer or not ours or (number is None and any_split):
            continue
        used = [{axis for entry in shardings[n].spec for axis in _entry(entry)} for n in ours]
        if any(axes >= set(over.optimizer) for axes in used):
            continue
        parts = math.prod(shardings[0].mesh.shape[axis] for axis in over.optimizer)
        largest = max((np.shape(leaves[n]) for n in ours), key=math.prod)
        of = "the state" if number is None else f"group {plan.groups[number][0]!r}"
        raise ShardingError(
            f"no array of {of} has a dimension that divides into {parts} shards (the largest is {list(largest)}); use "
            "fewer data-parallel devices, or sizes that are multiples of their number"
            + ("" if number is None else ', or "dp" for the group')
        )


def _axes_of(state: Any, plan: StatePlan, mesh: Mesh) -> tuple[list[int | None], SplitAxes, list[SplitAxes]]:
    """The number of each array's group, the axes of arrays that are in no group, and those of each group."""
    names = [name for name, _ in plan.groups]
    return group_numbers(names, paths_of(state)), plan.on(mesh.shape), plan.of_groups(mesh.shape)


def gather_state[T](state: T, plan: Any, mesh: Mesh | None = None) -> T:
    """Brings a state together: every data-parallel device holds all of it. The inverse of `shard_state`."""
    mesh = _mesh_of(state, mesh)
    data = sharding_plan(plan).on(mesh.shape).data
    return jax.device_put(state, jax.tree.map(lambda leaf: _named(mesh, _on(mesh, _without(leaf, data))), state))


def state_shardings(state: Any, plan: Any, mesh: Mesh | None = None) -> Any:
    """The shardings of a state under a plan: a pytree like `state`, which may hold `jax.ShapeDtypeStruct`s.

    Raises:
      ShardingError: the mesh is unknown, has no Auto axes for the plan, or does not fit the plan, or a group of the
        plan matches no path.
    """
    mesh = _mesh_of(state, mesh)
    numbers, axes, groups = _axes_of(state, sharding_plan(plan), mesh)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in axes.data:
        if kinds[axis] != AxisType.Auto:
            raise ShardingError(
                f"the mesh axis {axis!r} is {kinds[axis].name}, and states are sharded over Auto axes; make the mesh "
                "with axis_types=(jax.sharding.AxisType.Auto, ...), or with dhelix.mesh_of"
            )
    stacked, found = stacks(state), list[NamedSharding]()
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    for number, (path, leaf) in zip(numbers, leaves, strict=True):
        first = _layer_dimensions(leaf, axes.data) if path in stacked else 0
        found.append(_sharding(leaf, axes if number is None else groups[number], mesh, first))
    return jax.tree.unflatten(tree, found)


def _layer_dimensions(stack: Any, data: Axes) -> int:
    """How many leading dimensions of a stack count layers: two in a pipeline, whose stages split the first one."""
    return 2 if np.ndim(stack) > 2 and _without(stack, data)[0] else 1


def stacks(state: Any) -> set[Any]:
    """The paths of arrays that stack layers along dimension 0.

    The nearest group of arrays decides: all of them have the same dimension 0, and at least one has three dimensions.
    An array of three dimensions without siblings counts as a stack: splitting layers would cost more than splitting
    another dimension.
    """
    every = jax.tree_util.tree_leaves_with_path(state)
    leaves = [(path, np.shape(leaf)) for path, leaf in every if np.ndim(leaf)]
    shapes, groups = dict(leaves), dict[Any, list[Sequence[int]]]()
    for path, shape in leaves:
        for length in range(len(path)):
            groups.setdefault(path[:length], []).append(shape)

    def is_stack(path: Any) -> bool:
        outwards = [groups[path[:n]] for n in reversed(range(len(path)))]
        group = next((group for group in outwards if len(group) > 1), [])
        alike = len({shape[0] for shape in group}) == 1 and max(map(len, group)) > 2
        alone = len(outwards[0]) == 1 if outwards else True
        return alike or (alone and len(shapes[path]) > 2)

    return {path for path, shape in leaves if len(shape) > 1 and is_stack(path)}


def _sharding(leaf: Any, axes: SplitAxes, mesh: Mesh, first: int) -> NamedSharding:
    spec = _on(mesh, _without(leaf, axes.data))
    ways = (axes.inside_out, axes.inside_out[: len(axes.gradients)], axes.parameters)
    for over in dict.fromkeys(ways):
        dimension = _dimension(np.shape(leaf), spec, over, mesh, first)
        if over and dimension is not None:
            spec[dimension] = (*spec[dimension], *over)
            break
    return _named(mesh, spec)


def _dimension(shape: Sequence[int], spec: Sequence[Axes], over: Axes, mesh: Mesh, first: int) -> int | None:
    """The dimension to split over the axes `over`: from `first` on, the first that divides and is not split yet.

    Collectives exchange contiguous parts, so splitting a later dimension would cost transposes.
    """
    parts = math.prod(mesh.shape[axis] for axis in over)

    def divides(dimension: int) -> bool:
        return shape[dimension] % (parts * math.prod(mesh.shape[axis] for axis in spec[dimension])) == 0

    def is_split(dimension: int) -> bool:
        return any(mesh.shape[axis] > 1 for axis in spec[dimension])

    found = [dimension for dimension in range(first, len(shape)) if divides(dimension)]
    return min(found, key=lambda dimension: (is_split(dimension), dimension), default=None)


def without_axes(leaf: Any, data: Axes) -> jax.ShapeDtypeStruct:
    """The shape of an array, placed as it is but for the axes `data`, which no longer split it."""
    placed = _named(_mesh_of(leaf, None), _without(leaf, data))
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=placed)


def axes_of(leaf: Any) -> list[Axes]:
    """For each dimension of an array, the mesh axes that split it."""
    sharding = getattr(leaf, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    axes = list(map(_entry, spec))
    return axes + [()] * (np.ndim(leaf) - len(axes))


def _entry(entry: Any) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _without(leaf: Any, data: Axes) -> list[Axes]:
    return [tuple(axis for axis in entry if axis not in data) for entry in axes_of(leaf)]


def _on(mesh: Mesh, spec: list[Axes]) -> list[Axes]:
    """The axes that a mesh has. Arrays may come from another one, such as that of an earlier plan."""
    return [tuple(axis for axis in entry if axis in mesh.shape) for entry in spec]


def _named(mesh: Mesh, spec: Sequence[Axes]) -> NamedSharding:
    entries = [entry[0] if len(entry) == 1 else entry or None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


def _mesh_of(state: Any, mesh: Mesh | None) -> Mesh:
    if mesh is not None:
        return mesh
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh if isinstance(sharding.mesh, Mesh) else sharding.mesh.abstract_mesh  # pyright: ignore
    raise ShardingError("the state's arrays are on no mesh; give one after the plan: shard_state(state, plan, mesh)")
