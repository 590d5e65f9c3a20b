"""Unrolls the layer loops of both strands, so that what a layer keeps or reads needs no slot of a stack.

Before, in the strand loop (L layers):              After:
    for l in 0 .. L-1, in one loop:                     layer 0 of beta, layer L-1 of alpha
        w  = dynamic-slice(weights, l)                  opt-barrier over what both hand on
        a  = dynamic-slice(old_stack, L-1-l)            layer 1 of beta, layer L-2 of alpha
        new_stack = dynamic-update-slice(.., r, l)      ...
    state: one stack per kind of residual               state: L arrays per kind of residual

A slice from a stack, or into one, is a copy: products are library calls, or become ones after fusion, and read and
write arrays of their own. A Llama-8B layer copies 0.5 GiB that way forward and backward, 6 % of its compute time.

Contract
    Consumes  strand loops with one merged layer loop of a proved trip count of at most `most_layers`, after
              gradient_accumulation; F(0)'s and B(M-1)'s layer loops beside it.
    Makes     straight-line code. Slots that are known when written and read become values; stacks that the strand
              loop carries, and that are read and written by whole slots only, become one element per slot.
              Barriers keep the strands in step, layer by layer (as strand_lockstep does for unrolled models).
    Leaves    stacks that are used in any other way; loops of more layers.

Why it is legal: an unrolled loop does what the loop does, in the same order, with its counter's values put in. A slice
of a slot that was written is what was written. No addition is reordered.
Costs: code, and compile time, that grow with the number of layers. Memory: one micro-batch's residuals, since a
residual takes the place of one that was read; half of them only after a copy, once per micro-batch.
"""

from dataclasses import dataclass
from typing import Any

from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.edit import copy_instructions, drop_dead, replace_all_uses
from dhelix.passes.hlo.loop_state import add_element, drop_elements
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.strand_duplication import ALPHA, BETA, LAYERS
from dhelix.passes.work import loop_work

_INDICES = (shapes.S32, shapes.U32, shapes.S64, shapes.U64, shapes.PRED)


@dataclass(frozen=True)
class LayerUnrolling:
    """How far to unroll.

    Attributes:
      most_layers: of a loop that is unrolled.
      pair_micro_batches: two of them in one iteration of the strand loop, after which each residual is back in its
        place and none is copied. That may take more memory than the plain program, by up to a tenth, and ties the
        strands of one half to those of the other, so that strand_pairing does not find them.
    """

    most_layers: int = 16
    pair_micro_batches: bool = False

    name = "layer-unrolling"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in [i for i in computation.instructions if i.opcode == "while" and not _is_merged(i)]:
                merged = [i for i in loop.called[0].instructions if _is_merged(i)]
                if not merged:
                    continue
                layers = proved_trip_count(max(merged, key=loop_work))
                if layers is None or layers > self.most_layers:
                    context.note(f"layers not unrolled: more than {self.most_layers}", loop)
                    continue
                _unroll_strands(loop, layers, context)
                if self.pair_micro_batches:
                    _pair_micro_batches(loop)
                changed = True
        return changed


def _is_merged(instruction: Instruction) -> bool:
    return instruction.opcode == "while" and instruction.name.startswith(LAYERS)


def _unroll_strands(strands: Instruction, layers: int, context: PassContext) -> None:
    outside, body = strands.computation, strands.called[0]
    for computation in (body, outside):  # outside are F(0) and B(M-1)
        drop_dead(computation)
        for loop in [i for i in computation.instructions if i.opcode == "while" and i is not strands]:
            named = any(f"{strand}/" in loop.op_name for strand in (ALPHA, BETA))
            if (_is_merged(loop) or named) and proved_trip_count(loop) == layers:
                _unroll(loop, in_step=_is_merged(loop))
    for computation in (body, outside):
        _read_what_was_written(computation)
        drop_dead(computation)
    split = _split_stacks(strands)
    for computation in (body, outside):
        drop_dead(computation)
    context.note("layers unrolled", strands, layers=layers, stacks=len(split), arrays=sum(split))


def _unroll(loop: Instruction, in_step: bool) -> None:
    """Puts the iterations of `loop` in its place; with `in_step`, a barrier between each two."""
    view = WhileLoop(loop)
    computation = loop.computation
    builder = Builder(computation)
    indices = [i for i in view.body.instructions if i.shape.element_type in _INDICES and i.opcode != "constant"]
    tables = {i: t for i in indices if not i.shape.dimensions and (t := view.index_table(i)) is not None}
    skipped = {view.body.parameters[0], view.body.root}
    inside = [i for i in view.body.instructions if i not in skipped]
    together = _handed_on(view) if in_step else []
    state = [builder.element(loop.operands[0], k) for k in range(view.size)]
    trips = view.trip_count
    assert trips is not None  # the caller asked
    for n in range(trips):
        if n and len(together) > 1:
            for k, value in zip(together, builder.barrier([state[k] for k in together]), strict=True):
                state[k] = value
        copies = {read: state[k] for read, k in view.reads.items()}
        copies |= {i: builder.scalar(t[n], i.shape.element_type) for i, t in tables.items()}
        copy_instructions(builder, inside, copies)
        state = [copies[value] for value in view.body.root.operands]
    _put_in_place(loop, state)


def _pair_micro_batches(strands: Instruction) -> None:
    """Two iterations of the strand loop in one, after a first one where their number is odd."""
    loop, outside = WhileLoop(strands), Builder(strands.computation)
    trips = loop.trip_count
    assert trips is not None  # strand_duplication proved it
    if trips % 2:
        state = _iteration(outside, loop, [outside.element(strands.operands[0], k) for k in range(loop.size)])
        if trips == 1:
            return _put_in_place(strands, state)
        strands.operands = [outside.tuple(state)]
    body = Builder(loop.body.module.new_computation("two_micro_batches"))
    parameter = body.parameter(0, strands.shape)
    before = [body.element(parameter, k) for k in range(loop.size)]
    after = _iteration(body, loop, _iteration(body, loop, before))
    body.finish(body.tuple([before[k] if k in loop.invariants else after[k] for k in range(loop.size)]))
    body.computation.sort()
    strands.called = [body.computation, loop.condition]
    outside.computation.sort()


def _iteration(builder: Builder, loop: WhileLoop, state: list[Instruction]) -> list[Instruction]:
    """One iteration of `loop` from `state`. Returns the state after it, behind a barrier as the loop's end is one.

    Also behind it: arrays of which each iteration takes its part, or the next one could begin at any time.
    """
    copies = {read: state[k] for read, k in loop.reads.items()}
    skipped = {loop.body.parameters[0], loop.body.root}
    copy_instructions(builder, [i for i in loop.body.instructions if i not in skipped], copies)
    after = [copies[value] for value in loop.body.root.operands]
    changing = [k for k in range(loop.size) if k not in loop.invariants and shapes.is_floating(after[k].shape)]
    changing += sorted(_taken_apart(loop))
    for k, value in zip(changing, builder.barrier([after[k] for k in changing]), strict=True):
        after[k] = value
    return after


def _taken_apart(loop: WhileLoop) -> set[int]:
    """Invariants that the body slices, at an index that is not the same in each iteration."""
    slices = [i for i in loop.body.instructions if i.opcode == "dynamic-slice" and _slot(i) is None]
    return {loop.reads[i.operands[0]] for i in slices if i.operands[0] in loop.reads} & loop.invariants


def _put_in_place(loop: Instruction, state: list[Instruction]) -> None:
    """Readers of the loop read `state`; the loop goes."""
    computation = loop.computation
    reads = [i for i in computation.users()[loop] if i.opcode == "get-tuple-element"]
    values = {read: state[read.tuple_index] for read in reads}
    replace_all_uses(computation, values | {loop: Builder(computation).tuple(state)})
    gone = {loop, *reads}
    computation.instructions = [i for i in computation.instructions if i not in gone]
    computation.sort()


def _handed_on(loop: WhileLoop) -> list[int]:
    """State that one layer hands to the next: hidden states, their gradients, and sums; not stacks that it fills."""
    users = loop.body.users()
    written = [r for r, k in loop.reads.items() if _fills(loop.body.root.operands[k], r, users)]
    filled = {loop.reads[r] for r in written}
    arrays = (k for k, shape in enumerate(loop.instruction.shape.tuple_shapes) if shapes.is_floating(shape))
    return [k for k in arrays if k not in loop.invariants and k not in filled]


def _fills(value: Instruction, read: Instruction, users: dict[Instruction, list[Instruction]]) -> bool:
    return value.opcode == "dynamic-update-slice" and value.operands[0] is read and users[read] == [value]


def _read_what_was_written(computation: Computation) -> None:
    """Slices of a slot that is written before, of all those in between that are known, read what was written."""
    values: dict[Instruction, Instruction] = {}
    for read in computation.instructions:
        slot = _slot(read)
        source = read.operands[0] if slot is not None else read
        while slot is not None and (written := _written_slot(source)) is not None:
            if written == slot:
                values[read] = values.get(source.operands[1], source.operands[1])
                break
            source = source.operands[0]
    replace_all_uses(computation, values)


def _slot(read: Instruction) -> int | None:
    """Which slot a `dynamic-slice` takes whole; None for any other instruction, and where it is not known."""
    if read.opcode != "dynamic-slice":
        return None
    return _whole_slot(read.operands[0].shape, read.shape, read.operands[1:])


def _written_slot(write: Instruction) -> int | None:
    """Which slot a `dynamic-update-slice` writes whole; None as above."""
    if write.opcode != "dynamic-update-slice":
        return None
    return _whole_slot(write.shape, write.operands[1].shape, write.operands[2:])


def _whole_slot(stack: Any, part: Any, indices: list[Instruction]) -> int | None:
    sizes, wanted = list(stack.dimensions), list(part.dimensions)
    first, *rest = (_constant(i) for i in indices)
    if wanted != [1, *sizes[1:]] or first is None or not 0 <= first < sizes[0] or any(r != 0 for r in rest):
        return None
    return first


def _constant(index: Instruction) -> int | None:
    if index.opcode != "constant":
        return None
    literal = index.proto.literal
    values = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    return values[0] if len(values) == 1 else None


def _slots(stack: Instruction) -> list[Instruction] | None:
    """What the slots of a stack hold, where each was written whole; None where one was not."""
    found: dict[int, Instruction] = {}
    while (slot := _written_slot(stack)) is not None:
        found.setdefault(slot, stack.operands[1])
        stack = stack.operands[0]
    count = stack.shape.dimensions[0] if stack.shape.dimensions else 0
    return [found[s] for s in range(count)] if count and len(found) == count else None


def _split_stacks(strands: Instruction) -> list[int]:
    """Makes stacks that the strand loop carries one element per slot. Returns how many slots each had."""
    body, outside = strands.called[0], strands.computation
    found = {k: parts for k in range(WhileLoop(strands).size) if (parts := _stack(strands, k)) is not None}
    for k, (starts, results) in found.items():
        first = len(strands.shape.tuple_shapes)
        inside = {read: _slot(read) for read in _readers(body, body.parameters[0], k)}
        after = {read: _slot(read) for read in _readers(outside, strands, k)}
        elements = [add_element(strands, start) for start in starts]
        body.root.operands[first:] = results or elements
        body.root.operands[k] = Builder(body).element(body.parameters[0], k)
        replace_all_uses(body, {read: elements[slot] for read, slot in inside.items() if slot is not None})
        ends = [Builder(outside).element(strands, first + n) for n in range(len(starts))]
        replace_all_uses(outside, {read: ends[slot] for read, slot in after.items() if slot is not None})
        body.sort()
        outside.sort()
    for computation in (body, outside):
        drop_dead(computation)
    drop_elements(strands, found)
    drop_dead(outside)
    return [len(starts) for starts, _ in found.values()]


def _stack(strands: Instruction, k: int) -> tuple[list[Instruction], list[Instruction]] | None:
    """What the slots of element k start as, and become, or nothing if they stay; None where it cannot be split."""
    loop = WhileLoop(strands)
    start = loop.initial(k)
    readers = [*_readers(loop.body, loop.body.parameters[0], k), *_readers(strands.computation, strands, k)]
    if k in loop.invariants:
        readers = [i for i in readers if i is not loop.body.root]
    if start is None or k in loop.condition_indices or any(_slot(user) is None for user in readers):
        return None
    if k in loop.invariants:
        starts = _converted_slots(start, strands.operands[0])
        return None if starts is None else (starts, [])
    starts, results = _slots(start), _slots(loop.body.root.operands[k])
    return None if starts is None or results is None else (starts, results)


def _converted_slots(stack: Instruction, state: Instruction) -> list[Instruction] | None:
    """Slots of weights that are converted to another type for the loop, so that slicing them costs nothing.

    Weights that are arguments are stored twice if they are sliced before the loop.
    """
    others = [u for u in stack.computation.users()[stack] if u is not state]
    if stack.opcode != "convert" or not stack.shape.dimensions or any(_slot(u) is None for u in others):
        return None
    builder = Builder(stack.computation)
    sizes = [1, *stack.shape.dimensions[1:]]
    shape = type(stack.shape)()
    shape.CopyFrom(stack.shape)
    shape.dimensions[0] = 1
    zero = builder.scalar(0, shapes.S32)
    slots = []
    for n in range(stack.shape.dimensions[0]):
        indices = [builder.scalar(n, shapes.S32), *[zero] * (len(sizes) - 1)]
        slots.append(builder.make("dynamic-slice", shape, [stack, *indices], dynamic_slice_sizes=sizes))
    replace_all_uses(stack.computation, {u: slots[slot] for u in others if (slot := _slot(u)) is not None})
    return slots


def _readers(computation: Computation, source: Instruction, k: int) -> list[Instruction]:
    """What reads element k of the tuple `source`, and `source` as a whole."""
    users = computation.users()
    elements = [u for u in users[source] if u.opcode == "get-tuple-element" and u.tuple_index == k]
    return [u for e in elements for u in users[e]] + [u for u in users[source] if u.opcode != "get-tuple-element"]
