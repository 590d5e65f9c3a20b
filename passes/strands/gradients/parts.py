"""Rewrites sums over devices as their parts: one part per replica, along a new first dimension.

    dw = dot(x, dy)     x: [b, s, k], dy: [b, s, n], contracted over b and s, b split over "dp" of 4 devices

In parts, this becomes

    x'  = reshape(x)    [4, b/4, s, k];  dy' likewise
    dw' = dot(x', dy')  [4, k, n], where 4 is a batch dimension of the dot, split over "dp"

Then `dw` is the sum of `dw'` along its first dimension. Operations on `dw` (`partial_sums.py`) are applied to the
parts. In an accumulator, the parts lie along an additional dimension. In a stack, this dimension follows the dimension
of the slots.

Legality assumes nothing about the partitioner: the parts add up to the sum, however arrays are split. If `b` is split
as Shardy's propagation predicts, every device computes its own part without communication.

Why it is legal: a sum over b becomes a sum over b/4 and a sum over 4. Floating-point additions are grouped differently,
as they are when a partitioner splits b. The parts of a product are the parts of one factor, each times the other
factor. The parts of a select or a concatenate consist of the parts of its operands. Any other value is the sum of
itself and zeros, so its first part is the value and all other parts are zeros.
"""

import math
from collections.abc import Sequence
from typing import Any

from dhelix.passes.analysis.names import REPLICAS
from dhelix.passes.hlo import Builder, Computation, Instruction, shapes
from dhelix.passes.hlo.constraints import Axes, Over, constrained, is_sharding_constraint
from dhelix.passes.hlo.edit import replace_uses
from dhelix.passes.hlo.stacks import zeros_behind
from dhelix.passes.strands.gradients.accumulators import Accumulator, Use, given_to
from dhelix.passes.strands.gradients.partial_sums import (
    Partial,
    PartialSums,
    Summed,
    scattered_dimensions,
    summed_dimensions,
)

_FIRST_INDEX = {"dynamic-slice": 1, "dynamic-update-slice": 2}


class Parts:
    """Makes parts of values, in the computations that make the whole values. Rewrites accumulators to hold parts.

    Args:
      sums: the sums of the program; all `Parts` of the program share this object.
      axes: the mesh axes over which sums stay open, which means that their parts are not added up yet.
    """

    def __init__(self, sums: PartialSums, axes: Axes) -> None:
        self.sums = sums
        self.known = sums.known
        self.axes = axes
        self.count = math.prod(self.known.axes[axis] for axis in axes)
        self._made: dict[Instruction, Instruction] = {}
        self._open: dict[Instruction, int] = {}  # values of opened accumulators -> dimension of replicas
        self._closed: dict[Instruction, Instruction] = {}  # final sums -> accumulator values that are summed

    def open(self, one: Accumulator, partial: Partial) -> None:
        """Rewrites an accumulator to hold parts.

        This changes (1) added values, (2) loop state and values of the accumulator, (3) initial zeros, and (4) readers
        of the final sum. These then read the sum of the parts.

        Args:
          partial: the accumulator as a sum (`PartialSums.of_accumulator`).
        """
        rank = one.slot_rank
        summed_in = _summed_in(partial.element_type)
        added = [(use, self._in_place(use[0].operands[use[1]], rank)) for use in one.added]  # (1)
        _give(added)
        tuples: dict[Use, None] = {}  # (2)
        for holder, element in one.elements:
            held = [holder, *(called.parameters[0] for called in holder.called), *given_to(holder)]
            tuples.update(dict.fromkeys((each, element) for each in held))
        for each, element in tuples:
            _widen(each.shape.tuple_shapes[element], rank, self.count)
        for value in one.values:
            at = self._open[value] = _widen(value.shape, rank, self.count)
            if value.opcode in _FIRST_INDEX:
                first = _FIRST_INDEX[value.opcode]
                zero = Builder(value.computation).scalar(0, value.operands[first].shape.element_type)
                value.operands.insert(first + at, zero)
            if value.opcode == "dynamic-slice":
                value.proto.dynamic_slice_sizes.insert(at, self.count)
        for value in one.values:  # a constraint describes the sum; `placed` constrains the parts instead
            if is_sharding_constraint(value) and not zeros_behind(value):
                replace_uses(value.computation, value, value.operands[0])
        zeros = [(use, zeros_behind(use[0].operands[use[1]])) for use in one.zeros]
        _give([(use, self.zeros(found, _rank(found) - rank)) for use, found in zeros if found is not None])  # (3)
        sums: dict[Instruction, Instruction] = {}
        for reader, number in one.ends:  # (4)
            value = reader.operands[number]
            stored = _stored(reader)
            if value not in sums:
                sums[value] = sum_of_parts(value, self._open[value], summed_in, stored)
                self._closed[sums[value]] = value
            reader.operands[number] = sums[value]
            if stored is not None:
                replace_uses(reader.computation, reader, sums[value])

    def of(self, value: Instruction) -> Instruction:
        """The parts of `value`, as an array [replicas, *shape of `value`] in the same computation."""
        value = self._closed.get(value, value)
        if value not in self._made:
            made = self._of(value)
            made.proto.metadata.CopyFrom(value.proto.metadata)
            self._made[value] = made
        return self._made[value]

    def _of(self, value: Instruction) -> Instruction:
        builder = Builder(value.computation)
        if value in self._open:
            return self._replicas_first(builder, value)
        if not set(self.axes) <= set(self.sums.axes(value)):
            return self.placed(builder, self._first(builder, value))
        if value.opcode in ("dot", "reduce") and self._sums_here(value):
            made = self._dot(builder, value) if value.opcode == "dot" else self._reduce(builder, value)
            return self.placed(builder, made)
        if value.opcode == "scatter":
            return self.placed(builder, self._scatter(builder, value))
        if zeros := zeros_behind(value):
            return self.zeros(zeros)
        if value.opcode == "get-tuple-element":
            self.open(self.sums.made_by_loop(value), self.sums.of(value))
            return self._replicas_first(builder, value)
        if is_sharding_constraint(value):
            return self.placed(builder, self.of(value.operands[0]), self.known.said(value))
        if value.opcode in ("multiply", "divide"):
            factor = self.sums.factor(value)
            each = enumerate(value.operands)
            operands = [self.of(o) if number == factor else self._for_each(builder, o) for number, o in each]
        elif value.opcode in ("pad", "reduce"):
            operands = [self.of(value.operands[0]), value.operands[1]]
        elif value.opcode == "select":
            condition, *chosen = value.operands
            condition = self._for_each(builder, condition) if _rank(condition) else condition
            operands = [condition, *(self.of(o) for o in chosen)]
        else:
            operands = [self.of(o) for o in value.operands]
        return self._alike(builder, value, operands)

    def zeros(self, whole: Instruction, at: int = 0) -> Instruction:
        """The parts of the array of zeros `whole`, with the replicas along dimension `at`."""
        builder = Builder(whole.computation)
        made = builder.make("broadcast", with_dimension(whole.shape, at, self.count), whole.operands)
        return self.placed(builder, made, at=at)

    def _first(self, builder: Builder, value: Instruction) -> Instruction:
        """Parts that hold `value` for the first replica and zeros for the others."""
        shape = with_dimension(value.shape, 0, self.count)
        number = builder.make("iota", shapes.array(shapes.S32, shape.dimensions), dimensions=[0])
        first = builder.make("broadcast", number.shape, [builder.scalar(0, shapes.S32)])
        chosen = shapes.array(shapes.PRED, shape.dimensions)
        is_first = builder.make("compare", chosen, [number, first], comparison_direction="EQ")
        zero = builder.make("convert", shapes.scalar(shape.element_type), [builder.number(0.0, shapes.F32)])
        zeros = builder.make("broadcast", shape, [zero])
        return builder.make("select", shape, [is_first, self._for_each(builder, value), zeros])

    def _replicas_first(self, builder: Builder, value: Instruction) -> Instruction:
        """A value of an opened accumulator with its dimension of replicas moved to the front."""
        return builder.with_dimension_at(value, self._open[value], 0)

    def _in_place(self, value: Instruction, rank: int) -> Instruction:
        """The parts of `value`, with the dimension of replicas before the last `rank` dimensions."""
        at = _rank(value) - rank  # computed first, because `of` may widen `value` itself
        return Builder(value.computation).with_dimension_at(self.of(value), 0, at)

    def _sums_here(self, value: Instruction) -> bool:
        """Whether `value` itself sums over one of the open axes."""
        summed = {axis for _, split in summed_dimensions(value, self.known) for axis in split}
        return not summed.isdisjoint(self.axes)

    def placed(
        self, builder: Builder, value: Instruction, split: Sequence[Over] | None = None, at: int = 0
    ) -> Instruction:
        """`value` with a sharding constraint that splits dimension `at` over the replicas.

        The other dimensions are split as `split` says. Without `split`, propagation decides how they are split.
        """
        dimensions: list[Over] = list(split) if split is not None else [None] * (_rank(value) - 1)
        dimensions.insert(at, self.axes)
        return constrained(builder, value, dimensions, self.known.mesh, self.known.axes)

    def _for_each(self, builder: Builder, value: Instruction) -> Instruction:
        shape = with_dimension(value.shape, 0, self.count)
        return builder.make("broadcast", shape, [value], dimensions=range(1, 1 + _rank(value)))

    def _alike(self, builder: Builder, value: Instruction, operands: list[Instruction]) -> Instruction:
        """Applies the operation of `value` to each part. The first dimension of `operands` holds the replicas."""
        made = builder.copy(value, operands)
        made.proto.shape.CopyFrom(with_dimension(value.shape, 0, self.count))
        moved = [d + 1 for d in value.proto.dimensions]
        if value.opcode in ("transpose", "broadcast"):
            moved = [0, *moved]
        made.proto.dimensions[:] = moved
        if value.opcode == "slice":
            whole = type(made.proto.slice_dimensions[0])(start=0, limit=self.count, stride=1)
            rest = list(made.proto.slice_dimensions)
            del made.proto.slice_dimensions[:]
            made.proto.slice_dimensions.extend([whole, *rest])
        if value.opcode == "pad":
            rest = list(made.proto.padding_config.dimensions)
            del made.proto.padding_config.dimensions[:]
            made.proto.padding_config.dimensions.add()
            made.proto.padding_config.dimensions.extend(rest)
        return made

    def _dot(self, builder: Builder, value: Instruction) -> Instruction:
        numbers = value.proto.dot_dimension_numbers
        summed = summed_dimensions(value, self.known)
        sides = [self._taken_apart(builder, value, side, summed) for side in (0, 1)]
        made = builder.copy(value, [operand for operand, _, _ in sides])
        own = made.proto.dot_dimension_numbers
        old_batches = (numbers.lhs_batch_dimensions, numbers.rhs_batch_dimensions)
        batches = (own.lhs_batch_dimensions, own.rhs_batch_dimensions)
        contracted = (own.lhs_contracting_dimensions, own.rhs_contracting_dimensions)
        for side, (_, places, replicas) in enumerate(sides):
            batches[side][:] = [*replicas, *(places[d][0] for d in old_batches[side])]
            contracted[side][:] = [d for dims, _ in summed for d in places[dims[side]] if d not in replicas]
        return self._joined(builder, made, value)

    def _reduce(self, builder: Builder, value: Instruction) -> Instruction:
        summed = summed_dimensions(value, self.known)
        operand, places, replicas = self._taken_apart(builder, value, 0, summed)
        made = builder.copy(value, [operand, value.operands[1]])
        made.proto.dimensions[:] = [d for dims, _ in summed for d in places[dims[0]] if d not in replicas]
        kept = [d for d in range(_rank(value.operands[0])) if d not in value.proto.dimensions]
        order = [d for d in range(_rank(operand)) if d in replicas or any(places[k] == [d] for k in kept)]
        shape = shapes.array(value.shape.element_type, [operand.shape.dimensions[d] for d in order])
        made.proto.shape.CopyFrom(shape)
        to_front = [order.index(d) for d in replicas]
        permutation = [*to_front, *(n for n in range(len(order)) if n not in to_front)]
        if permutation != list(range(len(order))):
            turned = shapes.array(value.shape.element_type, [shape.dimensions[n] for n in permutation])
            made = builder.make("transpose", turned, [made], dimensions=permutation)
        return self._joined(builder, made, value)

    def _scatter(self, builder: Builder, value: Instruction) -> Instruction:
        """The parts of a scatter: each replica adds its own rows to its own zeros.

        The scatter gets one batching dimension for each axis of the replicas.
        """
        summed = scattered_dimensions(value, self.known)
        indices, of_indices, index_replicas = self._taken_apart(builder, value, 1, [((0, *d), s) for d, s in summed])
        updates, of_updates, _ = self._taken_apart(builder, value, 2, [((0, *d), s) for d, s in summed])
        sizes = [self.known.axes[axis] for axis in self.axes]
        shape = shapes.array(value.shape.element_type, [*sizes, *value.shape.dimensions])
        zeros = zeros_behind(value.operands[0])
        assert zeros is not None  # checked by `scattered_dimensions`
        start = builder.make("broadcast", shape, zeros.operands)
        made = builder.copy(value, [start, indices, updates])
        made.proto.shape.CopyFrom(shape)
        old, own = value.proto.scatter_dimension_numbers, made.proto.scatter_dimension_numbers
        own.update_window_dims[:] = [of_updates[d][0] for d in old.update_window_dims]
        own.inserted_window_dims[:] = [d + len(sizes) for d in old.inserted_window_dims]
        own.scatter_dims_to_operand_dims[:] = [d + len(sizes) for d in old.scatter_dims_to_operand_dims]
        own.input_batching_dims[:] = range(len(sizes))
        own.scatter_indices_batching_dims[:] = index_replicas
        last = len(value.operands[1].shape.dimensions)
        own.index_vector_dim = _rank(indices) if old.index_vector_dim == last else of_indices[old.index_vector_dim][0]
        return self._joined(builder, made, value)

    def _taken_apart(
        self, builder: Builder, value: Instruction, side: int, summed: list[Summed]
    ) -> tuple[Instruction, dict[int, list[int]], list[int]]:
        """Reshapes operand number `side`, so that each mesh axis that splits a summed dimension gets its own dimension.

        Returns:
          The reshaped operand, the numbers of the new dimensions by old dimension, and the number of the new dimension
          of each axis in `self.axes`.
        """
        operand = value.operands[side]
        cut = {dims[side]: split for dims, split in summed if not set(split).isdisjoint(self.axes)}
        sizes: list[int] = []
        places: dict[int, list[int]] = {}
        replicas: dict[str, int] = {}
        for number, size in enumerate(operand.shape.dimensions):
            first = len(sizes)
            for axis in cut.get(number, ()):
                if axis in self.axes:
                    replicas[axis] = len(sizes)
                size //= self.known.axes[axis]
                sizes.append(self.known.axes[axis])
            sizes.append(size)
            places[number] = list(range(first, len(sizes)))
        assert set(replicas) == set(self.axes)  # `value` is a sum over all axes (`_of`)
        apart = builder.make("reshape", shapes.array(operand.shape.element_type, sizes), [operand])
        return apart, places, [replicas[axis] for axis in self.axes]

    def _joined(self, builder: Builder, made: Instruction, value: Instruction) -> Instruction:
        """`made` with its replica dimensions joined into one.

        If `made` is a dot, first gives it its shape with the replica dimensions, in place.
        """
        sizes = [self.known.axes[axis] for axis in self.axes]
        if made.opcode == "dot":
            made.proto.shape.CopyFrom(shapes.array(value.shape.element_type, [*sizes, *value.shape.dimensions]))
        if len(sizes) == 1:
            return made
        return builder.make("reshape", with_dimension(value.shape, 0, self.count), [made])


def _summed_in(widest: int | None) -> int:
    """The type in which parts are added up.

    It is the widest type in which the program sums over devices, if that type is bfloat16 or float64. Otherwise it is
    float32. It is never float16, because a sum over micro-batches may exceed the range of float16.
    """
    return widest if widest in (shapes.BF16, shapes.F64) else shapes.F32


def _give(values: list[tuple[Use, Instruction]]) -> None:
    for (reader, number), value in values:
        reader.operands[number] = value


def _widen(shape: Any, rank: int, count: int) -> int:
    """Inserts a dimension of size `count` into `shape`, before its last `rank` dimensions. Returns the new number."""
    at = len(shape.dimensions) - rank
    shape.CopyFrom(with_dimension(shape, at, count))
    return at


def _stored(reader: Instruction) -> Instruction | None:
    """The sharding constraint that says how a final sum is stored, if `reader` only says how it was accumulated.

    `passes/sharding/states/state_sharding.py` makes such pairs of constraints. None: `reader` is another instruction.
    """
    users = reader.computation.users()[reader] if is_sharding_constraint(reader) else []
    return users[0] if len(users) == 1 and is_sharding_constraint(users[0]) else None


def sum_of_parts(value: Instruction, at: int, element_type: int, stored: Instruction | None = None) -> Instruction:
    """The sum of `value` along dimension `at`, added up in `element_type` and converted to the type of `value`.

    If the sharding constraint `stored` is given, the sum is split as it says. The partitioner then makes one
    reduce-scatter, because nothing stands between the sum and the constraint.
    """
    builder = Builder(value.computation)
    sizes = list(value.shape.dimensions)
    del sizes[at]
    part = builder.make("convert", shapes.array(element_type, value.shape.dimensions), [value])
    zero = builder.number(0.0, element_type)
    made = builder.make(
        "reduce",
        shapes.array(element_type, sizes),
        [part, zero],
        name=REPLICAS,
        called=[addition(builder, element_type)],
        dimensions=[at],
    )
    if stored is not None:
        made = builder.copy(stored, [made])
        made.proto.shape.CopyFrom(shapes.array(element_type, sizes))
    return builder.make("convert", shapes.array(value.shape.element_type, sizes), [made])


def addition(builder: Builder, element_type: int) -> Computation:
    """A computation that adds two scalars of type `element_type`."""
    inside = Builder(builder.module.new_computation(REPLICAS))
    a, b = (inside.parameter(k, shapes.scalar(element_type)) for k in range(2))
    return inside.finish(inside.binary("add", a, b))


def with_dimension(shape: Any, at: int, size: int) -> Any:
    """`shape` with one more dimension of size `size` inserted at `at`."""
    sizes = list(shape.dimensions)
    sizes.insert(at, size)
    return shapes.array(shape.element_type, sizes)


def _rank(value: Instruction) -> int:
    return len(value.shape.dimensions)
