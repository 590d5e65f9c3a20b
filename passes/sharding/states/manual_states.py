"""Moves the collectives of sharded states into a shard_map, where the passes can see and order them.

A shard_map takes whole parameters and returns whole gradients, so the partitioner would gather and slice at its edges.

    w = whole(p); g = shard_map(w)                 g = shard_map(p), where the body begins with all-gather(p)
        ... all-reduce(dw) * c                 ->      ... reduce-scatter(dw) * c
    shard(g)                                       g is split already

An all-reduce over more devices than the shards becomes a reduce-scatter over the shards and an all-reduce over the
copies (AMSP section III-B).

Why it is legal: an all-gather of the shards is the whole parameter. A device keeps its own part of an all-reduced
gradient, which is what a reduce-scatter gives, and operations with scalars act on each element alone.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import GROUP_FIELDS, device_groups, free_channel
from dhelix.passes.hlo import Builder, HloModule, Instruction
from dhelix.passes.hlo.constraints import Axes, Split, mesh_axes, meshes, splits, stated
from dhelix.passes.hlo.edit import TO_GLOBAL, drop_dead, replace_uses
from dhelix.passes.hlo.manual_computation import ManualComputation, manual_computations

_IN, _OUT = "xla.sdy.in_shardings", "xla.sdy.out_shardings"
_SCALED = frozenset("multiply divide convert".split())


@dataclass(frozen=True)
class _Shards:
    """The dimension of an array that a shard_map gets split, and the axes (in quotes) over which it is split."""

    dimension: int
    axes: Axes
    count: int

    @classmethod
    def between(cls, whole: Split, sharded: Split, sizes: dict[str, int]) -> _Shards | None:
        """What `sharded` splits in addition to `whole`; None if this is not exactly one dimension, split further."""
        found = []
        for dimension, (before, after) in enumerate(zip(whole.axes, sharded.axes, strict=True)):
            if after[: len(before)] != before or any(":" in axis for axis in after):
                return None
            if more := after[len(before) :]:
                found.append(cls(dimension, more, math.prod(sizes[axis] for axis in more)))
        return found[0] if len(found) == 1 else None


def enter_split(whole: Instruction) -> int:
    """Lets a parameter enter shard_maps in shards. Returns the number of shard_maps that gather it themselves.

    Args:
      whole: the sharding constraint that would gather the parameter.
    """
    entry, (state,) = whole.computation, whole.operands
    sharded = stated(state)
    readers = entry.users()[whole]
    if sharded is None or any(reader.opcode != "custom-call" for reader in readers):
        return 0
    changed = 0
    for manual in manual_computations(entry):
        edge = manual.to_local
        if edge not in readers:
            continue
        for k in [k for k, operand in enumerate(edge.operands) if operand is whole]:
            changed += _enter(manual, edge, k, state, sharded)
    return changed


def _enter(manual: ManualComputation, edge: Instruction, k: int, state: Instruction, sharded: Split) -> bool:
    module = edge.computation.module
    before = splits(edge.proto.frontend_attributes.map[_IN])[k]
    shards = _Shards.between(before, sharded, mesh_axes(module, before.mesh))
    if shards is None or not set(shards.axes) <= set(manual.axis_names):
        return False
    numbers = [n for n, operand in enumerate(manual.call.operands) if _index(operand) == k]
    for number in numbers:
        parameter = manual.body.parameters[number]
        builder = Builder(manual.body)
        local = type(parameter.shape)()
        local.CopyFrom(parameter.shape)
        for value in (parameter, manual.call.operands[number]):
            _shrink(value.shape, shards)
        gathered = builder.make(
            "all-gather", local, [], channel_id=free_channel(module), use_global_device_ids=True,
            dimensions=[shards.dimension],
        )  # fmt: skip
        _set_groups(gathered, _ordered_groups(module, before.mesh, shards.axes))
        replace_uses(manual.body, parameter, gathered)
        gathered.operands = [parameter]
        gathered.proto.metadata.CopyFrom(state.proto.metadata)
        manual.body.sort()
    edge.operands[k] = state
    if edge.shape.tuple_shapes:
        _shrink(edge.shape.tuple_shapes[k], shards)
    _restate(edge, _IN, k, sharded)
    return True


def leave_split(value: Instruction, sharded: Split) -> bool:
    """Lets a gradient leave a shard_map in shards, if the shard_map sums it over the devices that hold the shards.

    Args:
      value: the gradient, as the shard_map returns it.
      sharded: how it is split afterwards.
    """
    edge = value.operands[0] if value.opcode == "get-tuple-element" else value
    if edge.opcode != "custom-call" or edge.proto.custom_call_target != TO_GLOBAL:
        return False
    manual = next(one for one in manual_computations(value.computation) if one.to_global is edge)
    module, k = edge.computation.module, _index(value)
    position, before = manual.results[k]
    shards = _Shards.between(before, sharded, mesh_axes(module, before.mesh))
    root = manual.body.root
    if shards is None or not set(shards.axes) <= set(manual.axis_names) or root.opcode != "tuple":
        return False
    chain = _scaled_sum(root.operands[position])
    axes = _axes_of(chain[-1], manual, before.mesh) if chain else None
    if axes is None or not set(shards.axes) <= set(axes):
        return False
    root.operands[position] = _scattered(chain, shards, [a for a in axes if a not in shards.axes], before.mesh)
    held = [root.shape.tuple_shapes[position], manual.call.shape.tuple_shapes[position]]
    for shape in [*held, *(o.shape for o in edge.operands if _index(o) == position)]:
        _shrink(shape, shards)
    _restate(edge, _OUT, k, sharded)
    drop_dead(manual.body)  # the all-reduce of the whole gradient, which other passes would take for a reader
    manual.body.sort()
    return True


def _scaled_sum(value: Instruction) -> list[Instruction]:
    """The operations with scalars that make `value` from an all-reduce, last first, and the all-reduce; or nothing."""
    users, chain = value.computation.users(), []
    while len(users[value]) == 1:
        chain.append(value)
        if value.opcode == "all-reduce":
            return chain if len(value.operands) == 1 else []
        rest = [o for o in value.operands[1:] if o.opcode != "broadcast" or o.proto.dimensions]
        if value.opcode not in _SCALED or rest:
            return []
        value = value.operands[0]
    return []


def _scattered(chain: list[Instruction], shards: _Shards, rest: list[str], mesh: str) -> Instruction:
    """The chain of `_scaled_sum` on shards: a reduce-scatter, an all-reduce over `rest`, and the scaling."""
    *scaling, total = chain
    builder, module = Builder(total.computation), total.computation.module
    made = builder.copy(total, total.operands)
    made.proto.opcode = "reduce-scatter"
    made.proto.dimensions.append(shards.dimension)
    made.proto.channel_id = free_channel(module)
    _set_groups(made, _ordered_groups(module, mesh, shards.axes))
    _shrink(made.shape, shards)
    if rest:
        made = builder.copy(total, [made])
        _shrink(made.shape, shards)
        made.proto.channel_id = free_channel(module)
        _set_groups(made, _ordered_groups(module, mesh, tuple(rest)))
    for step in reversed(scaling):
        numbers = [builder.copy(o, o.operands) for o in step.operands[1:]]
        made = builder.copy(step, [made, *numbers])
        for value in (made, *numbers):
            _shrink(value.shape, shards)
    return made


def _axes_of(total: Instruction, manual: ManualComputation, mesh: str) -> Axes | None:
    """The manual axes over which an all-reduce sums; None if its groups are not those of mesh axes."""
    module = total.computation.module
    groups = {frozenset(group) for group in device_groups(total)}
    names = manual.axis_names
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {frozenset(group) for group in _ordered_groups(module, mesh, axes)} == groups:
                return axes
    return None


def _ordered_groups(module: HloModule, mesh: str, axes: Axes) -> list[list[int]]:
    """Groups of devices that differ along `axes` (in quotes), each ordered by them, the first axis as the major one."""
    sizes = mesh_axes(module, mesh)
    listed = re.search(r"device_ids=\[([^\]]*)\]", meshes(module)[mesh])
    ids = list(map(int, listed[1].split(","))) if listed else list(range(math.prod(sizes.values())))
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for place, device in zip(itertools.product(*map(range, sizes.values())), ids, strict=True):
        at = dict(zip(sizes, place, strict=True))
        others = tuple(at[axis] for axis in sizes if axis not in axes)
        groups.setdefault(others, []).append((tuple(at[axis] for axis in axes), device))
    return [[device for _, device in sorted(group)] for group in groups.values()]


def _set_groups(collective: Instruction, groups: list[list[int]]) -> None:
    for name in GROUP_FIELDS:
        collective.proto.ClearField(name)
    for group in groups:
        collective.proto.replica_groups.add(replica_ids=group)


def _shrink(shape: object, shards: _Shards) -> None:
    shape.dimensions[shards.dimension] //= shards.count  # pyright: ignore[reportAttributeAccessIssue]


def _restate(edge: Instruction, attribute: str, k: int, split: Split) -> None:
    """Writes another split of operand or result `k` of a shard_map's edge."""
    count = itertools.count()
    text = edge.proto.frontend_attributes.map[attribute]
    new = re.sub(r"<@[^>]*>", lambda found: split.text if next(count) == k else found[0], text)
    edge.proto.frontend_attributes.map[attribute] = new


def _index(value: Instruction) -> int:
    return value.tuple_index if value.opcode == "get-tuple-element" else 0
