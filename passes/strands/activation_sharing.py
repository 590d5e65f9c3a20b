"""Shares one buffer of residuals between both strands: forward writes each slot after backward has read it.

Before, in the merged layer loop (L layers; residuals of each kind are stacked, bf16[L, ...]):
    a   = dynamic-slice(old_stack, L-1-l)          backward of alpha reads layer L-1-l
    new = dynamic-update-slice(new_stack, r, l)    forward of beta writes layer l; new_stack starts as zeros
After:
    slot    = flip ? l : L-1-l                     every other micro-batch is stored in reverse order
    a       = dynamic-slice(stack, slot)
    x       = f(a, dy)                             elementwise, read by dots alone
    x, stack = opt-barrier(x, stack)               keeps copy insertion from copying the whole stack
    stack   = dynamic-update-slice(stack, r, slot)

Contract
    Consumes  a strand loop (a loop over micro-batches with both strands) that strand_duplication made. One element of
              its state is a stack of residuals, the old stack. In the merged layer loop, only slices read the old
              stack, and forward writes a new stack slot by slot. The new stack then replaces the old stack in the state
              of the strand loop.
    Makes     one stack instead of two. `flip` is a new state element of the strand loop; each micro-batch negates it.
              B(M-1), the backward pass after the loop, reads the slots in the order that the last `flip` gives. This
              order is known at compile time, because the number M of micro-batches is known.
              In skewed strands (`strand_skew`), stacks of the first layers live one micro-batch longer, so two stacks
              alternate. They become the halves of one array. The new state element `base` says which half is in use.
    Leaves    a stack that is used in any other way, with a note that gives the reason.

Why it is legal: proved loop counters (`hlo/loops.py`) say which slot an iteration reads and which slot it writes. Both
are permutations of the slots, and the write order is the reverse of the read order. `flip` says whether the read or the
write indices are mirrored. So both orders become equal: each iteration reads a slot, and then writes the same slot.
Every read uses the order in which its stack was stored.
Cost: the barrier makes XLA write its operands to memory. If only dots read the elementwise results of residuals, the
barrier takes these results, which XLA writes to memory anyway. Otherwise the barrier takes the slices, so each residual
is copied. Without the barrier, XLA's copy insertion cannot see that a slot is read before it is written. So it would
copy the whole stack in each layer. Source: DHelix, section 4.3 (arXiv 2411.15871).
"""

from dataclasses import dataclass, replace

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import merged_loops
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import ELEMENTWISE, drop_dead
from dhelix.passes.hlo.loop_state import add_element, drop_elements
from dhelix.passes.hlo.stacks import (
    is_empty,
    last_reader,
    mirror_reads,
    mirrored,
    resize,
    resized,
    slot_reads,
    slot_write,
)

_ELEMENTWISE = ELEMENTWISE | {"and", "not", "or", "reshape"}
_MOST_MADE = 2  # the most bytes of guarded values per byte of residuals


@dataclass(frozen=True)
class Stack:
    """One kind of residual in a merged loop.

    Attributes:
      old: state element of the merged loop that backward reads.
      new: state element of the merged loop that forward writes.
      reads: the slices of `old`.
      write: the update that makes `new`.
      slots: number of slots, one per layer.
      outer: state element of the strand loop that enters the merged loop as `old`; -1 outside of strand loops.
      waiting: in skewed strands, the state element of the strand loop that holds the new stack for one more
        micro-batch. After that, the stack moves on to `outer`. None: the new stack becomes `outer` at once.
    """

    old: int
    new: int
    reads: tuple[Instruction, ...]
    write: Instruction
    slots: int
    outer: int = -1
    waiting: int | None = None


@dataclass(frozen=True)
class _Guard:
    """A barrier to be built: its guarded values must be computed before slots of its stacks are written.

    Attributes:
      stacks: the stacks whose writes wait.
      values: the guarded values.
      made: residuals and their elementwise results. These instructions read guarded values directly, not from the
        barrier.
    """

    stacks: tuple[Stack, ...]
    values: tuple[Instruction, ...]
    made: frozenset[Instruction]


@dataclass(frozen=True)
class ActivationSharing:
    """This pass has no options."""

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
    stacks: list[Stack] = []
    for outer, (old, new, waiting) in _candidates(strands, layers).items():
        try:
            stack = _match(WhileLoop(strands), WhileLoop(layers), outer, old, new)
            if waiting is not None:
                _check_turns(strands, layers, stack, waiting)
            stacks.append(replace(stack, waiting=waiting))
        except PassRefusal as refusal:
            context.note(f"residual stack not shared: {refusal.reason}", refusal.instruction)
    if not stacks:
        return False
    trips = WhileLoop(strands).trip_count
    assert trips is not None  # strand_duplication proved the trip count
    freed = sum(shapes.byte_size(layers.shape.tuple_shapes[s.new]) for s in stacks)
    flips = {skewed: _add_flip(strands, layers, skewed) for skewed in sorted({s.waiting is not None for s in stacks})}
    for stack in stacks:
        _use_one_slot(WhileLoop(layers), stack, flips[stack.waiting is not None])
        _mirror_last_reads(strands, stack, trips)
    if skewed := [s for s in stacks if s.waiting is not None]:
        _take_turns(strands, layers, skewed, trips)
    write_in_place(layers, stacks)
    drop_dead(strands.computation)
    context.note("residuals of both strands share one buffer", layers, stacks=len(stacks), bytes_freed=freed)
    return True


def _candidates(strands: Instruction, layers: Instruction) -> dict[int, tuple[int, int, int | None]]:
    """Finds stacks with one slot per layer that enter the merged loop and that the strand loop replaces by new stacks.

    Returns:
      A map from the state element of the old stack in the strand loop to three state elements. The first is the old
      stack in the merged loop. The second is the new stack in the merged loop. The third is the strand loop's element
      that holds the new stack for one more micro-batch (None without skew).
    """
    body = WhileLoop(strands).body
    trips = WhileLoop(layers).trip_count
    entering: dict[int, int] = {}
    for k, start in enumerate(layers.operands[0].operands):
        if start.opcode == "get-tuple-element" and start.operands[0] is body.parameters[0]:
            if list(start.shape.dimensions[:1]) == [trips]:
                entering.setdefault(start.tuple_index, k)
    found: dict[int, tuple[int, int, int | None]] = {}
    reads, users = WhileLoop(strands).reads, body.users()
    for outer in sorted(entering):
        value = body.root.operands[outer]
        waiting = reads.get(value, outer)
        handed_on = [v for v in body.root.operands if reads.get(v) == waiting]
        read_here = any(u is not body.root for r, k in reads.items() if k == waiting for u in users[r])
        if waiting != outer and handed_on == [value] and not read_here:
            value = body.root.operands[waiting]
        if value.opcode == "get-tuple-element" and value.operands[0] is layers:
            if value.tuple_index != entering[outer]:
                found[outer] = (entering[outer], value.tuple_index, None if waiting == outer else waiting)
    return found


def _match(strands: WhileLoop, layers: WhileLoop, outer: int, old: int, new: int) -> Stack:
    """Returns the stacks `old` and `new` as one `Stack`. Raises PassRefusal if that is not proved to be legal."""
    _refuse_other_readers(strands, layers, outer, old)
    _refuse_early_readers(strands, layers, new)
    shape = layers.instruction.shape.tuple_shapes[old]
    reads = slot_reads(layers, old)
    if old not in layers.invariants:
        raise PassRefusal("the backward pass changes the stack", layers.body.root.operands[old])
    write = slot_write(layers, new)
    if any(not shapes.same(r.operands[1].shape, write.operands[2].shape) for r in reads):
        raise PassRefusal("the two passes count layers in different types", write)
    tables = [layers.index_table(r.operands[1]) for r in reads]
    written = layers.index_table(write.operands[2])
    slots = shape.dimensions[0]
    if not reads or any(t is None or t != tables[0] for t in tables) or written is None:
        raise PassRefusal("the slots do not follow from the layer counter", write)
    assert tables[0] is not None
    mirrored = [slots - 1 - s for s in tables[0]]
    if sorted(written) != list(range(slots)) or mirrored != written:
        raise PassRefusal("the backward pass does not read the slots in reverse order", write)
    _check_last_use(strands.instruction, outer, tables[0])
    return Stack(old, new, tuple(reads), write, slots, outer)


def _refuse_other_readers(strands: WhileLoop, layers: WhileLoop, outer: int, old: int) -> None:
    """Raises PassRefusal if anything but one element of the merged loop's state reads the old stack in an iteration."""
    start = layers.instruction.operands[0]
    if sum(strands.reads.get(value) == outer for value in start.operands) != 1:
        raise PassRefusal("the stack enters the layer loop twice", layers.instruction)
    users = strands.body.users()
    readers = [u for r, k in strands.reads.items() if k == outer for u in users[r]]
    for result in users[layers.instruction]:
        if result.opcode != "get-tuple-element":
            readers.append(result)
        elif result.tuple_index == old:
            readers += users[result]
    if any(u is not start for u in readers):
        raise PassRefusal("the stack is read outside the layer loop", next(u for u in readers if u is not start))


def _refuse_early_readers(strands: WhileLoop, layers: WhileLoop, new: int) -> None:
    """Raises PassRefusal if anything but the next iteration's backward pass reads the new stack."""
    users = strands.body.users()
    results = [r for r in users[layers.instruction] if r.opcode == "get-tuple-element" and r.tuple_index == new]
    readers = [u for r in results for u in users[r] if u is not strands.body.root]
    if readers:
        raise PassRefusal("the stack is read outside the layer loop", readers[0])
    if sum(value in results for value in strands.body.root.operands) > 1:
        raise PassRefusal("the strand loop carries the stack twice", layers.instruction)


def _check_last_use(strands: Instruction, outer: int, table: list[int]) -> None:
    """Raises PassRefusal unless B(M-1), after the strand loop, reads the slots in the same order as the merged loop."""
    loop, index = last_reader(strands, outer)
    slices = slot_reads(loop, index)
    if index not in loop.invariants or any(loop.index_table(s.operands[1]) != table for s in slices):
        raise PassRefusal(
            "the last backward pass reads the slots in another order than the earlier ones", loop.instruction
        )


def _check_turns(strands: Instruction, layers: Instruction, stack: Stack, waiting: int) -> None:
    """Raises PassRefusal unless the two alternating stacks of skewed strands can become halves of one array."""
    table = WhileLoop(layers).index_table(stack.reads[0].operands[1])
    _check_last_use(strands, waiting, table or [])
    for made in (strands.operands[0].operands[k] for k in (stack.outer, waiting)):
        source = made.operands[0] if made.opcode == "get-tuple-element" else made
        users = made.computation.users()
        readers = [u for u in users[source] if u.tuple_index == made.tuple_index and users[u]]
        if source.opcode != "while" or len(users[made]) != 1 or readers != [made]:
            raise PassRefusal("the stack is not made by a loop over the first layers alone", made)
        slot_write(WhileLoop(source), made.tuple_index)
        _refuse_filled(WhileLoop(source), made.tuple_index)
    _refuse_filled(WhileLoop(layers), stack.new)


def _refuse_filled(loop: WhileLoop, element: int) -> None:
    if not is_empty(loop.initial(element)):
        raise PassRefusal("the forward pass does not start with an empty stack", loop.instruction)


def _add_flip(strands: Instruction, layers: Instruction, skewed: bool) -> Instruction:
    """Adds `flip` to the state of both loops. Returns the instruction that reads `flip` in the merged loop.

    `flip` is false for the residuals of the first forward pass, F(0). Every micro-batch negates `flip`. If `skewed`,
    only every second micro-batch negates it.
    """
    start = Builder(strands.computation).scalar(False, shapes.PRED)
    flips = [add_element(strands, start) for _ in range(1 + skewed)]
    body = strands.called[0]
    turned = Builder(body).make("not", flips[0].shape, [flips[0]])
    body.root.operands[-len(flips) :] = [*flips[1:], turned]
    body.sort()
    return add_element(layers, flips[0])


def _use_one_slot(layers: WhileLoop, stack: Stack, flip: Instruction) -> None:
    """Makes the reads of the old stack and the write of the new stack use the same slot. The stacks stay separate."""
    builder = Builder(layers.body)
    index = stack.reads[0].operands[1]
    slot = builder.make("select", index.shape, [flip, mirrored(builder, index, stack.slots), index])
    for read in stack.reads:
        read.operands[1] = slot
    stack.write.operands[2] = slot
    layers.body.sort()


def write_in_place(layers: Instruction, stacks: list[Stack]) -> None:
    """Makes forward write residuals into the old stacks, after barriers. Readers of new stacks then read old stacks."""
    body = layers.called[0]
    for guard in _guards(body, stacks):
        for one in [guard] if _can_stand(guard, body) else map(_behind_reads, guard.stacks):
            _put_up(one, WhileLoop(layers))
    moved = {s.new: s.old for s in stacks}
    for user in layers.computation.users()[layers]:
        if user.tuple_index in moved:
            user.proto.tuple_index = moved[user.tuple_index]
    drop_dead(body)
    drop_elements(layers, moved)
    drop_dead(layers.computation)


def _guards(body: Computation, stacks: list[Stack]) -> list[_Guard]:
    """The guards of all stacks. Stacks share a guard if their residuals lead to the same guarded value."""
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


def _behind_reads(stack: Stack) -> _Guard:
    return _Guard((stack,), stack.reads, frozenset())


def _behind_products(stack: Stack, users: dict[Instruction, list[Instruction]]) -> _Guard | None:
    """A barrier (`_Guard`) behind the elementwise results of residuals; None unless only dots read these results."""
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
    """Whether the barrier of `guard` is cheap and legal.

    The guarded values must not be much larger than the residuals. No guarded value may depend on a result of the
    barrier. Such a dependency exists if a layer is recomputed.
    """
    read = sum(shapes.byte_size(read.shape) for stack in guard.stacks for read in stack.reads)
    if sum(shapes.byte_size(value.shape) for value in guard.values) > _MOST_MADE * read:
        return False
    users = body.users()
    behind = [u for value in guard.values for u in users[value] if u not in guard.made]
    return not guard.made or graph.descendants(body, behind).isdisjoint(guard.values)


def _put_up(guard: _Guard, layers: WhileLoop) -> None:
    """Builds the barrier. Readers of the guarded values and the writes of the stacks then use the barrier's results."""
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


def _mirror_last_reads(strands: Instruction, stack: Stack, trips: int) -> None:
    """Mirrors the last backward pass's reads of a stack that the strand loop leaves in reverse order.

    The number of micro-batches, `trips`, decides whether the order is reversed, because F(0) stores in plain order.
    """
    stored = {stack.outer: trips % 2}
    if stack.waiting is not None:
        stored = {stack.outer: trips // 2 % 2, stack.waiting: (trips + 1) // 2 % 2}
    for outer, turned in stored.items():
        if turned:
            mirror_reads(*last_reader(strands, outer))


def _take_turns(strands: Instruction, layers: Instruction, stacks: list[Stack], trips: int) -> None:
    """Makes two alternating stacks halves of one array, to avoid copies. `base` is the first slot of the used half."""
    slots, body = stacks[0].slots, strands.called[0]
    turns = [(stack, (stack.outer, stack.waiting)) for stack in stacks if stack.waiting is not None]
    makers = [[strands.operands[0].operands[k] for k in both] for _, both in turns]
    readers = [[last_reader(strands, k) for k in both] for _, both in turns]
    outside, inside = Builder(strands.computation), Builder(body)
    base = add_element(strands, outside.scalar(0, shapes.S32))
    body.root.operands[-1] = inside.binary("subtract", inside.scalar(slots, shapes.S32), base)
    body.sort()
    base = add_element(layers, base)
    for (stack, (outer, waiting)), made, last in zip(turns, makers, readers, strict=True):
        (first, at), (second, then) = ((value.operands[0], value.tuple_index) for value in made)
        filler = WhileLoop(first).initial(at)
        assert filler is not None  # checked by _check_turns
        resize(first, at, resized(outside, filler, 2 * slots))
        resize(second, then, outside.element(first, at), slots)
        resize(strands, outer, outside.element(second, then))
        resize(layers, stack.old, inside.element(body.parameters[0], outer), base)
        resize(layers, stack.new, resized(inside, layers.operands[0].operands[stack.new], 2 * slots), base)
        body.root.operands[outer] = inside.element(layers, stack.new)
        body.root.operands[waiting] = inside.element(body.parameters[0], waiting)
        body.sort()
        for (loop, element), turn in zip(last, (trips % 2, (trips + 1) % 2), strict=True):
            resize(loop.instruction, element, outside.element(strands, outer), turn * slots)
    drop_dead(strands.computation)
    drop_dead(body)
    drop_elements(strands, [waiting for _, (_, waiting) in turns])
    drop_dead(strands.computation)
