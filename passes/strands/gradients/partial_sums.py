"""Finds values that are sums over devices: each device could compute its own part of the sum and keep it.

    dw = dot(x, dy)      x: [b, s, k], dy: [b, s, n], contracted over b and s, b split over "dp"

This `dw` is a sum over "dp". Results of operations that distribute over a sum are sums over "dp", too. Such operations
transpose, reshape, convert or scale the sum, select by a condition, or add another sum over "dp". A loop may also stack
or add up such sums. A term that is not a sum over "dp" (such as weight decay) must count once. So it is added to the
first replica's part only.

Legality assumes nothing about the partitioner: `parts.py` rewrites any sum as parts that add up to the sum. Shardy
propagates the program's shardings. The result decides for which axes a rewrite saves communication.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.propagation import Propagated
from dhelix.passes.hlo import Instruction, shapes
from dhelix.passes.hlo.constraints import Axes, is_sharding_constraint
from dhelix.passes.hlo.edit import combines_by
from dhelix.passes.hlo.stacks import is_zero, zeros_behind
from dhelix.passes.strands.gradients.accumulators import Accumulator, Readers, Use, inner_accumulator

ALIKE = frozenset("convert copy negate transpose reshape reverse broadcast slice".split())
"""Operations with one operand that distribute over a sum: applied to each part, they give parts of the result."""

_FACTORS = frozenset("multiply divide".split())
_TERMS = {"add": slice(None), "subtract": slice(None), "concatenate": slice(None), "select": slice(1, None)}

type Summed = tuple[tuple[int, ...], Axes]
"""A summed dimension: its number in each operand that has it, and the mesh axes that it is split over."""


@dataclass(frozen=True)
class Partial:
    """A value as a sum of parts.

    Attributes:
      axes: mesh axes over which the value is a sum, in the mesh's order.
      element_type: the widest type in which the value is summed, as XLA's number of the type; None for zeros.
    """

    axes: Axes
    element_type: int | None


class PartialSums:
    """Decides which values of a program are sums, and over which mesh axes. Create it before the module changes.

    Args:
      carried: the loop-state elements of the accumulators of the whole step. A loop inside one micro-batch may stack or
        add up gradients, but not in any of these elements.
    """

    def __init__(self, known: Propagated, readers: Readers, carried: Collection[Use]) -> None:
        self.known = known
        self._readers = readers
        self._carried = carried
        self._found: dict[Instruction, Partial | PassRefusal] = {}
        self._factors: dict[Instruction, int] = {}
        self._made_by_loops: dict[Instruction, Accumulator] = {}

    def of(self, value: Instruction) -> Partial:
        """`value` as a sum of parts. Raises PassRefusal with the reason if `value` is no such sum."""
        if value not in self._found:
            try:
                self._found[value] = self._of(value)
            except PassRefusal as refusal:
                self._found[value] = refusal
        found = self._found[value]
        if isinstance(found, PassRefusal):
            raise found
        return found

    def axes(self, value: Instruction) -> Axes:
        """The axes over which `value` is a sum; empty if `value` is no sum."""
        try:
            return self.of(value).axes
        except PassRefusal:
            return ()

    def factor(self, product: Instruction) -> int:
        """The number of the operand of `product` that is split into parts. The other operand stays whole.

        Call `of(product)` first.
        """
        return self._factors[product]

    def made_by_loop(self, result: Instruction) -> Accumulator:
        """The accumulator by which a loop inside a micro-batch stacks or adds up `result`. Call `of(result)` first."""
        return self._made_by_loops[result]

    def of_accumulator(self, one: Accumulator) -> Partial:
        """The accumulator `one` as a sum. Its axes are common to all added values, and do not split the accumulator."""
        found = self._joined(one.added)
        split = {axis for value in one.values for over in self.known.of(value) or () for axis in over}
        return Partial(self._ordered(set(found.axes) - split), found.element_type)

    def _of(self, value: Instruction) -> Partial:
        known = self.known
        if zeros_behind(value):
            return Partial(tuple(known.axes), None)
        if value.opcode == "scatter":
            return self._summed(value, scattered_dimensions(value, known))
        if value.opcode == "dot" or (value.opcode == "reduce" and len(value.operands) == 2):
            found = self._summed(value, summed_dimensions(value, known))
            if found.axes or value.opcode == "dot":
                return found
        if value.opcode == "pad" and not is_zero(value.operands[1]):
            raise PassRefusal("a gradient is padded with values other than zero", value)
        if value.opcode == "convert" and not keeps_sums(value):
            raise PassRefusal("a gradient is converted to integers or to floats below 16 bits", value)
        if value.opcode in _TERMS:
            return self._joined([(value, k) for k in range(len(value.operands))[_TERMS[value.opcode]]])
        if value.opcode in _FACTORS:
            return self._scaled(value)
        if value.opcode == "get-tuple-element" and value.operands[0].opcode == "while":
            one = inner_accumulator(value, self._readers)
            if any(element in self._carried for element in one.elements):
                raise PassRefusal("a gradient depends on sums over micro-batches", value)
            self._made_by_loops[value] = one
            return self.of_accumulator(one)
        if is_sharding_constraint(value):  # a sum that is split over an axis is not open over that axis
            split = {axis for over in known.said(value) or () for axis in over or ()}
            found = self.of(value.operands[0])
            return Partial(self._ordered(set(found.axes) - split), found.element_type)
        if value.opcode in ALIKE | {"pad", "reduce"}:
            return self.of(value.operands[0])
        raise PassRefusal(f"a gradient is made by {value.opcode}, which is not a plain sum over replicas", value)

    def _summed(self, value: Instruction, summed: list[Summed]) -> Partial:
        return Partial(self._ordered({axis for _, split in summed for axis in split}), value.shape.element_type)

    def _joined(self, terms: Sequence[Use]) -> Partial:
        """The value that is made by adding up or concatenating terms, as a sum of parts.

        The axes start as the axes of the first term that is a sum. Each later sum that shares some of these axes
        reduces them to the shared axes. All other terms stay whole: they are added to the first replica's part only. So
        axes that split a whole term are left out.
        """
        axes, types = set(self.known.axes), set[int]()
        refusals, whole = list[PassRefusal](), list[Use]()
        for user, number in terms:
            try:
                one = self.of(user.operands[number])
            except PassRefusal as refusal:
                refusals.append(refusal)
                whole.append((user, number))
                continue
            if one.element_type is None:
                continue  # zeros are a sum over any axes
            if axes.isdisjoint(one.axes):
                whole.append((user, number))
            else:
                types.add(one.element_type)
                axes &= set(one.axes)
        if not types and refusals:
            raise refusals[0]
        if not types and whole:
            return Partial((), None)
        for user, number in whole:
            split = self.known.of(user.operands[number]) or self.known.of_operand(user, number)
            if split is None:
                raise PassRefusal("the sharding of a value added to a gradient is unknown", user)
            axes -= {axis for over in split for axis in over}
        widest = max(types, key=lambda kind: shapes.byte_size(shapes.scalar(kind)), default=None)
        return Partial(self._ordered(axes), widest)

    def _scaled(self, value: Instruction) -> Partial:
        """A product or a quotient as a sum of parts. One factor must be a sum; in a quotient, the dividend must be."""
        refusals: list[PassRefusal] = []
        for number, factor in enumerate(value.operands[: 1 if value.opcode == "divide" else 2]):
            try:
                found = self.of(factor)
            except PassRefusal as refusal:
                refusals.append(refusal)
                continue
            if found.axes:
                self._factors[value] = number
                return found
        reason = "a gradient is scaled, and neither factor is a sum over replicas"
        raise refusals[0] if refusals else PassRefusal(reason, value)

    def _ordered(self, axes: set[str]) -> Axes:
        return tuple(axis for axis in self.known.axes if axis in axes)


def summed_dimensions(value: Instruction, known: Propagated) -> list[Summed]:
    """The dimensions that a dot or a reduction sums over.

    Raises PassRefusal if the operands of a dot are split differently, if the sharding of an operand is unknown, or if
    the reduction is not a sum that starts from zero.
    """
    if value.opcode == "reduce":
        if not (combines_by(value) == "add" and is_zero(value.operands[1])):
            raise PassRefusal("a gradient is reduced by an operation other than a sum from zero", value)
        operand = known.of_operand(value, 0)
        if operand is None:
            raise PassRefusal("the sharding of a summed gradient is unknown", value)
        return [((d,), _evenly(operand[d], value.operands[0], d, known)) for d in value.proto.dimensions]
    numbers = value.proto.dot_dimension_numbers
    left, right = known.of_operand(value, 0), known.of_operand(value, 1)
    if left is None or right is None:
        raise PassRefusal("the sharding of a gradient's factors is unknown", value)
    found: list[Summed] = []
    for a, b in zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True):
        longer, shorter = sorted((left[a], right[b]), key=len, reverse=True)
        if longer[: len(shorter)] != shorter:
            raise PassRefusal(f"a gradient's factors are split differently, over {left[a]} and {right[b]}", value)
        found.append(((a, b), _evenly(longer, value.operands[0], a, known)))
    return found


def scattered_dimensions(value: Instruction, known: Propagated) -> list[Summed]:
    """The dimensions along which a scatter adds rows to zeros, as in the gradient of an embedding.

    For each dimension, returns its number in the indices, its number in the updates, and the axes that split it in the
    updates. Raises PassRefusal if `value` is another kind of scatter, or if the updates' sharding is unknown.
    """
    numbers = value.proto.scatter_dimension_numbers
    if (
        len(value.operands) != 3
        or not (combines_by(value) == "add" and zeros_behind(value.operands[0]))
        or numbers.input_batching_dims
    ):
        raise PassRefusal("a gradient's scatter does not add rows to zeros", value)
    updates = known.of_operand(value, 2)
    if updates is None:
        raise PassRefusal("the sharding of scattered rows is unknown", value)
    rows = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    indices = [d for d in range(len(value.operands[1].shape.dimensions)) if d != numbers.index_vector_dim]
    split = [_evenly(updates[b], value.operands[2], b, known) for b in rows]
    return [((a, b), over) for a, b, over in zip(indices, rows, split, strict=True)]


def _evenly(split: Axes, operand: Instruction, dimension: int, known: Propagated) -> Axes:
    """`split`, or no axes if the size of the dimension is not divisible by the number of parts."""
    return () if operand.shape.dimensions[dimension] % math.prod(known.axes[axis] for axis in split) else split


def keeps_sums(convert: Instruction) -> bool:
    """Whether converted parts add up to the converted sum, except for rounding.

    This holds if both types are floating-point types of 16 bits or more.
    """
    types = {convert.shape.element_type, convert.operands[0].shape.element_type}
    return types <= {shapes.F16, shapes.BF16, shapes.F32, shapes.F64}
