"""Merges layer loops of skewed strands before and after the strand loop, so that two micro-batches overlap there, too.

Before (`strand_skew`, `strand_duplication`):      After:
    F1(0)                                              F1(0)
    F2(0)                 L - k layers                 F2(0)             its first L - 2k layers
    F1(1)                 k layers                     F2(0) + F1(1)     its last k layers, in one loop
    strands: B2(i-1) + F2(i), B1(i-1) + F1(i+1)        strands
    B2(M-2)               L - k layers                 B2(M-2) + F2(M-1)
    B1(M-2)               k layers
    F2(M-1), head, B2(M-1)                             head, then
                                                       B1(M-2) + B2(M-1) its first k layers, in one loop
    B1(M-1)                                            B2(M-1)           its other L - 2k layers; B1(M-1)

The strand loop (`strands` above) is the loop over micro-batches that runs both strands. F1(m) and B1(m) are the
forward and the backward pass of micro-batch m through the first k of L layers. F2(m) and B2(m) are its passes through
the other L - k layers. M is the number of micro-batches, and k is the skew.

Contract
    Consumes  the eight layer loops that `strand_skew` and `strand_duplication` leave before and after the strand loop.
              The pass recognizes these loops by their names.
    Makes     three merged loops. In B2(M-2) + F2(M-1), the two strands run in opposite directions. There, pairs of
              residual stacks share one buffer, as in the strand loop (`activation_sharing`).
    Leaves    loops that depend on each other, with a note.

Why it is legal: merged loops depend on each other only through gradient accumulators. For example, B1(M-2) and
B2(M-1) add to the same accumulators. The counters of both loops are proved (`hlo/loops.py`). They show that the two
loops change different slots of an accumulator. So each slot gets the same additions in the same order.
Cost: if L > 2k, two loops are split once more. XLA takes longer to schedule merged bodies. In the DHelix paper, the
first and last passes run alone (section 4.1, arXiv 2411.15871).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import ALPHA, BETA, FIRST, FIRST_BACK, LAST, LAST_BACK, LAYERS, SKEWED, STRANDS
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import drop_dead, share_equal
from dhelix.passes.hlo.loop_state import differing_attributes, merge, split
from dhelix.passes.hlo.stacks import last_reader, mirror_reads, slot_reads, slot_write, slots_changed
from dhelix.passes.strands.activation_sharing import Stack, write_in_place

_Ends = dict[tuple[str, str], Instruction]


@dataclass(frozen=True)
class StrandEnds:
    """This pass has no options."""

    name = "strand-ends"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            ends = _ends(computation)
            if len(ends) == 8 and any(i.name.startswith(STRANDS) for i in computation.instructions):
                _merge_ends(computation, ends, context)
                changed = True
        return changed


def _ends(computation: Computation) -> _Ends:
    """The layer loops of skewed strands. Each runs a part of the layers. A key is (name of the part, strand)."""
    found: _Ends = {}
    for loop in [i for i in computation.instructions if i.opcode == "while"]:
        for name in SKEWED:
            if loop.name.startswith(name):
                found[name, ALPHA if loop.op_name.startswith(ALPHA) else BETA] = loop
    return found


def _merge_ends(computation: Computation, ends: _Ends, context: PassContext) -> None:
    share_equal(computation)  # loops with equal invariants then read one value
    began, following = ends[LAST, ALPHA], ends[FIRST, ALPHA]
    layers, apart = (WhileLoop(loop).trip_count for loop in (began, following))
    assert layers and apart  # strand_skew split the loops at these layers
    _name_beta(following)
    if layers > apart:
        _, began = split(began, layers - apart, (LAST, LAST))
    merged = [_merge(began, following, context)]
    both_ways = _merge(ends[LAST_BACK, ALPHA], ends[LAST, BETA], context)
    if both_ways is not None:
        _share(both_ways, context)
    last = ends[LAST_BACK, BETA]
    if layers > apart:
        last, _ = split(last, apart, (LAST_BACK, LAST_BACK))
    merged += [both_ways, _merge(ends[FIRST_BACK, ALPHA], last, context)]
    drop_dead(computation)
    context.note("strands run together at both ends", loops=[loop.name for loop in merged if loop is not None])


def _merge(first: Instruction, second: Instruction, context: PassContext) -> Instruction | None:
    """Merges both loops into one loop and returns it.

    Returns None if one loop depends on the other. One dependence is allowed: both loops may change a common stack, if
    they change different slots of it. In this case, `second` must be the later loop.
    """
    computation = first.computation
    drop_dead(computation)
    computation.sort()
    users, starts = computation.users(), second.operands[0].operands
    each = ((k, _changed_on(first, second, k, users)) for k in range(len(starts)))
    threaded = {k: element for k, element in each if element is not None}
    needed = graph.ancestors(computation, [value for k, value in enumerate(starts) if k not in threaded])
    if first in needed or first in graph.descendants(computation, [second]):
        context.note("layer loops at an end of the step not merged: they depend on each other", second)
        return None
    for key, kept, lost in differing_attributes(first, second):
        context.note(f'merged loop has {key}="{kept}" of {first.name}; {second.name} had "{lost}"', second)
    loop, _, _ = merge(first, second, LAYERS, threaded)
    return loop


def _changed_on(
    first: Instruction, second: Instruction, element: int, users: dict[Instruction, list[Instruction]]
) -> int | None:
    """The state element of `first` whose result is the initial value of state element `element` of `second`.

    None if anything else reads that result, or if it is not proved that the loops change different slots of the stack.
    """
    start = second.operands[0]
    value = start.operands[element]
    if value.opcode != "get-tuple-element" or value.operands[0] is not first:
        return None
    if users[value] != [start] or start.operands.count(value) != 1 or users[start] != [second]:
        return None
    if any(u.opcode != "get-tuple-element" for u in users[first]):
        return None
    if any(u is not value and u.tuple_index == value.tuple_index for u in users[first]):
        return None
    one, other = slots_changed(WhileLoop(first), value.tuple_index), slots_changed(WhileLoop(second), element)
    return value.tuple_index if one is not None and other is not None and one.isdisjoint(other) else None


def _share(loop: Instruction, context: PassContext) -> None:
    """Makes `loop` store new residuals in stacks of the same shape that `loop` itself is the last loop to read."""
    layers = WhileLoop(loop)
    free = list(_read_for_the_last_time(layers))
    stacks: list[Stack] = []
    for new in range(layers.size):
        try:
            write = slot_write(layers, new)
            later, element = last_reader(loop, new)
            slot_reads(later, element)
        except PassRefusal:
            continue
        if element not in later.invariants:
            continue
        shape, table = loop.shape.tuple_shapes[new], layers.index_table(write.operands[2])
        for place in free if table and sorted(table) == list(range(shape.dimensions[0])) else ():
            old, reads, read = place
            mirror = [shape.dimensions[0] - 1 - slot for slot in read]
            same_index = shapes.same(write.operands[2].shape, reads[0].operands[1].shape)
            if same_index and shapes.same(loop.shape.tuple_shapes[old], shape) and table in (read, mirror):
                stacks.append(Stack(old, new, reads, write, shape.dimensions[0]))
                write.operands[2] = reads[0].operands[1]
                if table != read:
                    mirror_reads(later, element)
                free.remove(place)
                break
    if stacks:
        layers.body.sort()
        freed = sum(shapes.byte_size(loop.shape.tuple_shapes[s.new]) for s in stacks)
        write_in_place(loop, stacks)
        context.note("residuals of both strands share one buffer", loop, stacks=len(stacks), bytes_freed=freed)


def _read_for_the_last_time(layers: WhileLoop) -> Iterator[tuple[int, tuple[Instruction, ...], list[int]]]:
    """Finds the stacks that are results of the strand loop and that only `layers` reads.

    Yields:
      The stack's state element in `layers`, the instructions that read it, and the slot that they read in each
      iteration.
    """
    loop = layers.instruction
    users = loop.computation.users()
    read_later = {r.tuple_index for r in users[loop] if users[r]}
    for element in sorted(layers.invariants - read_later):
        value = layers.initial(element)
        if value is None or value.opcode != "get-tuple-element" or not value.operands[0].name.startswith(STRANDS):
            continue
        try:
            last_reader(value.operands[0], value.tuple_index)
            reads = slot_reads(layers, element)
        except PassRefusal:
            continue
        tables = [layers.index_table(read.operands[1]) for read in reads]
        if tables and tables[0] and all(table == tables[0] for table in tables):
            yield element, tuple(reads), tables[0]


def _name_beta(loop: Instruction) -> None:
    for instruction in (loop, *graph.walk(loop.called[0])):
        instruction.proto.metadata.op_name = instruction.op_name.replace(ALPHA, BETA, 1)
