"""Which values are the same on all devices of a group.

    scale = parameter, sharded over nothing         {0, 1}, {2, 3}: the same
      -> convert -> loop state, unchanged -> dynamic-slice by the loop's counter -> broadcast: the same
    x     = parameter, sharded over the axis        not the same
      -> all-gather over the axis: the same;  partition-id, custom calls, random numbers: not known
    w     = parameter, sharded over another axis    the same -> all-gather over that axis: the same

A partitioned program has one code for all devices, and what XLA's partitioner knew of its values is gone but for the
shardings of the entry's parameters. So it is proved again, backward from a value: all that it follows from is the same
on the devices of a group, or a collective has made it so. What a loop hands on is the same in every iteration if it is
at the start and each iteration keeps it so; what comes out of one must have been through as many iterations on each.

`same_on` errs on one side: False means that it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.unknown_fields import UnknownFieldSet

from dhelix.passes.analysis.collectives import Groups, device_groups, mesh_groups
from dhelix.passes.hlo import Computation, HloModule, Instruction, graph

_GIVEN = frozenset(("constant", "iota"))
_FOLLOWS = frozenset(
    """abs add and bitcast broadcast ceil clamp compare concatenate convert copy cosine divide dot dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one floor gather log log-plus-one logistic maximum
    minimum multiply negate not or pad power reduce remainder reshape reverse rsqrt select sign sine slice sqrt subtract
    tanh transpose tuple xor""".split()
)
"""Opcodes whose result is the same where their operands are."""
_REPLICATED = 0


class Replication:
    """What of a module is the same on several devices. Which computation calls which must not change meanwhile."""

    def __init__(self, module: HloModule) -> None:
        self._entry = module.entry
        self._callers = graph.callers(module)

    def same_on(self, groups: Groups, *values: Instruction) -> bool:
        """Whether each of `values`, where it is computed, is the same on all devices of each group."""
        pending, seen = list(values), set(values)
        while pending:
            needed = self._needed(pending.pop(), groups)
            if needed is None:
                return False
            pending += [n for n in needed if n not in seen]
            seen.update(needed)
        return True

    def _needed(self, value: Instruction, groups: Groups) -> list[Instruction] | None:
        """Values that must be the same for this one to be; None where it is not known."""
        if value.opcode in _GIVEN:
            return []
        if value.opcode == "parameter":
            same = value.computation is self._entry and _is_same_parameter(value, groups)
            return [] if same else None
        if value.opcode in ("all-gather", "all-reduce"):
            theirs = device_groups(value) if value.proto.channel_id else ()
            if _is_one(groups, {device: n for n, group in enumerate(theirs) for device in group}):
                return []
            return value.operands if _are_parallel(groups, theirs) else None
        if value.opcode == "get-tuple-element":
            return self._element(value.operands[0], value.tuple_index)
        return value.operands if value.opcode in _FOLLOWS else None

    def _element(self, source: Instruction, index: int) -> list[Instruction] | None:
        """Likewise of an element of a tuple."""
        while source.opcode == "opt-barrier":
            source = source.operands[0]
        if source.opcode == "tuple":
            return [source.operands[index]]
        if source.opcode == "while":
            carried = self._carried(source, index)
            return None if carried is None else [*carried, source.called[1].root]
        if source.opcode == "parameter":
            return self._state(source.computation, index)
        return None

    def _state(self, computation: Computation, index: int) -> list[Instruction] | None:
        """Likewise of what the body or condition of a loop reads of its state."""
        callers = self._callers[computation]
        if len(callers) != 1 or callers[0].opcode != "while":
            return None
        return self._carried(callers[0], index)

    def _carried(self, loop: Instruction, index: int) -> list[Instruction] | None:
        """Likewise of an element of a loop's state, in any iteration."""
        start, root = loop.operands[0], loop.called[0].root
        if root.opcode != "tuple":
            return None
        before = self._element(start, index)
        return None if before is None else [*before, root.operands[index]]


def _is_same_parameter(parameter: Instruction, groups: Groups) -> bool:
    """Whether the devices of each group hold the same shard of a parameter of the entry."""
    sharding = parameter.proto.sharding
    if not parameter.proto.HasField("sharding") or len(UnknownFieldSet(sharding)):
        return False
    if not sharding.HasField("named_sharding"):
        return sharding.type == _REPLICATED
    named = sharding.named_sharding
    if len(UnknownFieldSet(named)):  # of an axis that parts are still to be summed over, for example
        return False
    axes = [axis for dimension in named.dim_shardings for axis in dimension.axes]
    if not axes:
        return not named.mesh.device_ids  # a mesh of one device
    return _is_one(groups, {device: n for group in mesh_groups(named.mesh, axes) for n, device in enumerate(group)})


def _are_parallel(groups: Groups, theirs: Groups) -> bool:
    """Whether devices of one of `groups` exchange with devices that are pairwise in one of `groups`, as along another
    axis of a mesh."""
    number = {device: n for n, group in enumerate(groups) for device in group}
    beside = {device: tuple(number.get(d, -1) for d in group) for group in theirs for device in group}
    rows = [{beside.get(device, ()) for device in group} for group in groups]
    return all(len(row) == 1 and not row & {()} and -1 not in next(iter(row)) for row in rows)


def _is_one(groups: Groups, number: Mapping[int, int]) -> bool:
    """Whether all devices of each group have one number."""
    found = [{number.get(device) for device in group} for group in groups]
    return bool(found) and all(len(numbers) == 1 and None not in numbers for numbers in found)
