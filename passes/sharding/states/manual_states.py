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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import GROUP_FIELDS, device_groups, free_channel
from dhelix.passes.hlo import Builder, Computation, Instruction
from dhelix.passes.hlo.constraints import Axes, Split, mesh_axes, splits, stated
from dhelix.passes.hlo.edit import drop_dead, replace_all_uses
from dhelix.passes.hlo.manual_computation import ManualComputation, groups_over, manual_computations

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


class ManualStates:
    """The shard_maps of a program, while the states that they take and return are sharded.

    Every shard_map is changed once, by `finish`, however many states it takes.
    """

    def __init__(self, entry: Computation) -> None:
        self.manuals = manual_computations(entry)
        self._module = entry.module
        self._channels = itertools.count(free_channel(entry.module))
        self._users = {manual.body: manual.body.users() for manual in self.manuals}
        self._taken = {manual.body: _taken(manual) for manual in self.manuals}
        self._given = {manual.body: manual.results for manual in self.manuals}
        self._gathered: dict[Computation, dict[Instruction, Instruction]] = {}  # parameters of bodies -> all-gathers
        self._scattered: set[Computation] = set()

    def enter(self, whole: Instruction, readers: Sequence[Instruction]) -> None:
        """Lets a parameter enter shard_maps in shards, unless other instructions read it, too.

        Args:
          whole: the sharding constraint that would gather the parameter.
          readers: the instructions that read `whole`.
        """
        (state,) = whole.operands
        sharded = stated(state)
        if sharded is None or any(reader.opcode != "custom-call" for reader in readers):
            return
        for manual in self.manuals:
            edge = manual.to_local
            if edge is not None and edge in readers:
                for k in [k for k, operand in enumerate(edge.operands) if operand is whole]:
                    self._enter(manual, edge, k, state, sharded)

    def _enter(self, manual: ManualComputation, edge: Instruction, k: int, state: Instruction, sharded: Split) -> None:
        before = self._taken[manual.body][k]
        shards = _Shards.between(before, sharded, mesh_axes(self._module, before.mesh))
        if shards is None or not set(shards.axes) <= set(manual.axis_names):
            return
        gathered = self._gathered.setdefault(manual.body, {})
        for number, operand in enumerate(manual.call.operands):
            if _index(operand) == k:
                parameter = manual.body.parameters[number]
                gathered[parameter] = self._all_gather(parameter, shards, before.mesh)
                gathered[parameter].proto.metadata.CopyFrom(state.proto.metadata)
                for value in (parameter, operand):
                    _shrink(value.shape, shards)
        edge.operands[k] = state
        if edge.shape.tuple_shapes:
            _shrink(edge.shape.tuple_shapes[k], shards)
        _restate(edge, _IN, k, sharded)

    def _all_gather(self, parameter: Instruction, shards: _Shards, mesh: str) -> Instruction:
        """Appends the all-gather that makes `parameter` whole. `finish` gives it to the readers of `parameter`."""
        made = Builder(parameter.computation).make(
            "all-gather", parameter.shape, [parameter], channel_id=next(self._channels), use_global_device_ids=True,
            dimensions=[shards.dimension],
        )  # fmt: skip
        _set_groups(made, groups_over(self._module, mesh, shards.axes))
        return made

    def leave(self, value: Instruction, sharded: Split) -> bool:
        """Lets a gradient leave a shard_map in shards, if the shard_map sums it over the devices that hold the shards.

        Args:
          value: the gradient, as the shard_map returns it.
          sharded: how it is split afterwards.

        Returns:
          Whether it does.
        """
        edge = value.operands[0] if value.opcode == "get-tuple-element" else value
        manual = next((one for one in self.manuals if one.to_global is edge), None)
        if manual is None or manual.body.root.opcode != "tuple":
            return False
        k, root = _index(value), manual.body.root
        position, before = self._given[manual.body][k]
        shards = _Shards.between(before, sharded, mesh_axes(self._module, before.mesh))
        if shards is None or not set(shards.axes) <= set(manual.axis_names):
            return False
        chain = _scaled_sum(root.operands[position], self._users[manual.body])
        axes = _axes_of(chain[-1], manual, before.mesh) if chain else None
        if axes is None or not set(shards.axes) <= set(axes):
            return False
        copies = tuple(axis for axis in axes if axis not in shards.axes)
        root.operands[position] = self._scatter(chain, shards, copies, before.mesh)
        held = [root.shape.tuple_shapes[position], manual.call.shape.tuple_shapes[position]]
        for shape in [*held, *(o.shape for o in edge.operands if _index(o) == position)]:
            _shrink(shape, shards)
        _restate(edge, _OUT, k, sharded)
        self._scattered.add(manual.body)
        return True

    def _scatter(self, chain: list[Instruction], shards: _Shards, copies: Axes, mesh: str) -> Instruction:
        """The chain of `_scaled_sum` on shards: a reduce-scatter, an all-reduce over the copies, and the scaling."""
        *scaling, total = chain
        builder = Builder(total.computation)
        made = builder.copy(total, total.operands)
        made.proto.opcode = "reduce-scatter"
        made.proto.dimensions.append(shards.dimension)
        self._sum_over(made, shards, mesh, shards.axes)
        if copies:
            made = builder.copy(total, [made])
            self._sum_over(made, shards, mesh, copies)
        for step in reversed(scaling):
            numbers = [builder.copy(o, o.operands) for o in step.operands[1:]]
            made = builder.copy(step, [made, *numbers])
            for value in (made, *numbers):
                _shrink(value.shape, shards)
        return made

    def _sum_over(self, made: Instruction, shards: _Shards, mesh: str, axes: Axes) -> None:
        made.proto.channel_id = next(self._channels)
        _set_groups(made, groups_over(self._module, mesh, axes))
        _shrink(made.shape, shards)

    def finish(self) -> None:
        """Gives gathered parameters to their readers, and drops the reductions of whole gradients.

        Other passes would take such a reduction for a reader of the gradient.
        """
        for manual in self.manuals:
            gathered = self._gathered.get(manual.body, {})
            replace_all_uses(manual.body, gathered)
            for parameter, made in gathered.items():
                made.operands = [parameter]
            manual.body.sort()
            if manual.body in self._scattered:
                drop_dead(manual.body)


def _taken(manual: ManualComputation) -> list[Split]:
    """How each operand of a shard_map is split."""
    edge = manual.to_local
    return [] if edge is None else splits(edge.proto.frontend_attributes.map[_IN])


def _scaled_sum(value: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> list[Instruction]:
    """The operations with scalars that make `value` from an all-reduce, last first, and the all-reduce; or nothing."""
    chain = []
    while len(users[value]) == 1:
        chain.append(value)
        if value.opcode == "all-reduce":
            return chain if len(value.operands) == 1 else []
        rest = [o for o in value.operands[1:] if o.opcode != "broadcast" or o.proto.dimensions]
        if value.opcode not in _SCALED or rest:
            return []
        value = value.operands[0]
    return []


def _axes_of(total: Instruction, manual: ManualComputation, mesh: str) -> Axes | None:
    """The manual axes over which an all-reduce sums; None if its groups are not those of mesh axes."""
    module = total.computation.module
    groups = {frozenset(group) for group in device_groups(total)}
    names = manual.axis_names
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {frozenset(group) for group in groups_over(module, mesh, axes)} == groups:
                return axes
    return None


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
