"""Splits the body of a micro-batch loop into a forward and a backward part. Proves that they can become two strands.

    body(state):                                        forward    reads nothing that backward writes
      x = embed(state.batch[i]) ... layers ... loss     <- forward
      dx = head gradient                                <- forward too: the cut lies where only dx is alive
      grads = backward layers(dx, residuals)            <- backward: everything that depends on the first backward layer
      state.acc + grads                                 <- backward

The input is a `while` loop whose calls are inlined. JAX gives special names to transposed (backward) operations. These
names propose where to cut, but legality follows from data flow alone:

1. Backward is closed: every instruction that depends on a backward instruction belongs to backward. This includes
   instructions that depend on the previous iteration's backward through the loop state.
2. Forward and the loop condition do not depend on backward. So forward(i+1) may run before backward(i).
3. The trip count is proved and at least two. The loop has no side effects whose order must stay. Unordered callbacks
   are allowed.

If a rule does not hold, `partition` raises PassRefusal with the instruction that breaks the rule. It returns None for a
loop without a backward part. Sources: DHelix, section 3.1 (strands; arXiv 2411.15871), and docs/design/strands.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.analysis.work import computation_work, loop_work
from dhelix.passes.hlo import Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.hlo.manual_computation import is_manual, manual_computations

# Operations that are cheaper to recompute than to carry from one iteration to the next.
_CHEAP = frozenset(
    "add and bitcast broadcast clamp compare concatenate constant convert copy dynamic-slice iota maximum minimum "
    "multiply negate not opt-barrier or pad reshape select shift-left shift-right-logical slice subtract transpose "
    "tuple xor".split()
)
_CALLBACK = "callback"  # on every backend, the custom-call targets of JAX's host callbacks contain this word
_ORDERED = "the loop over micro-batches holds ordered callbacks; make them unordered (ordered=False)"
_HOST_PLACEMENT = ("annotate_device_placement", "MoveToHost", "MoveToDevice")


INSIDE = "the layer loops are inside a shard_map that the loop over micro-batches calls"


class LayersInside(PassRefusal):
    """The loop calls a shard_map that holds the layers. `manual_loop` can move some such loops into a shard_map."""


@dataclass(frozen=True)
class Partition:
    """The parts of one loop body. Each part lists its instructions in the order of the body."""

    loop: WhileLoop
    trip_count: int
    shared: tuple[Instruction, ...]
    """Instructions that depend on loop invariants only. They are computed once for both parts of an iteration."""
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    recomputed: tuple[Instruction, ...]
    """Forward instructions that the backward part recomputes from crossing values."""
    crossing: tuple[Instruction, ...]
    """Results of forward(i), and elements of the state before iteration i, that backward(i) reads.

    They become loop state. State elements that backward writes, or that are loop-invariant, do not cross.
    """
    written_by_backward: frozenset[int]
    """State elements that backward writes. Forward writes the others."""


def partition(loop: WhileLoop) -> Partition | None:
    """The legal partition of `loop`'s body; None if the body holds no backward pass.

    Raises PassRefusal if the body holds a backward pass but cannot be partitioned legally. Raises LayersInside if a
    shard_map holds both the forward and the backward pass.
    """
    seeds = _first_backward(loop)
    if not seeds:
        if holds_backward(loop):
            raise LayersInside(INSIDE, loop.instruction)
        return None
    seeds = [_outside_of_shard_map(loop, seed) for seed in seeds]
    _refuse_effects(loop)  # Rule 3
    backward, written = _close(loop, seeds)  # Rule 1
    try:
        _refuse_forward_reads(loop, seeds, written)  # Rule 2
    except PassRefusal:
        if len(seeds) == 1:
            raise
        seeds = seeds[:1]
        backward, written = _close(loop, seeds)
        _refuse_forward_reads(loop, seeds, written)
    backward |= _made_for(loop, backward, seeds)
    trips = loop.trip_count  # Rule 3
    if trips is None:
        raise PassRefusal(
            "the number of micro-batches is dynamic and cannot be proved to be at least one; "
            "loop over a static number of them",
            loop.instruction,
        )
    if trips < 2:
        raise PassRefusal(
            f"{trips} micro-batch leaves nothing to interleave; split the batch into at least two, and do not unroll "
            "the loop over them",
            loop.instruction,
        )
    parameter, root = loop.body.parameters[0], loop.body.root
    invariant = _depends_on_invariants_only(loop)
    rest = [i for i in loop.body.instructions if i not in backward and i not in loop.reads]
    rest = [i for i in rest if i is not parameter and i is not root]
    recomputed, crossing = _crossing(loop, backward, written, invariant)
    return Partition(
        loop=loop,
        trip_count=trips,
        shared=tuple(i for i in rest if i in invariant),
        forward=tuple(i for i in rest if i not in invariant),
        backward=tuple(i for i in loop.body.instructions if i in backward),
        recomputed=tuple(i for i in rest if i in recomputed),
        crossing=tuple(crossing),
        written_by_backward=written,
    )


def _first_backward(loop: WhileLoop) -> list[Instruction]:
    """The instructions where the cut is proposed; empty if none is found, or if `loop` is part of a backward pass.

    One of these is proposed: the first backward layer loop, the shard_map of all backward layers, or the first unrolled
    backward layer. If a step trains several models, such as actor and critic, there are several backward layer loops
    that do not depend on each other. Then all of these are proposed.
    """
    if BACKWARD_NAME in loop.instruction.op_name:
        return []  # the loop is itself part of a backward pass
    marked = [i for i in loop.body.instructions if BACKWARD_NAME in i.op_name and i.operands]
    loops = [(i, loop_work(i)) for i in marked if i.opcode == "while"]
    if loops:
        most = max(work for _, work in loops)
        found: list[Instruction] = []
        for i, work in loops:
            if work * 4 >= most and i not in graph.descendants(loop.body, found):
                found.append(i)
        return found
    calls = [(i, computation_work(i.called[0])) for i in marked if is_manual(i)]
    largest, most = max(calls, key=lambda call: call[1], default=(None, 0))
    if largest is not None and most * 2 > sum(work for _, work in calls):
        return [largest]  # this call holds all layers, not a single layer
    narrowest = _narrowest_cotangent(loop, marked)
    return [] if narrowest is None else [narrowest]


def _outside_of_shard_map(loop: WhileLoop, seed: Instruction) -> Instruction:
    """The first instruction of the shard_map that `seed` belongs to; `seed` itself if it belongs to no shard_map.

    A shard_map is three instructions of the loop's body (`passes/hlo/manual_computation.py`).
    """
    at = seed.operands[0] if seed.opcode == "get-tuple-element" else seed
    return next((one.instructions[0] for one in manual_computations(loop.body) if at in one.instructions), seed)


def holds_backward(loop: WhileLoop) -> bool:
    """Whether `loop` calls a `shard_map` that is, or holds, a backward pass."""
    return any(
        BACKWARD_NAME in call.op_name or any(BACKWARD_NAME in i.op_name for i in graph.walk(call.called[0]))
        for call in filter(is_manual, loop.body.instructions)
    )


def _narrowest_cotangent(loop: WhileLoop, marked: list[Instruction]) -> Instruction | None:
    """The instruction where unrolled code is cut: it reads the smallest cotangent that is alive alone.

    Between two layers only one cotangent, dx, is alive. After the loss and inside a layer, several cotangents or a
    larger one are alive. If several cotangents are the smallest, the first one is taken. Values that lead only to
    results of the iteration (weight gradients) do not count.
    """
    if not marked:
        return None
    inside = set(marked)
    users = loop.body.users()
    position = {i: n for n, i in enumerate(loop.body.instructions)}
    floating = [i for i in marked if shapes.is_floating(i.shape) and shapes.element_count(i.shape) > 1]
    depth: dict[Instruction, int] = {}
    for i in marked:  # length of the longest chain of backward operations that ends here
        depth[i] = 1 + max((depth[o] for o in i.operands if o in depth), default=0)
    if not floating:
        return None
    last = max(floating, key=lambda i: (depth[i], -position[i]))
    path = graph.ancestors(loop.body, [last]) & inside
    alone: list[Instruction] = []
    open_until = -1
    for i in loop.body.instructions:  # i is alone if no edge of the path spans its position
        if i not in path:
            continue
        if open_until <= position[i]:
            alone.append(i)
        open_until = max([open_until, *(position[u] for u in users[i] if u in path)])
    alone = [i for i in alone if i in floating and i is not last]
    if not alone:
        return last
    smallest = min(shapes.byte_size(i.shape) for i in alone)
    chosen = next(i for i in alone if shapes.byte_size(i.shape) == smallest)
    return next((u for u in users[chosen] if u in path), chosen)


def _close(loop: WhileLoop, seeds: list[Instruction]) -> tuple[set[Instruction], frozenset[int]]:
    """The instructions that depend on `seeds`, also through the loop state, and the state elements that they write."""
    root = loop.body.root
    backward = set(seeds)
    written: frozenset[int] = frozenset()
    while True:
        backward = graph.descendants(loop.body, backward) - {root}
        written = _written(loop, backward, written)
        readers = {i for i, k in loop.reads.items() if k in written}
        reached = graph.descendants(loop.body, readers) - readers - {root}
        if reached <= backward:
            break
        backward |= reached
    return backward, written


def _written(loop: WhileLoop, backward: set[Instruction], known: frozenset[int]) -> frozenset[int]:
    """State elements whose new value is made by `backward`, or is the old value of an element that backward writes."""
    values = list(enumerate(loop.body.root.operands))
    found = known | {k for k, value in values if value in backward}
    while handed_on := {k for k, value in values if loop.reads.get(value) in found} - found:
        found |= handed_on
    return found


def _made_for(loop: WhileLoop, backward: set[Instruction], seeds: list[Instruction]) -> set[Instruction]:
    """Instructions that only backward reads: tuples, and instructions with a backward name that do not lead to the cut.

    In unrolled code, the recomputation of `jax.checkpoint` depends on residuals alone. By data flow alone, it would
    belong to forward, and its results would stay alive until backward reads them.
    """
    needed = graph.ancestors(loop.body, seeds) | loop.reads.keys()
    users = loop.body.users()
    found: set[Instruction] = set()
    for instruction in reversed(loop.body.instructions):
        marked = BACKWARD_NAME in instruction.op_name and instruction not in needed
        if instruction not in backward and (marked or instruction.opcode == "tuple"):
            readers = users[instruction]
            if readers and all(user in backward or user in found for user in readers):
                found.add(instruction)
    return found


def _refuse_forward_reads(loop: WhileLoop, seeds: list[Instruction], written: frozenset[int]) -> None:
    """Raises PassRefusal if forward or the condition reads a state element that backward writes."""
    needed = graph.ancestors(loop.body, seeds)
    for source, k in loop.reads.items():
        if k in written and source in needed:
            reached = graph.descendants(loop.body, [source]) & needed
            readers = {i for i in reached if i.opcode != "tuple"} - {source, *seeds}
            if not readers:
                continue  # only the seeds read this element: they add to an accumulator
            at = next((i for i in loop.body.instructions if i in readers and i.op_name), source)
            raise PassRefusal(
                f"the forward pass reads {shapes.text(source.shape)}, which the previous micro-batch's backward pass "
                f"writes ({_likely(source)}); update it once per step, after the loop",
                at,
            )
    for k in loop.condition_indices & written:
        raise PassRefusal(
            f"the loop's condition reads element {k} of the loop state, which the backward pass writes; loop over a "
            "fixed number of micro-batches",
            loop.instruction,
        )


def _likely(source: Instruction) -> str:
    if shapes.element_count(source.shape) == 1:
        return "a dynamic loss scale or another running scalar?"
    if len(source.shape.dimensions) == 1:
        return "an fp8 amax history or running statistics?"
    return "parameters updated inside the loop?"


def _refuse_effects(loop: WhileLoop) -> None:
    """Raises PassRefusal for side effects whose order must stay, and for residuals on the host."""
    if any(s.element_type == shapes.TOKEN for s in loop.instruction.shape.tuple_shapes):
        raise PassRefusal(_ORDERED, loop.instruction)
    for instruction in graph.walk(loop.body):
        target = instruction.proto.custom_call_target
        if target in _HOST_PLACEMENT:
            raise PassRefusal(
                "residuals are offloaded to the host; choose a jax.checkpoint policy that keeps them on the "
                "device or recomputes them",
                instruction,
            )
        if instruction.called or not has_side_effect(instruction):
            continue
        if not (instruction.opcode == "custom-call" and _CALLBACK in target):
            raise PassRefusal(
                f"{target or instruction.opcode} has ordered side effects; move it out of the loop over micro-batches",
                instruction,
            )
        if any(o.shape.element_type == shapes.TOKEN for o in instruction.operands):
            raise PassRefusal(_ORDERED, instruction)


def _depends_on_invariants_only(loop: WhileLoop) -> set[Instruction]:
    found: set[Instruction] = set()
    for instruction in loop.body.instructions:
        if instruction in loop.reads:
            if loop.reads[instruction] in loop.invariants:
                found.add(instruction)
        elif instruction.opcode != "parameter" and instruction is not loop.body.root:
            if all(o in found for o in instruction.operands) and not has_side_effect(instruction):
                found.add(instruction)
    return found


def _crossing(
    loop: WhileLoop, backward: set[Instruction], written: frozenset[int], invariant: set[Instruction]
) -> tuple[set[Instruction], list[Instruction]]:
    """The forward instructions that backward recomputes, and the values that forward must hand to backward."""
    recomputed: set[Instruction] = set()
    crossing: dict[Instruction, None] = {}

    def available(value: Instruction) -> bool:
        known = value in backward or value in invariant or value in recomputed or value in crossing
        return known or (value in loop.reads and loop.reads[value] in written)

    for instruction in loop.body.instructions:
        if instruction not in backward:
            continue
        for value in instruction.operands:
            if available(value):
                continue
            again, leaves = _recipe(value, loop, available)
            if again and sum(shapes.byte_size(leaf.shape) for leaf in leaves) < shapes.byte_size(value.shape):
                recomputed.update(again)
                crossing.update(dict.fromkeys(leaves))
            else:
                crossing[value] = None
    return recomputed, list(crossing)


def _is_cheap(value: Instruction) -> bool:
    """Whether `value` is cheap to recompute.

    Elements of barriers are cheap, too: `jax.checkpoint` passes its inputs through a barrier.
    """
    behind_barrier = value.opcode == "get-tuple-element" and value.operands[0].opcode == "opt-barrier"
    return value.opcode in _CHEAP or behind_barrier


def _recipe(
    value: Instruction, loop: WhileLoop, available: Callable[[Instruction], bool]
) -> tuple[list[Instruction], list[Instruction]]:
    """The cheap instructions that compute `value`, and their inputs. Leaves out what backward has (`available`)."""
    again: dict[Instruction, None] = {}
    leaves: dict[Instruction, None] = {}
    stack = [value]
    while stack:
        current = stack.pop()
        if current in again or current in leaves or available(current):
            continue
        if current in loop.reads or not _is_cheap(current) or len(again) > 64:
            leaves[current] = None
        else:
            again[current] = None
            stack.extend(reversed(current.operands))
    return list(again), list(leaves)
