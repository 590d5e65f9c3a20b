"""1F1B and interleaved 1F1B, the schedules of Megatron-LM. They are the baselines for the W schedule (`w_schedule.py`).

P is the number of stages, and M the number of micro-batches.

1F1B uses the linear layout. Stage d first runs P - d forwards. Then backwards and forwards alternate. On stage d, the
forward of micro-batch m is in tick 2m + d, and the backward is in tick 2m + 2P - 1 - d. So a stage has at most one of
the two in a tick:

    P = 3, M = 4      0    1    2    3    4    5    6    7    8    9   10   11
    stage 0          F0        F1        F2   B0   F3   B1        B2        B3
    stage 1               F0        F1   B0   F2   B1   F3   B2        B3
    stage 2                    F0   B0   F1   B1   F2   B2   F3   B3

Interleaved 1F1B gives each stage v chunks. This shortens the bubble to (P - 1) / (v M), at the price of more messages
and more residuals. Micro-batches run through the chunks in groups of P. Stage d starts with (v - 1) P + 2 (P - 1 - d) +
1 forwards. If P does not divide M, the last group is a full group without the missing micro-batches.

Neither schedule is lockstep: a stage runs only its own work. Neighbouring stages rendezvous when they exchange
messages. Between two rendezvous, both stages should do equal work:

    1F1B           rendezvous every other tick; until then, each stage runs a forward and a backward, in either order
    interleaved    rendezvous in each tick, so each tick has only forwards or only backwards, alternately

If P divides M, a stage waits only for messages that it needs.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, section 2.2.
"""

from __future__ import annotations

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.slots import with_slots
from dhelix.passes.pipeline_fold.ticks import Pair, in_ticks, of_first


def one_forward_one_backward(layout: Layout, microbatches: int) -> Schedule:
    """1F1B on a linear layout. Raises DhelixError on another layout or without a micro-batch."""
    stages = layout.stages
    if layout.stage_of != tuple(range(stages)):
        raise DhelixError("1F1B needs the linear layout: make it with linear_layout(layers, stages)")
    _check_microbatches(microbatches)
    timetable: list[list[Pair]] = [[(None, None)] * stages for _ in range(2 * (microbatches + stages - 1))]
    for microbatch in range(microbatches):
        for stage in range(stages):
            timetable[2 * microbatch + stage][stage] = ((microbatch, stage), None)
            timetable[2 * microbatch + 2 * stages - 1 - stage][stage] = (None, (microbatch, stage))
    return with_slots("1f1b", layout, microbatches, timetable, lockstep=False)


def interleaved_one_forward_one_backward(layout: Layout, microbatches: int) -> Schedule:
    """Interleaved 1F1B on an interleaved layout. Raises DhelixError on another layout or without a micro-batch."""
    check_interleaved(layout, microbatches)
    orders = of_first(microbatches, [_order(layout, microbatches, stage) for stage in range(layout.stages)])
    return with_slots("interleaved", layout, microbatches, in_ticks(layout, orders, one_way=True), lockstep=False)


def check_interleaved(layout: Layout, microbatches: int) -> None:
    """Raises DhelixError if `layout` is not an interleaved one, or if there is no micro-batch."""
    if layout.stage_of != tuple(range(layout.stages)) * (layout.chunks // layout.stages):
        raise DhelixError("an interleaved schedule needs chunk c on stage c mod P: make it with interleaved_layout")
    _check_microbatches(microbatches)


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")


def _order(layout: Layout, microbatches: int, stage: int) -> list[Pair]:
    """The work of `stage` in order. Padding micro-batches fill the last group of micro-batches."""
    stages, chunks = layout.stages, layout.chunks_of(stage)
    groups = range(0, microbatches, stages)
    forwards = [(first + m, chunk) for first in groups for chunk in chunks for m in range(stages)]
    backwards = [(first + m, chunk) for first in groups for chunk in reversed(chunks) for m in range(stages)]
    ahead = (len(chunks) - 1) * stages + 2 * (stages - 1 - stage)
    if len(chunks) == 1:
        ahead = stages - 1 - stage
    ahead = min(ahead, len(forwards))
    order: list[Pair] = [(item, None) for item in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [(forward, None), (None, backward)]
    return order + [(None, item) for item in backwards[len(forwards) - ahead :]]
