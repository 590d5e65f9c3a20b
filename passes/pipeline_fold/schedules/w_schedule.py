"""The W schedule on the folded layout: a stage co-executes a forward and a backward that cross the stages together.

P is the number of stages, and M the number of micro-batches. A new micro-batch starts every two ticks. Chunk c of
micro-batch m runs forward in tick 2m + c and backward in tick 2m + 4P - 1 - c. Stage s holds chunks s and 2P - 1 - s.
In the steady phase, a stage runs one forward and one backward per tick. The two belong to different micro-batches and
different chunks:

    P = 2, M = 4     tick   0    1    2    3    4    5    6    7    8    9   10   11   12   13
    stage 0, forward     F0.0      F1.0 F0.3 F2.0 F1.3 F3.0 F2.3      F3.3
             backward                        B0.3      B1.3 B0.0 B2.3 B1.0 B3.3 B2.0      B3.0
    stage 1, forward          F0.1 F0.2 F1.1 F1.2 F2.1 F2.2 F3.1 F3.2
             backward                             B0.2 B0.1 B1.2 B1.1 B2.2 B2.1 B3.2 B3.1

The results of a tick are used in the very next tick. If t + s is even, stage s in tick t computes its chunk s forward
and its chunk 2P - 1 - s backward. It sends both results down, to the next stage. If t + s is odd, stage s computes
chunk 2P - 1 - s forward and chunk s backward. It sends both results up, to the previous stage. The last stage keeps the
results that would go down.

The schedule is lockstep: 2P ticks have only forwards, 2M - 2 ticks have both, and 2P ticks have only backwards. A stage
without work of its own computes, too, and its results are masked. If all chunks have the forward time f and the
backward time b, the step takes (2P + 2M - 2)(f + b), and a stage's own work takes 2M (f + b). The bubble is (P - 1) /
M, as in 1F1B (the paper prints p / (m - 1)).

Residuals: when a forward of chunk c starts, the residuals of this chunk are live for 2P - c micro-batches, the new one
included. So stage s holds the residuals of 2P - s micro-batches for its first chunk, and of s + 1 micro-batches for its
second chunk. A hand-over saves one slot: a forward takes the slot that the backward of the same tick frees. So every
stage needs 2P slots, or 2P + 1 without the hand-over. 2P slots hold the residuals of P micro-batches for both chunks of
a stage. The first stage of 1F1B needs as much memory.

Source: DHelix section 4.1, figures 7 and 8 (arXiv 2411.15871).
"""

from __future__ import annotations

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import check_folded
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.slots import Item, with_slots


def w_schedule(layout: Layout, microbatches: int, *, reuse_within_tick: bool = True) -> Schedule:
    """The W schedule on a folded layout (`layouts.fold_layout`).

    Args:
      reuse_within_tick: whether a forward may take the slot that the backward of the same tick frees.

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
