"""Finds the loops over micro-batches of a program that can become two strands, and makes those that are not there yet.

In this order, for the entry and for each computation that it runs once:
1. Constraints that say what is known and collectives of one device go (`constraint_folding`, `lone_collectives`).
2. Micro-batches that are written out become a loop (`loop_rolling`, `remainder`).
3. Each outermost loop is taken apart (`forward_backward_cut`). Where an iteration holds several micro-batches, it gets
   one iteration for each (`loop_flattening`).
4. Where that is refused, loops inside of it are tried: a loop over steps may hold one over micro-batches.
5. A loop that calls shard_maps for its layers goes into them (`manual_loop`).
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
    """Loops over micro-batches, taken apart, one at a time, with the computations that they stand in: the outermost
    that can be, in which calls are inlined. Why others cannot goes to `refusals`."""
    fold_constraints(module)
    drop_lone_collectives(module)
    for computation in reversed(graph.run_once(module.entry)):  # what is called, first
        _roll(computation, refusals)
    for computation, loop in _outermost_loops(module.entry):
        yield from _partitions(computation, loop, refusals)


def _partitions(
    computation: Computation, loop: Instruction, refusals: list[PassRefusal]
) -> Iterator[tuple[Computation, Partition]]:
    """Of `loop`, or else of what it holds: a loop over steps may hold one over micro-batches. A loop that calls
    shard_maps for its layers goes into them."""
    if loop not in computation.instructions:
        return  # in a function that is called twice, and done already
    parts, why = None, None
    try:
        inline_all(WhileLoop(loop).body)
        loop = _flattened(loop) or loop
        parts = partition(WhileLoop(loop))
    except PassRefusal as refusal:
        why = refusal
    others: list[PassRefusal] = []
    if parts is None:
        rolled = None if is_backward(loop) else _roll(loop.called[0], others)
        found = False
        for body, inner in _outermost_loops(loop.called[0]):
            for part in _partitions(body, inner, others):
                found = True
                yield part
        if found or rolled is not None:
            refusals += [*([why] if why and rolled is None else []), *others]
            return
    if isinstance(why, LayersInside) or (parts and holds_backward(parts.loop)):
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
    """Puts micro-batches that are written out in `computation` into a loop; why not, where there are such and it cannot
    be, goes to `refusals`."""
    joined = with_remainder(computation, stays_a_call, refusals)
    if joined is not None:
        take_over(computation, joined.computation)
        return roll(replace(joined, computation=computation))
    if sum(map(takes_gradients, computation.instructions)) < 2:
        return None
    # What a call does not need differs by call, and sums may be made in them.
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
    loops = (i for i in graph.walk(call.called[0]) if i.opcode == "while" and not is_backward(i))
    return any(map(is_backward, (inner for loop in loops for inner in graph.walk(loop.called[0]))))


def _flattened(loop: Instruction) -> Instruction | None:
    """A loop with an iteration for each of several equal micro-batches that an iteration of `loop` holds, if any."""
    try:
        parts = None if is_backward(loop) else equal_parts(loop.called[0])
    except PassRefusal:
        return None  # an iteration may be one micro-batch that takes several gradients
    return None if parts is None else flatten(WhileLoop(loop), parts)


def _stays_outside(parts: Partition | None, why: PassRefusal) -> PassRefusal | None:
    """What it means that a loop over micro-batches does not go into the shard_maps that it calls."""
    if parts is None:
        return PassRefusal(f"{INSIDE} and cannot go into: {why.reason}", why.instruction)
    calls = [i for i in parts.backward if is_manual(i)]
    if not any(i.opcode == "while" for call in calls for i in graph.walk(call.called[0])):
        return None  # nothing is stacked in there
    cost = "loops inside of them merge, but the strands keep their residuals apart, and gradients are stacked"
    return PassRefusal(
        f"the loop over micro-batches cannot go into the shard_maps that it calls: {why.reason}; {cost}",
        why.instruction,
    )


def _outermost_loops(computation: Computation) -> list[tuple[Computation, Instruction]]:
    """Loops of `computation` and of what it calls, once for each call (the body of a shard_map is a call)."""
    found: list[tuple[Computation, Instruction]] = []
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            found.append((computation, instruction))
        elif instruction.opcode in ("call", "conditional"):
            found += (each for called in instruction.called for each in _outermost_loops(called))
    return found
