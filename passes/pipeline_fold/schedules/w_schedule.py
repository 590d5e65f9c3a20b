"""The W schedule of the folded layout: both strands cross the stages the same way, so each stage co-executes them.

A new micro-batch starts every two ticks. Chunk c of micro-batch m goes forward in tick 2m + c and backward in tick
2m + 4P - 1 - c. On stage s, which holds chunks s and 2P - 1 - s, this makes one forward and one backward in a tick of
the steady phase, of different micro-batches and different chunks, and never two of a kind:

    P = 2, M = 4     tick   0    1    2    3    4    5    6    7    8    9   10   11   12   13
    stage 0, forward     F0.0      F1.0 F0.3 F2.0 F1.3 F3.0 F2.3      F3.3
             backward                        B0.3      B1.3 B0.0 B2.3 B1.0 B3.3 B2.0      B3.0
    stage 1, forward          F0.1 F0.2 F1.1 F1.2 F2.1 F2.2 F3.1 F3.2
             backward                             B0.2 B0.1 B1.2 B1.1 B2.2 B2.1 B3.2 B3.1

What a tick makes, the stage that needs it uses in the very next tick. In tick t with t + s even, stage s computes its
chunk s forward and its chunk 2P - 1 - s backward and sends both results down; with t + s odd both go up.

Lockstep: 2P ticks go forward only, 2M - 2 ticks do both, 2P ticks go backward only; a stage without work of its own in
one of them computes along, masked. With chunks of equal cost the time is (2P + 2M - 2)(f + b) and a stage's own work
2M (f + b): the bubble is (P - 1) / M, that of 1F1B (the paper prints p / (m - 1)).

Residuals: of chunk c, 2P - c micro-batches are alive when its next one starts, so stage s holds 2P - s of its first
chunk and s + 1 of its second one; a hand-over within the tick saves one. 2P slots on every stage, 2P + 1 without it: as
much as P micro-batches of a whole stage, what 1F1B needs on its first.

DHelix paper, section 4.1, figures 7 and 8.
"""

from __future__ import annotations

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import check_folded
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.slots import Item, with_slots


def w_schedule(layout: Layout, microbatches: int, *, reuse_within_tick: bool = True) -> Schedule:
    """The W schedule on a folded layout (`layouts.fold_layout`).

    Args:
      reuse_within_tick: let a forward take the slot that the backward of the same tick frees.

    Raises:
      DhelixError: the layout is not folded, or there is no micro-batch.
    """
    stages = layout.stages
    check_folded(layout)
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")
    forward, backward = dict[tuple[int, int], Item](), dict[tuple[int, int], Item]()
    for microbatch in range(microbatches):
        for chunk, stage in enumerate(layout.stage_of):
            forward[2 * microbatch + chunk, stage] = (microbatch, chunk)
            backward[2 * microbatch + 4 * stages - 1 - chunk, stage] = (microbatch, chunk)
    timetable = [
        [(forward.get((tick, stage)), backward.get((tick, stage))) for stage in range(stages)]
        for tick in range(2 * microbatches + 4 * stages - 2)
    ]
    return with_slots("w", layout, microbatches, timetable, lockstep=True, reuse_within_tick=reuse_within_tick)
