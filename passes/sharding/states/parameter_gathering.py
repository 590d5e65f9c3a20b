"""Gathers a layer's parameters over data-parallel devices while the first forward pass of the layer before it runs.

Before, with L stacked layers:                   After:
    w = all-gather(p)                                w[0] = all-gather(p[0]); next = all-gather(p[1])
    for l in 0 ... L-1: x = layer(x, w[l])           x = layer(x, w[0])
    ... other readers of w                           for l in 1 ... L-2:
                                                         w[l] = next; x = layer(x, next)
                                                         next = all-gather(p[l+1])
                                                     w[L-1] = next; x = layer(x, next)
                                                     ... other readers of w

Contract
    Consumes  an all-gather of a stack of parameters, as `state_sharding` makes it (under automatic sharding a sharding
              constraint, which the partitioner turns into an all-gather). Only loops read the gathered stack. The first
              of them reads one slot in each iteration, in order, and each slot once. A loop over a single micro-batch
              is replaced by its body first.
    Makes     one all-gather for each slot, an iteration before it is read. The loop's last iteration moves behind the
              loop, and the first one before it: its first products run while its later parameters are gathered. The
              loop writes the slots into a stack, which all later readers get.
    Leaves    stacks with less than `least` bytes per layer; stacks whose first reader is another instruction; with a
              note, all stacks of a loop whose iterations are fewer than two.

Why it is legal: an all-gather acts on each slot alone. The slot of each iteration follows from constants
(`hlo/loops.py`), so all devices gather in the same order.
Cost: L all-gathers instead of one, so the latency counts L times. The program contains the loop's body twice more.
Memory does not grow: the stack takes the place of the gathered one. Gain: the first forward pass hides the all-gathers
of all layers but one. AMSP section V-C hides its broadcasts in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import constrained, is_sharding_constraint, stated
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.graph import ancestors
from dhelix.passes.hlo.loop_state import add_element, inline_single_trip, split
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.passes.hlo.stacks import slot_at, slot_reads


@dataclass(frozen=True)
class ParameterGathering:
    """Gathers parameters layer by layer.

    Attributes:
      least: minimal bytes of a layer's parameter; latency dominates smaller messages.
    """

    least: int = 1 << 20

    name = "parameter-gathering"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            changed |= _inline_single_trips(computation)
            found: dict[Instruction, list[_Gather]] = {}
            for one in _gathers(computation, self.least):
                found.setdefault(one.loop, []).append(one)
            for loop, gathers in found.items():
                changed |= _gather_in(loop, gathers, context)
        return changed


@dataclass(frozen=True)
class _Gather:
    """An all-gather of a stack, and the first loop that reads the stack.

    Attributes:
      gather: the all-gather, or the sharding constraint that becomes one.
      loop: the first loop that reads the stack.
      element: the index of the stack in the state of `loop`.
      slots: the slots in the order of reading.
    """

    gather: Instruction
    loop: Instruction
    element: int
    slots: tuple[int, ...]


def _inline_single_trips(computation: Computation) -> bool:
    """Replaces a loop over a single micro-batch that reads gathered parameters by its body, where the layers are."""
    users, found = computation.users(), dict[Instruction, None]()
    for gather in filter(_is_gather, computation.instructions):
        found.update(dict.fromkeys(_reading_loops(gather, users)))
    once = [loop for loop in found if proved_trip_count(loop) == 1 and _read_by_element(loop, users)]
    for loop in once:
        inline_single_trip(loop)
    return bool(once)


def _read_by_element(loop: Instruction, users: dict[Instruction, list[Instruction]]) -> bool:
    return loop is not loop.computation.root and all(user.opcode == "get-tuple-element" for user in users[loop])


def _gathers(computation: Computation, least: int) -> list[_Gather]:
    users = computation.users()
    found = []
    for gather in computation.instructions:
        if not _is_gather(gather) or shapes.byte_size(gather.shape) < least * gather.shape.dimensions[0]:
            continue
        loops = _reading_loops(gather, users)
        first = _first(computation, loops)
        if first is not None and (slots := _slots(first, loops[first])):
            found.append(_Gather(gather, first, loops[first], slots))
    return found


def _is_gather(value: Instruction) -> bool:
    """Whether `value` gathers an array of at least two dimensions along another dimension than the first."""
    if len(value.shape.dimensions) < 2 or value.shape.dimensions[0] < 2:
        return False
    if value.opcode == "all-gather":
        return list(value.proto.dimensions) != [0] and len(value.operands) == 1
    if not is_sharding_constraint(value):
        return False
    whole, shards = stated(value), stated(value.operands[0])
    if whole is None or shards is None or any(whole.free) or whole.axes[0] != shards.axes[0]:
        return False
    fewer = [set(a) <= set(b) for a, b in zip(whole.axes, shards.axes, strict=True)]
    return all(fewer) and whole.axes != shards.axes


def _reading_loops(gather: Instruction, users: dict[Instruction, list[Instruction]]) -> dict[Instruction, int]:
    """The loops that read a stack, with its element in their state. Empty if anything else reads it, or reads twice."""
    found: dict[Instruction, int] = {}
    for start in users[gather]:
        places = [k for k, operand in enumerate(start.operands) if operand is gather]
        if start.opcode != "tuple" or len(places) > 1 or start is start.computation.root:
            return {}
        for loop in users[start]:
            if loop.opcode != "while":
                return {}
            found[loop] = places[0]
    return found


def _first(computation: Computation, loops: Iterable[Instruction]) -> Instruction | None:
    """The loop on which none of the others depends before it: the one that may run first, if there is only one."""
    order = {i: n for n, i in enumerate(computation.instructions)}
    ordered = sorted(loops, key=order.__getitem__)
    if not ordered:
        return None
    before = ancestors(computation, [ordered[0]])
    after = all(ordered[0] in ancestors(computation, [loop]) for loop in ordered[1:])
    return ordered[0] if after and before.isdisjoint(ordered[1:]) else None


def _slots(loop: Instruction, element: int) -> tuple[int, ...] | None:
    """The slots that the loop reads, one in each iteration; None if it reads them in another way."""
    try:
        whole = WhileLoop(loop)
        reads = slot_reads(whole, element) if element in whole.invariants else []
    except PassRefusal:
        return None
    tables = {tuple(whole.index_table(read.operands[1]) or ()) for read in reads}
    if len(tables) != 1 or whole.induction_index is None:
        return None
    (table,) = tables
    layers = loop.shape.tuple_shapes[element].dimensions[0]
    return table if table in (tuple(range(layers)), tuple(reversed(range(layers)))) else None


def _gather_in(loop: Instruction, gathers: list[_Gather], context: PassContext) -> bool:
    layers = len(gathers[0].slots)
    try:
        first, last = split(loop, layers - 1, (loop.name, f"{loop.name}.last"))
    except PassRefusal as refusal:
        context.left_alone({refusal.reason: len(gathers)})
        return False
    for one in gathers:
        _gather_one(first, last, one)
    computation = first.computation
    for changed in (computation, first.called[0], last.called[0]):
        changed.sort()
        drop_dead(changed)
    if layers > 2:  # the first layer's products run while its later parameters are gathered
        begin, first = split(first, 1, (f"{loop.name}.first", loop.name))
        inline_single_trip(begin)
    moved = sum(shapes.byte_size(one.gather.shape) for one in gathers)
    context.note("parameters gathered layer by layer", first, stacks=len(gathers), bytes=moved)
    return True


def _gather_one(first: Instruction, last: Instruction, one: _Gather) -> None:
    """Gathers one stack in `first`, all iterations but the last, for the next iteration."""
    computation, (shards,) = first.computation, one.gather.operands
    entry = Builder(computation)
    stack = entry.make("broadcast", one.gather.shape, [entry.number(0.0, one.gather.shape.element_type)])
    first.operands = [entry.tuple(_with(first.operands[0], one.element, stack))]
    index = slot_reads(WhileLoop(first), one.element)[0].operands[1]
    here = entry.scalar(one.slots[0], index.shape.element_type)
    ready = add_element(first, _slot(entry, one, shards, here))
    source = add_element(first, shards)
    _use(first, one, ready)
    body = Builder(first.called[0])
    step = body.scalar(1, index.shape.element_type)
    after = body.binary("add" if one.slots[0] == 0 else "subtract", index, step)
    first.called[0].root.operands[-2] = _slot(body, one, source, after)

    size = len(first.shape.tuple_shapes)
    last.operands = [entry.tuple(_with(last.operands[0], one.element, entry.element(first, one.element)))]
    _use(last, one, add_element(last, entry.element(first, size - 2)))
    gathered = _whole(entry, one, entry.element(last, one.element))
    for reader in list(computation.instructions):
        if reader is not gathered:
            reader.operands = [gathered if operand is one.gather else operand for operand in reader.operands]


def _with(state: Instruction, element: int, value: Instruction) -> list[Instruction]:
    builder = Builder(state.computation)
    start = [builder.element(state, k) for k in range(len(state.shape.tuple_shapes))]
    return [*start[:element], value, *start[element + 1 :]]


def _use(loop: Instruction, one: _Gather, ready: Instruction) -> None:
    """Makes the body of `loop` read the gathered slot `ready` and write it into the stack."""
    whole = WhileLoop(loop)
    body, root = Builder(whole.body), whole.body.root
    reads = slot_reads(whole, one.element)
    place = reads[0].operands[1:]
    held = root.operands[one.element]
    for read in reads:
        for user in whole.body.users()[read]:
            user.operands = [ready if operand is read else operand for operand in user.operands]
    root.operands[one.element] = body.make("dynamic-update-slice", held.shape, [held, ready, *place])


def _slot(builder: Builder, one: _Gather, shards: Instruction, index: Instruction) -> Instruction:
    """All-gathers slot `index` of a stack of shards, as an array whose dimension 0 has size 1."""
    zeros = [builder.scalar(0, index.shape.element_type)] * (len(shards.shape.dimensions) - 1)
    part = slot_at(builder, shards, [index, *zeros])
    split = stated(one.gather.operands[0]) if is_sharding_constraint(one.gather) else None
    if split is not None:  # otherwise the partitioner gathers the whole stack, and slices it then
        part = constrained(builder, part, split.over, split.mesh, {})
    gathered = builder.copy(one.gather, [part])
    gathered.proto.shape.dimensions[0] = 1
    return gathered


def _whole(builder: Builder, one: _Gather, stack: Instruction) -> Instruction:
    """The stack after the loops. A constraint keeps the partitioner from splitting it again."""
    return builder.copy(one.gather, [stack]) if is_sharding_constraint(one.gather) else stack
