"""Interleaved SI (strand interleaving): the SI blocks of the W schedule on the layout of interleaved 1F1B.

An SI block co-executes a forward and a backward. P is the number of stages, M the number of micro-batches, and v the
number of chunks per stage. If P divides M and v is at least 2, the bubble is at most half of W's.

As in interleaved 1F1B, micro-batches run through the v chunks of a stage in groups of P. In interleaved 1F1B, a stage
runs either a forward or a backward in a tick. In interleaved SI, all stages run both in a tick, in lockstep.
Micro-batch m starts in tick t = vP (m div P) + m mod P. Its chunk c runs forward in tick t + c and backward in tick t +
2vP - 1 - c:

    P = 2, v = 2, M = 4    tick   0    1    2    3    4    5    6    7    8    9   10   11   12
    stage 0, forward            F0.0 F1.0 F0.2 F1.2 F2.0 F3.0 F2.2 F3.2
             backward                                    B0.2 B1.2 B0.0 B1.0 B2.2 B3.2 B2.0 B3.0
    stage 1, forward                 F0.1 F1.1 F0.3 F1.3 F2.1 F3.1 F2.3 F3.3
             backward                               B0.3 B1.3 B0.1 B1.1 B2.3 B3.3 B2.1 B3.1

The results of a tick are used in the very next tick. If P does not divide M, the last group is a full group without the
missing micro-batches.

Cost: if P divides M, vP ticks have only forwards, vM + P - 1 - vP ticks have both, and vP ticks have only backwards. If
all chunks have the forward time f and the backward time b, the step takes (vM + P - 1)(f + b), and a stage's own work
takes vM (f + b). The bubble is (P - 1) / (v M), as in interleaved 1F1B. But all ticks except the warm-up and the
cool-down are SI blocks. If P does not divide M, the bubble is at most W's.

Residuals: on stage 0, a backward runs (v + 1) P - 1 ticks after its forward, on average over the chunks. So stage 0
holds the residuals of (v + 1) P - 1 chunks, each 1 / (v P) of the model. Other stages hold fewer, but have as many
slots, because all stages run the same program. W needs the residuals of 2P chunks, each 1 / (2P) of the model:

    stages              2       4       8
    v = 2           1.25    1.375    1.44     times W's residuals
    v = 4           1.125    1.19    1.22

Messages: for each micro-batch, a stage sends v activations and v cotangents, one of each kind in a tick. In W, a stage
sends two of each kind.

Interleaved SI combines DHelix section 4.1 (W without the fold) with interleaved 1F1B (`one_forward_one_backward.py`).
"""

from __future__ import annotations

from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.schedules.one_forward_one_backward import check_interleaved
from dhelix.passes.pipeline_fold.slots import Item, with_slots


def interleaved_si(layout: Layout, microbatches: int) -> Schedule:
    """Interleaved SI on an interleaved layout. Raises DhelixError on another layout, or without a micro-batch."""
    check_interleaved(layout, microbatches)
    stages, chunks = layout.stages, layout.chunks
    forward, backward = dict[tuple[int, int], Item](), dict[tuple[int, int], Item]()
    for microbatch in range(microbatches):
        group, member = divmod(microbatch, stages)
        start = chunks * group + member
        for chunk, stage in enumerate(layout.stage_of):
            forward[start + chunk, stage] = (microbatch, chunk)
            backward[start + 2 * chunks - 1 - chunk, stage] = (microbatch, chunk)
    ticks = 1 + max(tick for tick, _ in backward)
    timetable = [
        [(forward.get((tick, stage)), backward.get((tick, stage))) for stage in range(stages)] for tick in range(ticks)
    ]
    return with_slots("interleaved_si", layout, microbatches, timetable, lockstep=True)
