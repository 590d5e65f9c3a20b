"""Moves all-reduces of gradients behind the loop over micro-batches. The program itself calls them, in a shard_map.

    acc[l] += steps(all-reduce(g))      ->      acc[l] += steps(g)      ...      all-reduce(acc)

Why it is legal: an all-reduce of a sum is the sum of all-reduces. The steps between the all-reduce and the accumulator
may only move elements, scale them by a constant, or convert them between floating-point types of 16 bits or more.
The final all-reduce is applied to the accumulator. It uses the widest type in which the program reduces the gradients
of this accumulator. If that type is float16, it uses the accumulator's type. An all-reduce that has other readers, too,
stays for these readers.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.hlo import Builder, Instruction, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.edit import combines_by
from dhelix.passes.hlo.stacks import is_constant
from dhelix.passes.strands.gradients.accumulators import Accumulator, Use
from dhelix.passes.strands.gradients.partial_sums import keeps_sums
from dhelix.passes.strands.gradients.parts import addition

_MOVES = frozenset("convert copy reshape transpose".split())
_SCALES = frozenset("multiply divide".split())


@dataclass(frozen=True)
class Reduced:
    """An all-reduce whose result is added to an accumulator.

    Attributes:
      use: the addition to the accumulator, with the number of the operand that is added.
      collective: the all-reduce.
      steps: the operations from the all-reduce to `use`, in order.
    """

    use: Use
    collective: Instruction
    steps: tuple[Instruction, ...]


def reduced(one: Accumulator) -> list[Reduced]:
    """The all-reduces of all values that are added to `one`.

    Empty unless every added value comes from an all-reduce, and all these all-reduces are over the same devices.
    """
    found = [_reduced(use) for use in one.added]
    every = [each for each in found if each is not None]
    if len(every) < len(found) or len({str(device_groups(each.collective)) for each in every}) != 1:
        return []
    return every


def _reduced(use: Use) -> Reduced | None:
    reader, number = use
    value, steps = reader.operands[number], list[Instruction]()
    while value.opcode != "all-reduce":
        if value.opcode == "convert" and not keeps_sums(value):
            return None
        if value.opcode in _MOVES or is_sharding_constraint(value):
            source = 0
        elif value.opcode in _SCALES and is_constant(value.operands[1]):
            source = 0
        elif value.opcode == "multiply" and is_constant(value.operands[0]):
            source = 1
        else:
            return None
        steps.append(value)
        value = value.operands[source]
    adds = combines_by(value) == "add"
    groups = device_groups(value)
    apart = max(map(len, groups), default=2) > 1
    return Reduced(use, value, tuple(reversed(steps))) if adds and apart and len(value.operands) == 1 else None


def move_behind(one: Accumulator, found: list[Reduced]) -> None:
    """Adds each device's own part to the accumulator, and all-reduces the accumulator for its final readers."""
    for each in found:
        reader, number = each.use
        builder = Builder(reader.computation)
        value = each.collective.operands[0]
        known = each.collective
        for step in each.steps:
            made = builder.copy(step, [value if o is known else o for o in step.operands])
            known, value = step, made
        reader.operands[number] = value
    widest = max(found, key=lambda each: shapes.byte_size(shapes.scalar(each.collective.shape.element_type)))
    sums: dict[Instruction, Instruction] = {}
    for reader, number in one.ends:
        value = reader.operands[number]
        if value not in sums:
            sums[value] = _all_reduce(widest.collective, value)
        reader.operands[number] = sums[value]


def _all_reduce(like: Instruction, value: Instruction) -> Instruction:
    builder = Builder(value.computation)
    kept = like.shape.element_type
    if kept == shapes.F16:  # the range of float16 may be too small for a sum over micro-batches
        kept = value.shape.element_type
    narrow = shapes.array(kept, value.shape.dimensions)
    part = builder.make("convert", narrow, [value])
    made = builder.copy(like, [part], [addition(builder, kept)])
    made.proto.shape.CopyFrom(narrow)
    return builder.make("convert", value.shape, [made])
