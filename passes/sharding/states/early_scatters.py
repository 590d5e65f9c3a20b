"""Moves the reduce-scatter of a gradient to where the gradient appears: into the loops over layers and micro-batches.

    for each micro-batch:                                    for each micro-batch:
        for l: stack[l] = g(l)                                   for l: shards[l] = reduce-scatter(g(l))
        sum += stack                                   ->        sum of shards += shards
    reduce-scatter(sum / M)                                  (sum of shards) / M

Stack and sum then have the size of a shard (ZeRO-2 and ZeRO-3).

Why it is legal: a reduce-scatter of a sum is the sum of reduce-scatters, and it commutes with everything that only
moves or stacks elements, scales them by a constant, or converts them between floating-point types. Only the order of
additions changes. Nothing else reads what is split. All devices run the same iterations.
Types: a gradient is summed over devices in the type that it has where it appears, but never in float16, in which a sum
may overflow.
Cost: each micro-batch reduces (AMSP section IV-C, s_g > s_p).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, Computation, Instruction, shapes
from dhelix.passes.hlo.stacks import is_constant, starts_at_zero, zeros_behind
from dhelix.passes.sharding.states.moves import TAKES, Users, divide, divide_taken, is_wider, source_dimension
from dhelix.passes.strands.gradients.partial_sums import keeps_sums

_MOVES = frozenset("convert copy dynamic-slice reshape transpose".split())
type Scatter = Callable[[Instruction, int], Instruction]
type Operand = tuple[Instruction, int]
"""An instruction and the number of its operand."""


@dataclass
class _Way:
    """What changes if the sum over devices moves from a value to the parts that the value is added up from.

    Attributes:
      values: the values that are split afterwards, each with the split dimension.
      shapes: further shapes in which such a value stands.
      ends: operands that are summed over devices afterwards, each with the split dimension.
      constants: operands that are the same on all devices and for all elements: factors, and the zeros of a start.
      starts: the tuples with which loops on the way start.
    """

    values: dict[Instruction, int] = field(default_factory=dict)
    shapes: list[tuple[Any, int]] = field(default_factory=list)
    ends: dict[Operand, int] = field(default_factory=dict)
    constants: dict[Operand, int] = field(default_factory=dict)
    starts: set[Instruction] = field(default_factory=set)

    def add(self, other: _Way) -> None:
        """Raises PassRefusal if a value is split along two dimensions."""
        if any(other.values.get(value, at) != at for value, at in self.values.items()):
            raise PassRefusal("the gradient is added to a transpose of itself")
        self.values |= other.values
        self.shapes += other.shapes
        self.ends |= other.ends
        self.constants |= other.constants
        self.starts |= other.starts


class EarlyScatters:
    """Moves the reduce-scatters of one shard_map. The ways of different gradients do not meet, so users stay known."""

    def __init__(self) -> None:
        self._users = Users()
        self._changed: dict[Computation, None] = {}

    def finish(self) -> None:
        """Orders the instructions of what `move` has changed."""
        for computation in self._changed:
            computation.sort()

    def move(self, reader: Instruction, split: tuple[int, int], scatter: Scatter) -> bool:
        """Makes the first operand of `reader` the reduce-scattered gradient, with reduce-scatters as early as possible.

        Call `finish` after the last gradient.

        Args:
          split: the dimension along which the gradient is scattered, and into how many parts.
          scatter: appends the reduce-scatter of an instruction along a dimension.

        Returns:
          Whether a loop over micro-batches or layers adds shards up now. If not, nothing has changed.
        """
        dimension, parts = split
        try:
            way = self._back(reader.operands[0], reader, dimension, parts)
        except PassRefusal:
            way = None
        if way is None:
            return False
        self._changed.update((value.computation, None) for value in way.values)
        for value, at in way.values.items():
            divide(value.shape, at, parts)
            if value.opcode in TAKES:
                divide_taken(value, at, parts)
        for shape, at in way.shapes:
            divide(shape, at, parts)
        for (user, number), at in way.constants.items():
            made = Builder(user.computation).copy(user.operands[number], user.operands[number].operands)
            divide(made.shape, at, parts)
            user.operands[number] = made
        for (user, number), at in way.ends.items():
            user.operands[number] = _scattered(user.operands[number], at, parts, scatter)
            self._changed[user.computation] = None
        return True

    def _back(self, value: Instruction, reader: Instruction, dimension: int, parts: int) -> _Way | None:
        """The way from `value`, which only `reader` may read, back to a loop's state; None if there is none."""
        if value.opcode == "get-tuple-element":
            if value.operands == value.computation.parameters:
                return _Way({value: dimension})
            return self._through_loop(value, reader, dimension, parts)
        if self._users.of(value) != [reader]:
            return None
        return self._through(value, dimension, parts)

    def _through(self, value: Instruction, dimension: int, parts: int) -> _Way | None:
        """The way through an instruction that is linear in the operands that lead to a loop's state."""
        linear, factors = _linear(value, dimension, parts)
        found = {number: self._back(value.operands[number], value, at, parts) for number, at in linear.items()}
        if all(way is None for way in found.values()):
            return None
        made = _Way({value: dimension})
        made.constants.update({(value, number): dimension for number in factors})
        for number, way in found.items():
            made.add(way or self._end(value, number, linear[number]))
        return made

    def _end(self, reader: Instruction, number: int, dimension: int) -> _Way:
        value = reader.operands[number]
        zero = value.opcode == "broadcast" and zeros_behind(value) is value
        there: dict[Operand, int] = {(reader, number): dimension}
        return _Way(constants=there) if zero else _Way(ends=there)

    def _through_loop(self, result: Instruction, reader: Instruction, dimension: int, parts: int) -> _Way | None:
        """The way through an element of a loop's state, to which each iteration adds, or into which it writes."""
        (loop,), k = result.operands, result.tuple_index
        if loop.opcode != "while" or loop.operands[0].opcode != "tuple" or loop.called[0].root.opcode != "tuple":
            return None
        start, (body, condition) = loop.operands[0], loop.called
        reads, tested = (self._reads(one.parameters[0], k) for one in (body, condition))
        after = [read for read in self._reads(loop, k) if self._users.of(read)]
        once = start.operands.count(start.operands[k]) == 1 or start.operands[k].opcode == "broadcast"
        if not once or self._users.of(start) != [loop] or after != [result] or self._users.of(result) != [reader]:
            return None
        if any(map(self._users.of, tested)) or body.root.operands.count(body.root.operands[k]) > 1:
            return None
        way = self._back(body.root.operands[k], body.root, dimension, parts)
        if way is None or not reads or not self._read_alone(reads, way):
            return None
        way.add(self._back(start.operands[k], start, dimension, parts) or self._end(start, k, dimension))
        for read in (*reads, *tested, *self._reads(loop, k)):
            way.values[read] = dimension
        way.starts.add(start)
        for owner in (start, loop, body.parameters[0], condition.parameters[0], body.root):
            way.shapes.append((owner.shape.tuple_shapes[k], dimension))
        return way

    def _read_alone(self, reads: Iterable[Instruction], way: _Way) -> bool:
        """Whether only the way reads an element of a loop's state in the loop's body, and the way reads no other one.

        Args:
          reads: the instructions that read the element.
        """
        (body,) = {read.computation for read in reads}
        reached = {i for i in way.values if i.computation is body and i.operands == body.parameters}
        users = [user for read in reads for user in self._users.of(read)]
        return bool(reached) and reached <= set(reads) and all(i in way.values or i in way.starts for i in users)

    def _reads(self, owner: Instruction, k: int) -> list[Instruction]:
        return [read for read in self._users.of(owner) if read.opcode == "get-tuple-element" and read.tuple_index == k]


def _linear(value: Instruction, dimension: int, parts: int) -> tuple[dict[int, int], list[int]]:
    """The operands in which `value` is linear, each with the dimension that is split; and the constant factors."""
    match value.opcode:
        case "add" | "subtract":
            return {0: dimension, 1: dimension}, []
        case "multiply" | "divide" if is_constant(value.operands[1]):
            return {0: dimension}, [1]
        case "multiply" if is_constant(value.operands[0]):
            return {1: dimension}, [0]
        case "dynamic-update-slice":
            stack, slot, *indices = value.operands
            whole = slot.shape.dimensions[dimension] == stack.shape.dimensions[dimension]
            return ({0: dimension, 1: dimension} if whole and starts_at_zero([indices[dimension]]) else {}), []
        case move if move in _MOVES and (move != "convert" or _summed_before(value)):
            source = source_dimension(value, dimension, parts)
            return ({} if source is None else {0: source}), []
        case _:
            return {}, []


def follows_loop(value: Instruction) -> bool:
    """Whether a gradient is the result of a loop, but for scaling and moves."""
    while value.opcode != "get-tuple-element":
        numbers = list(_linear(value, 0, 1)[0]) if value.shape.dimensions else []
        if len(numbers) != 1:
            return False
        value = value.operands[numbers[0]]
    return value.operands[0].opcode == "while"


def _summed_before(convert: Instruction) -> bool:
    """Whether a sum over devices may come before the conversion."""
    return keeps_sums(convert) and convert.operands[0].shape.element_type != shapes.F16


def _scattered(value: Instruction, dimension: int, parts: int, scatter: Scatter) -> Instruction:
    """The reduce-scattered `value`: in the type in which it appears, if a conversion to a wider type made it."""
    if value.opcode == "convert" and is_wider(value) and _summed_before(value):
        made = Builder(value.computation).copy(value, [scatter(value.operands[0], dimension)])
        divide(made.shape, dimension, parts)
        return made
    return scatter(value, dimension)
