"""Finds the loops over micro-batches that can become two strands, and rolls unrolled micro-batches into loops.

1. Remove redundant sharding constraints and single-device collectives (`constraint_folding`, `lone_collectives`).
2. Roll unrolled micro-batches into a loop, in the entry computation and in each computation that it runs once
   (`loop_rolling`, `remainder`).
3. Partition the body of each outermost loop into a forward and a backward part (`forward_backward_cut`). If an
   iteration holds several micro-batches, first give each of them its own iteration (`loop_flattening`).
4. If a loop has no partition, try the loops inside it. For example, a loop over optimizer steps may hold a loop over
   micro-batches.
5. If a loop calls shard_maps for its layers, move the loop into one shard_map (`manual_loop`).
"""

from collections.abc import Iterator
from dataclasses import replace

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Computation, HloModule, Instruction, WhileLoop, graph
from dhelix.passes.hlo.edit import drop_dead, inline_calls, take_over
from dhelix.passes.hlo.manual_computation import inline_all, is_manual, stays_a_call
from dhelix.passes.strands.forward_backward_cut import INSIDE, LayersInside, Partition, holds_backward, partition
from dhelix.passes.strands.microbatches.constraint_folding import fold_constraints
from dhelix.passes.strands.microbatches.lone_collectives import drop_lone_collectives
from dhelix.passes.strands.microbatches.manual_loop import move_inside
from dhelix.passes.strands.microbatches.written_out.anchors import is_backward, takes_gradients
from dhelix.passes.strands.microbatches.written_out.equal_parts import equal_parts
from dhelix.passes.strands.microbatches.written_out.loop_flattening import flatten
from dhelix.passes.strands.microbatches.written_out.loop_rolling import roll
from dhelix.passes.strands.microbatches.written_out.remainder import with_remainder


def partitions(module: HloModule, refusals: list[PassRefusal]) -> Iterator[tuple[Computation, Partition]]:
    """Yields a partition for each outermost loop over micro-batches that can be partitioned.

    Edits `module` by the steps of the module's docstring, and inlines the calls in these loops.

    Args:
      refusals: receives the reasons why other loops cannot be partitioned.

    Yields:
      The computation that holds the loop, and the loop's partition.
    """
    fold_constraints(module)  # Step 1
    drop_lone_collectives(module)
    for computation in reversed(graph.run_once(module.entry)):  # Step 2, callees first
        _roll(computation, refusals)
    for computation, loop in _outermost_loops(module.entry):
        yield from _partitions(computation, loop, refusals)


def _partitions(
    computation: Computation, loop: Instruction, refusals: list[PassRefusal]
) -> Iterator[tuple[Computation, Partition]]:
    """Yields the partition of `loop`. If there is none, yields the partitions of the loops inside `loop`.

    These are steps 3 to 5 of the module's docstring.
    """
    if loop not in computation.instructions:
        return  # the function that holds `loop` is called twice, and the first call was handled already
    parts, why = None, None
    try:
        inline_all(WhileLoop(loop).body)  # Step 3
        loop = _flattened(loop) or loop
        parts = partition(WhileLoop(loop))
    except PassRefusal as refusal:
        why = refusal
    others: list[PassRefusal] = []
    if parts is None:  # Step 4
        rolled = None if is_backward(loop) else _roll(loop.called[0], others)
        found = False
        for body, inner in _outermost_loops(loop.called[0]):
            for part in _partitions(body, inner, others):
                found = True
                yield part
        if found or rolled is not None:
            refusals += [*([why] if why and rolled is None else []), *others]
            return
    if isinstance(why, LayersInside) or (parts and holds_backward(parts.loop)):  # Step 5
        try:
            moved = move_inside(computation, loop)
        except PassRefusal as stays:
            why = _stays_outside(parts, stays)
        else:
            yield from _partitions(*moved, refusals)
            return
    refusals += [*([why] if why else []), *others]
    if parts is not None:
        yield computation, parts


def _roll(computation: Computation, refusals: list[PassRefusal]) -> Instruction | None:
    """Rolls unrolled micro-batches of `computation` into a loop and returns the loop; None if nothing was rolled.

    If there are unrolled micro-batches that cannot be rolled, appends the reason to `refusals`.
    """
    joined = with_remainder(computation, stays_a_call, refusals)
    if joined is not None:
        take_over(computation, joined.computation)
        return roll(replace(joined, computation=computation))
    if sum(map(takes_gradients, computation.instructions)) < 2:
        return None
    # Calls are inlined because two calls of one function may use different results, and callees may sum gradients.
    inline_calls(computation, keep=lambda call: stays_a_call(call) or _holds_micro_batches(call))
    drop_dead(computation)
    loop = None
    try:
        while parts := equal_parts(computation):
            loop = roll(parts)
    except PassRefusal as refusal:
        refusals.append(refusal)
    return loop


def _holds_micro_batches(call: Instruction) -> bool:
    """Whether the callee holds a loop over micro-batches: a loop that is not backward, with a backward pass inside."""
    loops = (i for i in graph.walk(call.called[0]) if i.opcode == "while" and not is_backward(i))
    return any(map(is_backward, (inner for loop in loops for inner in graph.walk(loop.called[0]))))


def _flattened(loop: Instruction) -> Instruction | None:
    """Turns `loop`, with several equal micro-batches per iteration, into a loop with one micro-batch per iteration.

    Returns the new loop. Returns None if an iteration of `loop` does not hold several equal micro-batches, or if
    `flatten` leaves `loop` as it is.
    """
    try:
        parts = None if is_backward(loop) else equal_parts(loop.called[0])
    except PassRefusal:
        return None  # the iteration may be a single micro-batch that takes several gradients
    return None if parts is None else flatten(WhileLoop(loop), parts)


def _stays_outside(parts: Partition | None, why: PassRefusal) -> PassRefusal | None:
    """The refusal to report when a loop cannot move into the shard_maps that it calls.

    None if nothing is lost when the loop stays outside.
    """
    if parts is None:
        return PassRefusal(f"{INSIDE}, and that loop cannot move into it: {why.reason}", why.instruction)
    calls = [i for i in parts.backward if is_manual(i)]
    if not any(i.opcode == "while" for call in calls for i in graph.walk(call.called[0])):
        return None  # no layer loop in the backward shard_map, so nothing is stacked there
    cost = "loops inside them merge, but the strands do not share residual buffers, and gradients are stacked"
    return PassRefusal(
        f"the loop over micro-batches cannot move into the shard_maps that it calls: {why.reason}; {cost}",
        why.instruction,
    )


def _outermost_loops(computation: Computation) -> list[tuple[Computation, Instruction]]:
    """The outermost loops of `computation` and of its callees, with the computation that holds each loop.

    Loops of a callee are listed once per call. The body of a shard_map is a callee, too.
    """
    found: list[tuple[Computation, Instruction]] = []
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            found.append((computation, instruction))
        elif instruction.opcode in ("call", "conditional"):
            found += (each for called in instruction.called for each in _outermost_loops(called))
    return found
