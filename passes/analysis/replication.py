"""Proves that values are the same on all devices of a group.

For example, with the groups {0, 1} and {2, 3} along the mesh axis "tp":

    scale = parameter, replicated                     the same
      -> convert -> loop state, unchanged -> dynamic-slice by the loop's counter -> broadcast: the same
    x     = parameter, sharded over "tp"              not the same -> all-gather over "tp": the same
    w     = parameter, sharded over "dp"              the same -> all-gather over "dp": the same
    partition-id, custom calls, random numbers        not known

All devices run the same partitioned program. In this program, only the entry's parameters still have shardings. So a
proof starts at a value and goes backward to parameters. A value is the same on all devices of a group if everything it
depends on is the same, or if a collective makes it the same. Loop-carried state is the same in every iteration if its
initial value is the same and the body preserves this. For the result of a loop, the trip count must also be the same on
all devices.

`same_on` is conservative: False means "not proved".
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
"""Opcodes whose result is the same on two devices if the operands are the same."""
_REPLICATED = 0


class Replication:
    """Proves which values of a module are replicated. The module's call graph must not change between proofs."""

    def __init__(self, module: HloModule) -> None:
        self._entry = module.entry
        self._callers = graph.callers(module)

    def same_on(self, groups: Groups, *values: Instruction) -> bool:
        """Whether all devices of each group compute the same value for each of `values`. False if not proved."""
        pending, seen = list(values), set(values)
        while pending:
            needed = self._needed(pending.pop(), groups)
            if needed is None:
                return False
            pending += [n for n in needed if n not in seen]
            seen.update(needed)
        return True

    def _needed(self, value: Instruction, groups: Groups) -> list[Instruction] | None:
        """The values that must be the same so that `value` is the same; None if there is no proof."""
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
        """Like `_needed`, for element `index` of the tuple `source`."""
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
        """Like `_needed`, for an element of the state that a loop's body or condition reads."""
        callers = self._callers[computation]
        if len(callers) != 1 or callers[0].opcode != "while":
            return None
        return self._carried(callers[0], index)

    def _carried(self, loop: Instruction, index: int) -> list[Instruction] | None:
        """Like `_needed`, for an element of a loop's state in every iteration."""
        start, root = loop.operands[0], loop.called[0].root
        if root.opcode != "tuple":
            return None
        before = self._element(start, index)
        return None if before is None else [*before, root.operands[index]]


def _is_same_parameter(parameter: Instruction, groups: Groups) -> bool:
    """Whether the devices of each group hold the same shard of an entry parameter."""
    sharding = parameter.proto.sharding
    if not parameter.proto.HasField("sharding") or len(UnknownFieldSet(sharding)):
        return False
    if not sharding.HasField("named_sharding"):
        return sharding.type == _REPLICATED
    named = sharding.named_sharding
    if len(UnknownFieldSet(named)):  # for example unreduced axes
        return False
    axes = [axis for dimension in named.dim_shardings for axis in dimension.axes]
    if not axes:
        return not named.mesh.device_ids  # a mesh of one device
    return _is_one(groups, {device: n for group in mesh_groups(named.mesh, axes) for n, device in enumerate(group)})


def _are_parallel(groups: Groups, theirs: Groups) -> bool:
    """Whether a collective over `theirs` has the same result on all devices of each group, if its operand is the same.

    For example, this is true if the collective runs along another mesh axis. In general, take any two devices of one of
    `groups`, and the two groups of `theirs` that contain these devices. The members of these two at equal positions
    must belong to the same one of `groups`.
    """
    number = {device: n for n, group in enumerate(groups) for device in group}
    beside = {device: tuple(number.get(d, -1) for d in group) for group in theirs for device in group}
    rows = [{beside.get(device, ()) for device in group} for group in groups]
    return all(len(row) == 1 and not row & {()} and -1 not in next(iter(row)) for row in rows)


def _is_one(groups: Groups, number: Mapping[int, int]) -> bool:
    """Whether `number` maps all devices of each group to the same value."""
    found = [{number.get(device) for device in group} for group in groups]
    return bool(found) and all(len(numbers) == 1 and None not in numbers for numbers in found)
