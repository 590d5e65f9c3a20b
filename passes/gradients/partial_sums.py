"""A sum over devices, written as its parts: one for each replica, along a new first dimension.

    dw = dot(x, dy)     x: [b, s, k], dy: [b, s, n], contracted over b and s, b split over "dp" of 4 devices

is, in parts,

    x'  = reshape(x)    [4, b/4, s, k];  dy' likewise
    dw' = dot(x', dy')  [4, k, n], the 4 a batch dimension, split over "dp"

and `dw` is what `dw'` adds up to along its first dimension. What comes after `dw` and treats a sum as it treats its
parts (transposing, reshaping, converting, scaling, adding another such sum) is done to the parts. Nothing is assumed
of the partitioner: the parts add up to the sum whatever is split, and where `b` is split as propagated, every device
makes its own part without asking another.

Why it is legal: addition over b is taken apart into additions over b/4 and over 4; floating point sums associate
differently, as they do where a partitioner splits b. A product is taken apart along one of its factors.
"""

import math
from collections.abc import Sequence
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import REPLICAS
from dhelix.passes.analysis.propagation import Propagated
from dhelix.passes.hlo import Builder, Computation, Instruction, shapes
from dhelix.passes.hlo.constraints import Axes, Over, constrained, is_sharding_constraint
from dhelix.passes.hlo.edit import combines_by
from dhelix.passes.hlo.stacks import is_zero, zeros_behind

_ALIKE = frozenset("convert copy negate transpose reshape broadcast slice pad concatenate".split())
_SUMS = frozenset("add subtract".split())
_FACTORS = frozenset("multiply divide".split())


def partial_axes(value: Instruction, known: Propagated, reached: dict[Instruction, Axes] | None = None) -> Axes:
    """Mesh axes over which `value` is a sum of parts that each device could make for itself, in the mesh's order.

    Raises PassRefusal, with the reason, where it is none.
    """
    reached = {} if reached is None else reached
    if value not in reached:
        reached[value] = _partial_axes(value, known, reached)
    return reached[value]


def _partial_axes(value: Instruction, known: Propagated, reached: dict[Instruction, Axes]) -> Axes:
    if zeros_behind(value):
        return tuple(known.axes)
    if value.opcode == "scatter":
        return _ordered({axis for _, split in _scattered_dimensions(value, known) for axis in split}, known)
    if value.opcode == "dot" or (value.opcode == "reduce" and len(value.operands) == 2):
        summed = _summed_dimensions(value, known)
        axes = {axis for _, split in summed for axis in split}
        if axes or value.opcode == "dot":
            return _ordered(axes, known)
    if value.opcode == "pad" and not is_zero(value.operands[1]):
        raise PassRefusal("a gradient is padded with something else than zeros", value)
    if value.opcode == "convert" and not keeps_sums(value):
        raise PassRefusal("a gradient is rounded to integers or to few bits", value)
    if value.opcode in _ALIKE | {"reduce"} or is_sharding_constraint(value):
        terms = value.operands[:1] if value.opcode in ("pad", "reduce") else value.operands
    elif value.opcode in _SUMS:
        terms = value.operands
    elif value.opcode in _FACTORS:
        return partial_axes(value.operands[_summed_factor(value, known, reached)], known, reached)
    else:
        raise PassRefusal(f"a gradient is made by {value.opcode}, which is no plain sum over replicas", value)
    shared = set(known.axes)
    for term in terms:
        shared &= set(partial_axes(term, known, reached))
    if is_sharding_constraint(value):  # what it splits the sum over is no replica's own any more
        shared -= {axis for over in known.said(value) or () for axis in over or ()}
    return _ordered(shared, known)


def _summed_factor(value: Instruction, known: Propagated, reached: dict[Instruction, Axes]) -> int:
    """The number of the factor of a product that is taken apart; the other one, be it the same sum, stays whole. Of a
    quotient only the first one can be."""
    refusal: PassRefusal | None = None
    for number, factor in enumerate(value.operands[: 1 if value.opcode == "divide" else 2]):
        try:
            if partial_axes(factor, known, reached):
                return number
        except PassRefusal as found:
            refusal = refusal or found
    raise refusal or PassRefusal("a gradient is scaled, and neither factor is a sum over replicas", value)


def _ordered(axes: set[str], known: Propagated) -> Axes:
    return tuple(axis for axis in known.axes if axis in axes)


def _summed_dimensions(value: Instruction, known: Propagated) -> list[tuple[tuple[int, ...], Axes]]:
    """The dimensions that a dot or a reduction sums over: their number in each operand, and what they are split over.

    Raises PassRefusal where the operands of a dot are split differently.
    """
    if value.opcode == "reduce":
        _check_sum(value)
        operand = known.of_operand(value, 0)
        if operand is None:
            raise PassRefusal("it is not known how a summed gradient is split", value)
        return [((d,), _evenly(operand[d], value.operands[0], d, known)) for d in value.proto.dimensions]
    numbers = value.proto.dot_dimension_numbers
    left, right = known.of_operand(value, 0), known.of_operand(value, 1)
    if left is None or right is None:
        raise PassRefusal("it is not known how a gradient's factors are split", value)
    found: list[tuple[tuple[int, ...], Axes]] = []
    for a, b in zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True):
        longer, shorter = sorted((left[a], right[b]), key=len, reverse=True)
        if longer[: len(shorter)] != shorter:
            raise PassRefusal(f"a gradient's factors are split over {left[a]} and {right[b]}", value)
        found.append(((a, b), _evenly(longer, value.operands[0], a, known)))
    return found


def _evenly(split: Axes, operand: Instruction, dimension: int, known: Propagated) -> Axes:
    """`split`, or nothing where a dimension does not divide by it, and so cannot be cut."""
    return () if operand.shape.dimensions[dimension] % math.prod(known.axes[axis] for axis in split) else split


def _check_sum(reduction: Instruction) -> None:
    if not (combines_by(reduction) == "add" and is_zero(reduction.operands[1])):
        raise PassRefusal("a gradient is reduced by something else than a sum from zero", reduction)


def _scattered_dimensions(value: Instruction, known: Propagated) -> list[tuple[tuple[int, ...], Axes]]:
    """The dimensions along which rows are added to zeros, as of embeddings: their number in the indices and in the
    updates, and what the updates are split over."""
    numbers = value.proto.scatter_dimension_numbers
    if (
        len(value.operands) != 3
        or not (combines_by(value) == "add" and zeros_behind(value.operands[0]))
        or numbers.input_batching_dims
    ):
        raise PassRefusal("a gradient is scattered otherwise than by adding rows to zeros", value)
    updates = known.of_operand(value, 2)
    if updates is None:
        raise PassRefusal("it is not known how scattered rows are split", value)
    rows = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    indices = [d for d in range(_rank(value.operands[1])) if d != numbers.index_vector_dim]
    split = [_evenly(updates[b], value.operands[2], b, known) for b in rows]
    return [((a, b), over) for a, b, over in zip(indices, rows, split, strict=True)]


class Parts:
    """Makes values in parts, beside the instructions that make them whole."""

    def __init__(self, known: Propagated, axes: Axes) -> None:
        """
        Args:
          known: shardings of the program.
          axes: what is left open, among the `partial_axes` of all values that are asked for.
        """
        self.known = known
        self.axes = axes
        self.count = math.prod(known.axes[axis] for axis in axes)
        self._made: dict[Instruction, Instruction] = {}

    def of(self, value: Instruction) -> Instruction:
        """[replicas, *shape of `value`], in the same computation; what adds up to `value` along the first dimension."""
        if value not in self._made:
            self._made[value] = self._of(value)
            self._made[value].proto.metadata.CopyFrom(value.proto.metadata)
        return self._made[value]

    def _of(self, value: Instruction) -> Instruction:
        builder = Builder(value.computation)
        if value.opcode in ("dot", "reduce") and self._sums_here(value):
            made = self._dot(builder, value) if value.opcode == "dot" else self._reduce(builder, value)
            return self.placed(builder, made)
        if value.opcode == "scatter":
            return self.placed(builder, self._scatter(builder, value))
        if zeros := zeros_behind(value):
            return self.zeros(zeros)
        if is_sharding_constraint(value):
            return self.placed(builder, self.of(value.operands[0]), self.known.said(value))
        if value.opcode in _FACTORS:
            factor = _summed_factor(value, self.known, {})
            each = enumerate(value.operands)
            operands = [self.of(o) if number == factor else self._for_each(builder, o) for number, o in each]
        elif value.opcode in ("pad", "reduce"):
            operands = [self.of(value.operands[0]), value.operands[1]]
        else:
            operands = [self.of(o) for o in value.operands]
        return self._alike(builder, value, operands)

    def zeros(self, whole: Instruction, at: int = 0) -> Instruction:
        """`whole` zeros in parts, the replicas along dimension `at`."""
        builder = Builder(whole.computation)
        made = builder.make("broadcast", with_dimension(whole.shape, at, self.count), whole.operands)
        return self.placed(builder, made, at=at)

    def _sums_here(self, value: Instruction) -> bool:
        summed = {axis for _, split in _summed_dimensions(value, self.known) for axis in split}
        return not summed.isdisjoint(self.axes)

    def placed(
        self, builder: Builder, value: Instruction, split: Sequence[Over] | None = None, at: int = 0
    ) -> Instruction:
        """`value` with dimension `at` split over the replicas; the others as `split` says, or as propagation has it."""
        dimensions: list[Over] = list(split) if split is not None else [None] * (_rank(value) - 1)
        dimensions.insert(at, self.axes)
        return constrained(builder, value, dimensions, self.known.mesh, self.known.axes)

    def _for_each(self, builder: Builder, value: Instruction) -> Instruction:
        shape = with_dimension(value.shape, 0, self.count)
        return builder.make("broadcast", shape, [value], dimensions=range(1, 1 + _rank(value)))

    def _alike(self, builder: Builder, value: Instruction, operands: list[Instruction]) -> Instruction:
        """`value` done to each part."""
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
        summed = _summed_dimensions(value, self.known)
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
        summed = _summed_dimensions(value, self.known)
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
        """Rows are added to the zeros of their own replica: the replicas are batching dimensions."""
        summed = _scattered_dimensions(value, self.known)
        indices, of_indices, index_replicas = self._taken_apart(builder, value, 1, [((0, *d), s) for d, s in summed])
        updates, of_updates, _ = self._taken_apart(builder, value, 2, [((0, *d), s) for d, s in summed])
        sizes = [self.known.axes[axis] for axis in self.axes]
        shape = shapes.array(value.shape.element_type, [*sizes, *value.shape.dimensions])
        zeros = zeros_behind(value.operands[0])
        assert zeros is not None  # as `_scattered_dimensions` found
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
        self, builder: Builder, value: Instruction, side: int, summed: list[tuple[tuple[int, ...], Axes]]
    ) -> tuple[Instruction, dict[int, list[int]], list[int]]:
        """An operand whose summed dimensions are cut at the axes that they are split over.

        Returns it, where each old dimension went, and the new dimensions of the open axes, in the order of `axes`.
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
        assert set(replicas) == set(self.axes)  # they are among the `partial_axes` of `value`
        apart = builder.make("reshape", shapes.array(operand.shape.element_type, sizes), [operand])
        return apart, places, [replicas[axis] for axis in self.axes]

    def _joined(self, builder: Builder, made: Instruction, value: Instruction) -> Instruction:
        """With one dimension for all axes of replicas; `made` may be a dot whose shape is still to be set."""
        sizes = [self.known.axes[axis] for axis in self.axes]
        if made.opcode == "dot":
            made.proto.shape.CopyFrom(shapes.array(value.shape.element_type, [*sizes, *value.shape.dimensions]))
        if len(sizes) == 1:
            return made
        return builder.make("reshape", with_dimension(value.shape, 0, self.count), [made])


def keeps_sums(convert: Instruction) -> bool:
    """Whether what parts are converted to adds up to what the sum is converted to, but for one rounding to a floating
    point type of 16 bits or more."""
    types = {convert.shape.element_type, convert.operands[0].shape.element_type}
    return types <= {shapes.F16, shapes.BF16, shapes.F32, shapes.F64}


def summed_type(values: Sequence[Instruction]) -> int:
    """The widest type in which the program sums these over devices, as XLA numbers types. Not float16: what is summed
    over micro-batches first may lie beyond its range."""
    found: list[int] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value.opcode in ("dot", "reduce", "scatter"):
            found.append(value.shape.element_type)
        else:
            waiting += [o for o in value.operands if o.opcode != "parameter"][:2]
    widest = max(found, key=lambda kind: shapes.byte_size(shapes.scalar(kind)))
    return widest if widest in (shapes.BF16, shapes.F64) else shapes.F32


def sum_of_parts(value: Instruction, at: int, element_type: int) -> Instruction:
    """Adds up the parts along dimension `at`, in a given type."""
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
    return builder.make("convert", shapes.array(value.shape.element_type, sizes), [made])


def addition(builder: Builder, element_type: int) -> Computation:
    """What a reduction in that type applies."""
    inside = Builder(builder.module.new_computation(REPLICAS))
    a, b = (inside.parameter(k, shapes.scalar(element_type)) for k in range(2))
    return inside.finish(inside.binary("add", a, b))


def with_dimension(shape: Any, at: int, size: int) -> Any:
    """An array's shape with one more dimension, major to what stands behind it."""
    sizes = list(shape.dimensions)
    sizes.insert(at, size)
    return shapes.array(shape.element_type, sizes)


def _rank(value: Instruction) -> int:
    return len(value.shape.dimensions)
