"""Where a split dimension of an array is after an instruction that only moves elements; shapes and users of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.stacks import starts_at_zero

TAKES = frozenset(("dynamic-slice", "slice"))
"""Opcodes whose attributes have sizes of the result."""
_MOVES = frozenset("convert copy reshape slice transpose".split())


class Users:
    """The users of instructions in several computations, as they were when a computation was first asked about."""

    def __init__(self) -> None:
        self._of: dict[Computation, dict[Instruction, list[Instruction]]] = {}

    def of(self, value: Instruction) -> list[Instruction]:
        computation = value.computation
        if computation not in self._of:
            self._of[computation] = computation.users()
        return self._of[computation][value]


def moved_dimension(move: Instruction, source: Sequence[int], dimension: int, parts: int) -> int | None:
    """Where dimension `dimension` of the operand is in the result of `move`, if the instruction moves all parts alike.

    Args:
      source: the sizes of the whole operand.
      parts: into how many parts the dimension is divided.

    Returns:
      The dimension; None if the instruction computes, takes only some elements along the dimension, or mixes parts.
    """
    match move.opcode:
        case "copy" | "convert":
            return dimension
        case "transpose":
            return list(move.proto.dimensions).index(dimension)
        case "reshape":
            return reshaped_dimension(source, move.shape.dimensions, dimension, parts)
        case "dynamic-slice":
            whole = move.shape.dimensions[dimension] == source[dimension]
            return dimension if whole and starts_at_zero([move.operands[1 + dimension]]) else None
        case "slice":
            taken = move.proto.slice_dimensions[dimension]
            return dimension if (taken.start, taken.limit, taken.stride) == (0, source[dimension], 1) else None
        case _:
            return None


def source_dimension(move: Instruction, dimension: int, parts: int) -> int | None:
    """The inverse of `moved_dimension`: where dimension `dimension` of the result is in the operand."""
    source = move.operands[0].shape.dimensions
    if move.opcode == "transpose":
        return move.proto.dimensions[dimension]
    if move.opcode == "reshape":
        return reshaped_dimension(move.shape.dimensions, source, dimension, parts)
    return moved_dimension(move, source, dimension, parts)


def reshaped_dimension(before: Sequence[int], after: Sequence[int], dimension: int, parts: int) -> int | None:
    """The dimension of `after` whose parts have the elements of the parts of dimension `dimension` of `before`.

    None if there is no such dimension.
    """
    outer = math.prod(before[:dimension])
    for at, size in enumerate(after):
        if size > 1 and math.prod(after[:at]) == outer:
            return at if size % parts == 0 else None
    return None


def is_of_layer(value: Instruction) -> bool:
    """Whether `value` is a slot of a stack, but for moves."""
    while value.opcode in _MOVES:
        (value,) = value.operands
    return value.opcode == "dynamic-slice"


def is_wider(convert: Instruction) -> bool:
    """Whether a conversion makes more bytes of each element."""
    to, source = (shapes.byte_size(shapes.scalar(i.shape.element_type)) for i in (convert, convert.operands[0]))
    return to > source


def divide(shape: Any, dimension: int, parts: int) -> None:
    """Makes `shape` that of one of `parts` parts."""
    shape.dimensions[dimension] //= parts


def divide_taken(taking: Instruction, dimension: int, parts: int) -> None:
    """Divides the sizes in the attributes of one of `TAKES`."""
    if taking.opcode == "dynamic-slice":
        taking.proto.dynamic_slice_sizes[dimension] //= parts
    else:
        taking.proto.slice_dimensions[dimension].limit //= parts
