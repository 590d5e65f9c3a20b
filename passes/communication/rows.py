"""Finds the rows of a gathered array in later results, and makes instructions that compute a part of the rows.

    x [2048, K] of each of 4 devices                       2048 rows
    g [8192, K] all-gather(x)                              4 devices x 2048 rows in dimension 0, device after device
    r [1, 8192, K] reshape(g)                              rows in dimension 1
    y [1, 8192, H, D] reshape(dot(r, w))                   rows in dimension 1

Elementwise operations, reshapes, transposes, and products with a weight keep rows independent: the result for a row
depends on that row alone. Reductions and concatenations along other dimensions keep rows independent, too. So one part
of each device's rows can be computed separately. The dimension that holds the rows is a product of these factors, from
major to minor:

    [outside, device, part, row in the device's part, inside]

`outside` and `inside` are other dimensions that a reshape merged with the rows. Otherwise, their size is 1.

`follow` finds the rows in a result. `Parts.part` makes an instruction for one part, from operands for that part.
`Parts.take` cuts a part out of a whole array, and `Parts.join` puts parts together.

`row_partition.py` uses this module. (`passes/analysis/dimension_factors.py` follows all dimensions of an array, but
only through reshapes and transposes.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dhelix.passes.analysis.dimension_factors import dense, reshaped
from dhelix.passes.hlo import Builder, Instruction
from dhelix.passes.hlo.edit import ELEMENTWISE

_ELEMENTWISE = ELEMENTWISE | {"and", "ceil", "copy", "floor", "not", "or"}


@dataclass(frozen=True)
class Rows:
    """The position of the rows in an array.

    Attributes:
      dimension: the dimension that holds the rows.
      outside, inside: sizes of the other factors of that dimension. `outside` is major to the rows, `inside` is minor.
      devices: number of devices. Each device has the same number of rows, and the rows are stored device after device.
      size: total number of rows.
    """

    dimension: int
    outside: int
    inside: int
    devices: int
    size: int

    @property
    def is_alone(self) -> bool:
        """Whether the dimension holds nothing but the rows."""
        return self.outside == self.inside == 1

    def at(self, dimension: int) -> Rows:
        """The same rows in another dimension."""
        return replace(self, dimension=dimension)

    def dimensions_of_part(self, shape: Any, parts: int) -> list[int]:
        """The dimensions of an array of `shape` if it keeps only one of `parts` parts of the rows."""
        found = list(shape.dimensions)
        found[self.dimension] //= parts
        return found


def follow(instruction: Instruction, known: Mapping[Instruction, Rows]) -> Rows | None:
    """The position of the rows in the result of `instruction`.

    None if the position is unknown, or if a row of the result depends on other rows.

    Args:
      instruction: the instruction, with at least one operand in `known`.
      known: position of the rows in operands that are computed from the gathered array. `Parts.part` slices the other
        operands.
    """
    sides = [side for side, operand in enumerate(instruction.operands) if operand in known]
    rows = known[instruction.operands[sides[0]]]
    opcode, before, after = instruction.opcode, instruction.operands[sides[0]].shape, instruction.shape
    dimension = rows.dimension
    if opcode in _ELEMENTWISE or opcode == "concatenate":
        same = all(known[instruction.operands[side]] == rows for side in sides)
        joins = opcode == "concatenate" and instruction.proto.dimensions[0] == dimension
        whole = before.dimensions[dimension] == after.dimensions[dimension]  # excludes a scalar predicate
        return rows if same and whole and not joins else None
    if len(sides) > 1:
        return None
    if opcode == "reshape":
        return _regrouped(rows, before.dimensions, after.dimensions)
    if opcode == "transpose":
        return rows.at(list(instruction.proto.dimensions).index(dimension))
    if opcode == "broadcast":
        return rows.at(instruction.proto.dimensions[dimension])
    if opcode == "reduce":
        gone = instruction.proto.dimensions
        one = len(instruction.operands) == 2 and sides == [0]
        return rows.at(dimension - sum(n < dimension for n in gone)) if one and dimension not in gone else None
    if opcode == "dot":
        return _multiplied(rows, instruction, sides[0])
    return None


def _regrouped(rows: Rows, before: Sequence[int], after: Sequence[int]) -> Rows | None:
    """The position of the rows after a reshape; None if no dimension of the result holds all rows.

    A reshape does not change the number of adjacent elements that belong to one row.
    """
    if 0 in before:
        return None
    inside = rows.inside * math.prod(before[rows.dimension + 1 :])
    within = 1
    for dimension in reversed(range(len(after))):
        size = after[dimension]
        if inside % within == 0 and size % (own := inside // within * rows.size) == 0:
            return replace(rows, dimension=dimension, outside=size // own, inside=inside // within)
        within *= size
    return None


def _multiplied(rows: Rows, dot: Instruction, side: int) -> Rows | None:
    numbers = dot.proto.dot_dimension_numbers
    both = (
        [*numbers.lhs_batch_dimensions, *numbers.lhs_contracting_dimensions],
        [*numbers.rhs_batch_dimensions, *numbers.rhs_contracting_dimensions],
    )
    if rows.dimension in both[side]:
        return None
    ranks = [len(o.shape.dimensions) for o in dot.operands]
    free = [[n for n in range(rank) if n not in used] for rank, used in zip(ranks, both, strict=True)]
    batch = len(numbers.lhs_batch_dimensions)
    return rows.at(batch + side * len(free[0]) + free[side].index(rows.dimension))


class Parts:
    """Makes instructions that compute parts of the rows. They are appended to a computation.

    Args:
      builder: adds instructions to the computation.
      count: number of parts; must divide the number of rows of each device.
    """

    def __init__(self, builder: Builder, count: int) -> None:
        self.builder, self.count = builder, count

    def part(
        self, instruction: Instruction, rows: Rows, number: int, operands: Mapping[Instruction, Instruction]
    ) -> Instruction:
        """Makes `instruction` for part `number` of the rows. `operands` maps each operand with rows to its part."""
        own = [operands.get(o) or self._own(o, instruction, rows, number) for o in instruction.operands]
        made = self.builder.copy(instruction, own)
        del made.shape.dimensions[:]
        made.shape.dimensions.extend(rows.dimensions_of_part(instruction.shape, self.count))
        return made

    def _own(self, operand: Instruction, user: Instruction, rows: Rows, number: int) -> Instruction:
        """The operand that `user` reads for part `number`, if `operand` is not computed from the gathered array.

        An elementwise operation or concatenation reads a part of it. Scalars, and operands of other users, stay whole.
        """
        if user.opcode not in _ELEMENTWISE | {"concatenate"} or not operand.shape.dimensions:
            return operand
        if operand.opcode == "broadcast" and rows.dimension not in operand.proto.dimensions:
            return self.part(operand, rows, number, {o: o for o in operand.operands})
        return self.take(operand, rows, number)

    def take(self, whole: Instruction, rows: Rows, number: int) -> Instruction:
        """Cuts part `number` of the rows out of the array `whole`."""
        before, outer, inner, after = self._around(whole.shape, rows)
        apart = reshaped(self.builder, whole, [*before, outer, self.count, inner, *after])
        cut = self.builder.make("slice", dense(whole.shape.element_type, [*before, outer, 1, inner, *after]), [apart])
        for dimension, size in enumerate(apart.shape.dimensions):
            one = dimension == len(before) + 1
            start, limit = (number, number + 1) if one else (0, size)
            cut.proto.slice_dimensions.add(start=start, limit=limit, stride=1)
        made = reshaped(self.builder, cut, rows.dimensions_of_part(whole.shape, self.count))
        return self._named(made, whole, apart, cut)

    def join(self, parts: Sequence[Instruction], whole: Instruction, rows: Rows) -> Instruction:
        """Joins all parts into an array with the shape and metadata of `whole`."""
        before, outer, inner, after = self._around(whole.shape, rows)
        apart = [reshaped(self.builder, one, [*before, outer, inner, *after]) for one in parts]
        shape = dense(whole.shape.element_type, [*before, outer, self.count * inner, *after])
        joined = self.builder.make("concatenate", shape, apart, dimensions=[len(before) + 1])
        made = reshaped(self.builder, joined, whole.shape.dimensions)
        return self._named(made, whole, *apart, joined)

    def _around(self, shape: Any, rows: Rows) -> tuple[list[int], int, int, list[int]]:
        """Splits `shape` around the factor `part` of the rows' dimension (see the module's docstring).

        Returns the dimensions before the rows' dimension, the size of its factors major to `part`, the size of its
        factors minor to `part`, and the dimensions after the rows' dimension.
        """
        outer, inner = rows.outside * rows.devices, rows.size // rows.devices // self.count * rows.inside
        return list(shape.dimensions[: rows.dimension]), outer, inner, list(shape.dimensions[rows.dimension + 1 :])

    @staticmethod
    def _named(made: Instruction, like: Instruction, *others: Instruction) -> Instruction:
        for one in (made, *others):
            one.proto.metadata.CopyFrom(like.proto.metadata)
        return made
