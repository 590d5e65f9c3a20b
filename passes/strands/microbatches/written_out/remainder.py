"""Joins micro-batches before or after a loop with the micro-batches in the loop. `unroll=` can leave such a remainder.

    while i < 2: two micro-batches          g0, ..., g3 unrolled, g4             loop_rolling:
    g = g + backward(w, x[4])          ->                                   ->   while k < 5: one micro-batch

The loop is unrolled, and rolled again together with the micro-batches around it, if `equal_parts` proves that all
micro-batches are equal. If they are not equal, the loop stays as it is.
Why it is legal: an unrolled loop computes the same values as the loop. Cost: compile time for the unrolled program.
"""

from __future__ import annotations

from collections.abc import Callable

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, Computation, Instruction, WhileLoop, graph
from dhelix.passes.hlo.edit import (
    copy_computation,
    copy_instructions,
    drop_dead,
    inline_calls,
    read_through,
    replace_all_uses,
)
from dhelix.passes.strands.microbatches.written_out.anchors import is_backward, takes_gradients
from dhelix.passes.strands.microbatches.written_out.equal_parts import Parts, Unequal, equal_parts

_LARGEST = 20_000  # limit on the instructions of an unrolled loop, so that this pass takes little time


def with_remainder(
    computation: Computation, keep: Callable[[Instruction], bool], refusals: list[PassRefusal]
) -> Parts | None:
    """Joins the micro-batches in a loop of `computation` with the micro-batches around the loop.

    Args:
      keep: says whether a call stays a call.
      refusals: receives the reason if the micro-batches are not equal.

    Returns:
      The micro-batches in and around the loop, as parts of a changed copy of `computation`. None if no loop can be
      joined with micro-batches around it.
    """
    places = [n for n, i in enumerate(computation.instructions) if i.opcode == "while"]
    for place in places:
        loop = computation.instructions[place]
        trips = _trips(loop)
        if not trips or not _goes_on(computation, loop) or is_backward(loop):
            continue
        trial = copy_computation(computation)
        _write_out(trial.instructions[place])
        inline_calls(trial, keep)
        drop_dead(trial)
        try:
            parts = equal_parts(trial)
        except Unequal as refusal:
            why = f"gradients taken outside the loop over micro-batches cannot join it: {refusal.why}"
            refusals.append(PassRefusal(why, loop))
            continue
        if parts is not None and parts.count > trips:
            return parts
    return None


def _trips(instruction: Instruction) -> int | None:
    """The trip count of a loop that is small enough to unroll; None for other loops."""
    try:
        trips = WhileLoop(instruction).trip_count
    except PassRefusal:
        return None
    size = sum(1 for _ in graph.walk(instruction.called[0]))
    return trips if trips and trips * size <= _LARGEST else None


def _goes_on(computation: Computation, loop: Instruction) -> bool:
    """Whether both the loop and the instructions around it take gradients."""
    inside = any(map(is_backward, graph.walk(loop.called[0])))
    return inside and any(map(takes_gradients, computation.instructions))


def _write_out(instruction: Instruction) -> None:
    """Replaces the loop by its unrolled iterations."""
    loop, builder = WhileLoop(instruction), Builder(instruction.computation)
    state = [builder.element(instruction.operands[0], k) for k in range(loop.size)]
    inside = [i for i in loop.body.instructions if i not in loop.reads and i.opcode != "parameter"]
    for _ in range(loop.trip_count or 0):
        copies = {read: state[k] for read, k in loop.reads.items()}
        copy_instructions(builder, [i for i in inside if i is not loop.body.root], copies)
        state = [copies[value] for value in loop.body.root.operands]
    replace_all_uses(instruction.computation, {instruction: builder.tuple(state)})
    read_through(instruction.computation)
    drop_dead(instruction.computation)
