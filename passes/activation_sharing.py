"""One buffer of residuals for both strands: going forward, a strand fills the slots that the other frees.

Before, in the merged layer loop (L layers; residuals of each kind are stacked, bf16[L, ...]):
    a   = dynamic-slice(old_stack, L-1-l)          backward of alpha reads layer L-1-l
    new = dynamic-update-slice(new_stack, r, l)    forward of beta writes layer l; new_stack starts as zeros
After:
    slot    = flip ? l : L-1-l                     every other micro-batch is stored the other way round
    a       = dynamic-slice(stack, slot)
    x       = f(a, dy)                             elementwise, for products alone: read where it is, not copied first
    x, stack = opt-barrier(x, stack)               or copy insertion would copy the whole stack (facts below)
    stack   = dynamic-update-slice(stack, r, slot)

Contract
    Consumes  the loop that strand_duplication made: a state element of the strand loop that goes into the
              merged layer loop, is read there by slices only, and is replaced by a stack written slot by
              slot.
    Makes     one stack instead of two; `flip` is new state of the strand loop, and turns with each
              micro-batch. B(M-1) after the loop reads its slots by the final flip, which is known: M is.
    Leaves    a stack that is used in any other way; says which and why.

Why it is legal: the index tables of both accesses are computed from the proved loop counters. The read table
is a permutation of the slots and the write table is its mirror image, so that with the mirror of one strand
the two coincide: each slot is read, then written, once per pair of micro-batches; what is read was stored by
the same rule.
Costs: what stands at the barrier is materialised: what elementwise operations make of residuals where products alone
read that, since it is then an array anyhow; otherwise a slice of each residual, which is a copy. Copy insertion cannot
see that a slot is read before it is written and would copy 1 GiB per layer iteration at Llama-8B shapes without it.
DHelix section 4.3.
"""

from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.loop_state import add_element, drop_elements
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.strand_duplication import merged_loops

_ELEMENTWISE = frozenset(
    "abs add and clamp compare convert cosine divide erf exponential exponential-minus-one log log-plus-one logistic "
    "maximum minimum multiply negate not or power reshape rsqrt select sign sine sqrt subtract tanh".split()
)
_MOST_MADE = 2  # bytes that stand at a barrier, in units of what the residuals have


@dataclass(frozen=True)
class _Stack:
    """One kind of residual: where it lives in the strand loop, in the merged loop, and in B(M-1)."""

    outer: int
    """Element of the strand loop."""
    old: int
    """Element of the merged loop that backward reads."""
    new: int
    """Element of the merged loop that forward writes."""
    reads: tuple[Instruction, ...]
    write: Instruction
    last_loop: Instruction
    """The loop of B(M-1)."""
    last: int
    """Its element."""
    slots: int


@dataclass(frozen=True)
class _Guard:
    """What must be there before slots of these stacks are written.

    Attributes:
      made: residuals and what was made of them; it may read what the barrier guards.
    """

    stacks: tuple[_Stack, ...]
    values: tuple[Instruction, ...]
    made: frozenset[Instruction]


@dataclass(frozen=True)
class ActivationSharing:
    """No options."""

    name = "activation-sharing"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in [i for i in computation.instructions if i.opcode == "while"]:
                for layers in merged_loops(loop.called[0]):
                    changed |= _share(loop, layers, context)
        return changed


def _share(strands: Instruction, layers: Instruction, context: PassContext) -> bool:
    stacks: list[_Stack] = []
    for outer, (old, new) in _candidates(strands, layers).items():
        try:
            stacks.append(_match(WhileLoop(strands), WhileLoop(layers), outer, old, new))
        except PassRefusal as refusal:
            context.note(f"residual stack not shared: {refusal.reason}", refusal.instruction)
    if not stacks:
        return False
    trips = WhileLoop(strands).trip_count
    assert trips is not None  # strand_duplication proved it
    freed = sum(shapes.byte_size(layers.shape.tuple_shapes[s.new]) for s in stacks)
    flip = _add_flip(strands, layers)
    for stack in stacks:
        _use_one_slot(WhileLoop(layers), stack, flip)
    for guard in _guards(layers.called[0], stacks):
        for one in [guard] if _can_stand(guard, layers.called[0]) else map(_behind_reads, guard.stacks):
            _put_up(one, WhileLoop(layers))
    _give_old_stack_to_both(strands, layers, stacks)
    drop_dead(strands.computation)
    if trips % 2 == 1:  # F(0) is stored the plain way; the strand loop runs M - 1 times
        _mirror_last_reads(stacks)
    context.note("residuals of both strands share one buffer", layers, stacks=len(stacks), bytes_freed=freed)
    return True


def _candidates(strands: Instruction, layers: Instruction) -> dict[int, tuple[int, int]]:
    """Stacks of one slot per layer that enter the merged loop from the strand loop, and leave it replaced.

    Element of the strand loop -> elements of the merged loop: the one that enters, the one that replaces it.
    """
    body = WhileLoop(strands).body
    trips = WhileLoop(layers).trip_count
    entering = {}
    for k, start in enumerate(layers.operands[0].operands):
        if start.opcode == "get-tuple-element" and start.operands[0] is body.parameters[0]:
            if list(start.shape.dimensions[:1]) == [trips]:
                entering.setdefault(start.tuple_index, k)
    found = {}
    for outer, value in enumerate(body.root.operands):
        if value.opcode == "get-tuple-element" and value.operands[0] is layers and outer in entering:
            if value.tuple_index != entering[outer]:
                found[outer] = (entering[outer], value.tuple_index)
    return found


def _match(strands: WhileLoop, layers: WhileLoop, outer: int, old: int, new: int) -> _Stack:
    """Proves that the two stacks can be one. Raises PassRefusal naming what stands in the way."""
    _refuse_other_readers(strands, layers, outer, old)
    _refuse_early_readers(strands, layers, new)
    shape = layers.instruction.shape.tuple_shapes[old]
    users = layers.body.users()
    reads = _slices(layers, old, users)
    if old not in layers.invariants:
        raise PassRefusal("the backward pass changes it", layers.body.root.operands[old])
    root = layers.body.root
    write = root.operands[new]
    targets = [r for r, k in layers.reads.items() if k == new]
    if write.opcode != "dynamic-update-slice" or write.operands[0] not in targets:
        raise PassRefusal("the forward pass does not write it slot by slot", write)
    if any(u is not write for t in targets for u in users[t]) or users[write] != [root]:
        raise PassRefusal("the forward pass reads what it has written", write)
    if root.operands.count(write) > 1:
        raise PassRefusal("the forward pass hands it on twice", write)
    if not _one_slot(write.operands[1].shape, shape) or not _starts_at_zero(write.operands[3:]):
        raise PassRefusal("the forward pass writes more or less than one slot", write)
    tables = [layers.index_table(r.operands[1]) for r in reads]
    written = layers.index_table(write.operands[2])
    slots = shape.dimensions[0]
    if not reads or any(t is None or t != tables[0] for t in tables) or written is None:
        raise PassRefusal("slots are not given by the layer counter", write)
    assert tables[0] is not None
    mirrored = [slots - 1 - s for s in tables[0]]
    if sorted(written) != list(range(slots)) or mirrored != written:
        raise PassRefusal("backward does not walk the slots in the opposite order of forward", write)
    last_loop, last = _last_use(strands, outer, tables[0])
    return _Stack(outer, old, new, tuple(reads), write, last_loop, last, slots)


def _refuse_other_readers(strands: WhileLoop, layers: WhileLoop, outer: int, old: int) -> None:
    """In the strand loop only the merged loop reads the stack, as one element, and nothing its end."""
    start = layers.instruction.operands[0]
    if sum(strands.reads.get(value) == outer for value in start.operands) != 1:
        raise PassRefusal("it enters the layer loop twice", layers.instruction)
    users = strands.body.users()
    readers = [u for r, k in strands.reads.items() if k == outer for u in users[r]]
    for result in users[layers.instruction]:
        if result.opcode != "get-tuple-element":
            readers.append(result)
        elif result.tuple_index == old:
            readers += users[result]
    if any(u is not start for u in readers):
        raise PassRefusal("it is read outside the layer loop", next(u for u in readers if u is not start))


def _refuse_early_readers(strands: WhileLoop, layers: WhileLoop, new: int) -> None:
    """What this iteration's forward pass has stored is for the next one's backward pass alone."""
    users = strands.body.users()
    results = [r for r in users[layers.instruction] if r.opcode == "get-tuple-element" and r.tuple_index == new]
    readers = [u for r in results for u in users[r] if u is not strands.body.root]
    if readers:
        raise PassRefusal("it is read outside the layer loop", readers[0])
    if sum(value in results for value in strands.body.root.operands) > 1:
        raise PassRefusal("the strand loop carries it twice", layers.instruction)


def _slices(loop: WhileLoop, index: int, users: dict[Instruction, list[Instruction]]) -> list[Instruction]:
    """The dynamic slices of one slot that read element `index`; refuses any other reader but the root."""
    stack = loop.instruction.shape.tuple_shapes[index]
    if sum(loop.reads.get(value) == index for value in loop.body.root.operands) > 1:
        raise PassRefusal("the backward pass hands it on twice", loop.instruction)
    found = []
    for read, k in loop.reads.items():
        for user in users[read] if k == index else ():
            if user is loop.body.root:
                continue
            if user.opcode != "dynamic-slice" or not _one_slot(user.shape, stack):
                raise PassRefusal("the backward pass reads more or less than one slot at a time", user)
            if not _starts_at_zero(user.operands[2:]):
                raise PassRefusal("the backward pass reads a part of a slot", user)
            found.append(user)
    return found


def _one_slot(part: object, stack: object) -> bool:
    wanted = [1, *stack.dimensions[1:]]  # type: ignore[attr-defined]
    return list(part.dimensions) == wanted  # type: ignore[attr-defined]


def _starts_at_zero(indices: list[Instruction]) -> bool:
    for index in indices:
        values = [*index.proto.literal.s32s, *index.proto.literal.s64s, *index.proto.literal.u32s]
        if index.opcode != "constant" or values != [0]:
            return False
    return True


def _last_use(strands: WhileLoop, outer: int, table: list[int]) -> tuple[Instruction, int]:
    """The loop of B(M-1) and its element that holds the stack; read slot for slot as in the merged loop."""
    computation = strands.instruction.computation
    users = computation.users()
    reads = [r for r in users[strands.instruction] if r.tuple_index == outer and users[r]]
    starts = [u for r in reads for u in users[r]]
    loops = [w for s in starts for w in users[s] if s.opcode == "tuple" and w.opcode == "while"]
    if len(starts) != 1 or len(loops) != 1 or users[starts[0]] != loops:
        raise PassRefusal("the last backward pass reads it outside its layer loop", strands.instruction)
    loop = WhileLoop(loops[0])
    index = starts[0].operands.index(reads[0])
    if starts[0].operands.count(reads[0]) > 1:
        raise PassRefusal("it enters the last layer loop twice", loop.instruction)
    slices = _slices(loop, index, loop.body.users())
    if index not in loop.invariants or any(loop.index_table(s.operands[1]) != table for s in slices):
        raise PassRefusal("the last backward pass reads other slots than the ones before", loop.instruction)
    for result in users[loop.instruction]:
        if result.opcode != "get-tuple-element" or (result.tuple_index == index and users[result]):
            raise PassRefusal("it is read after the last backward pass", result)
    return loop.instruction, index


def _add_flip(strands: Instruction, layers: Instruction) -> Instruction:
    """`flip`, false for F(0)'s residuals and turned by every micro-batch; returns it in the merged loop."""
    start = Builder(strands.computation).scalar(False, shapes.PRED)
    flip = add_element(strands, start)
    body = strands.called[0]
    body.root.operands[-1] = Builder(body).make("not", flip.shape, [flip])
    body.sort()
    return add_element(layers, flip)


def _use_one_slot(layers: WhileLoop, stack: _Stack, flip: Instruction) -> None:
    """Reads and writes at the mirrored slot, still of two stacks."""
    builder = Builder(layers.body)
    index = stack.reads[0].operands[1]
    slot = builder.make("select", index.shape, [flip, _mirror(builder, index, stack.slots), index])
    for read in stack.reads:
        read.operands[1] = slot
    stack.write.operands[2] = slot
    layers.body.sort()


def _guards(body: Computation, stacks: list[_Stack]) -> list[_Guard]:
    """One for each stack, or for several whose residuals meet in what is made of them."""
    users = body.users()
    found: list[_Guard] = []
    for stack in stacks:
        one = _behind_products(stack, users) or _behind_reads(stack)
        for other in [g for g in found if not set(g.values).isdisjoint(one.values)]:
            found.remove(other)
            values = tuple(dict.fromkeys(other.values + one.values))
            one = _Guard(other.stacks + one.stacks, values, other.made | one.made)
        found.append(one)
    return found


def _behind_reads(stack: _Stack) -> _Guard:
    return _Guard((stack,), stack.reads, frozenset())


def _behind_products(stack: _Stack, users: dict[Instruction, list[Instruction]]) -> _Guard | None:
    """Behind what elementwise operations make of residuals, if products alone read that."""
    made, pending = set(stack.reads), list(stack.reads)
    while pending:
        new = [u for u in users[pending.pop()] if u.opcode in _ELEMENTWISE and u not in made]
        made.update(new)
        pending += new
    values = [i for i in users if i in made and any(u not in made for u in users[i])]
    readers = [u for i in values for u in users[i] if u not in made]
    if any(read in values for read in stack.reads) or any(u.opcode != "dot" for u in readers):
        return None
    return _Guard((stack,), tuple(values), frozenset(made))


def _can_stand(guard: _Guard, body: Computation) -> bool:
    """Whether the values are not much more than what was read, and none of them waits for what comes behind the
    barrier, as where a layer is computed again."""
    read = sum(shapes.byte_size(read.shape) for stack in guard.stacks for read in stack.reads)
    if sum(shapes.byte_size(value.shape) for value in guard.values) > _MOST_MADE * read:
        return False
    users = body.users()
    behind = [u for value in guard.values for u in users[value] if u not in guard.made]
    return not guard.made or graph.descendants(body, behind).isdisjoint(guard.values)


def _put_up(guard: _Guard, layers: WhileLoop) -> None:
    """Whatever reads the values does so behind a barrier, and so does each write of the stacks."""
    body = layers.body
    readers = [i for i in body.instructions if i not in guard.made]
    builder = Builder(body)
    behind = builder.barrier([*guard.values, *(stack.reads[0].operands[0] for stack in guard.stacks)])
    stands_for = dict(zip(guard.values, behind, strict=False))
    for reader in readers:
        reader.operands = [stands_for.get(o, o) for o in reader.operands]
    for stack, buffer in zip(guard.stacks, behind[len(guard.values) :], strict=True):
        stack.write.operands[0] = buffer
        body.root.operands[stack.old] = stack.write
        body.root.operands[stack.new] = next(
            (r for r, k in layers.reads.items() if k == stack.new), None
        ) or builder.element(body.parameters[0], stack.new)
    body.sort()


def _mirror(builder: Builder, index: Instruction, slots: int) -> Instruction:
    last = builder.scalar(slots - 1, index.shape.element_type)
    return builder.binary("subtract", last, index)


def _give_old_stack_to_both(strands: Instruction, layers: Instruction, stacks: list[_Stack]) -> None:
    """Readers of the new stacks read the old ones, which hold the new residuals now; the new ones go."""
    body: Computation = strands.called[0]
    moved = {s.new: s.old for s in stacks}
    for user in body.users()[layers]:
        if user.tuple_index in moved:
            user.proto.tuple_index = moved[user.tuple_index]
    drop_dead(layers.called[0])
    drop_elements(layers, moved)
    drop_dead(body)


def _mirror_last_reads(stacks: list[_Stack]) -> None:
    """B(M-1) reads residuals that are stored the other way round."""
    for stack in stacks:
        loop = WhileLoop(stack.last_loop)
        builder = Builder(loop.body)
        for read in _slices(loop, stack.last, loop.body.users()):
            read.operands[1] = _mirror(builder, read.operands[1], stack.slots)
        loop.body.sort()
