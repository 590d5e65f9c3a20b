"""DualPipeV, the V variant of DualPipe on the folded layout.

A stage co-executes a forward and a backward that cross the stages in opposite directions.

Stage d of P stages holds chunk d ("down") and chunk 2P - 1 - d ("up"). F is a forward, and B is a backward. With M
micro-batches, stage d runs, in this order:

    1   2 (P - 1 - d)       times   F down
    2   d + 1               times   F down, F up
    3   P - 1 - d           times   B up, F up
    4   M - 2P + d + 1      times   F down with B up, F up with B down       co-executed
    5   P - 1 - d           times   B up, F up with B down                   the second co-executed
    6   d + 1               times   B up, B down
    7   P - 1 - d           times   B down

In the first round of step 4, the last stage runs F down and B up separately. This shortens the bubble. The original
schedule splits some backwards into gradients of inputs and gradients of weights, and fills bubbles with gradients of
weights. The backward of dhelix computes both at once, so these bubbles stay. A training step with fewer than 2P
micro-batches uses the schedule for 2P micro-batches, without the missing micro-batches.

The W schedule has the same layout and co-executes a forward and a backward, too. In the W schedule, the two cross the
stages in the same direction. The bubble of DualPipeV is shorter, but a stage holds the residuals of one chunk more.
DualPipeV is not lockstep: one stage may co-execute while another stage runs only a forward or only a backward. So the
program needs branches.

Sources: `dualpipev.py` in DeepSeek-AI's DualPipe, and the "cut in half" version of DualPipe by Sea AI Lab.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import check_folded
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.slots import with_slots
from dhelix.passes.pipeline_fold.ticks import Pair, in_ticks, of_first

DOWN, UP = 0, 1


def dual_pipe_v(layout: Layout, microbatches: int) -> Schedule:
    """DualPipeV on a folded layout (`layouts.fold_layout`). Raises DhelixError on another layout or no micro-batch."""
    check_folded(layout)
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")
    made_for = max(microbatches, 2 * layout.stages)
    orders = [_order(layout.stages, made_for, stage) for stage in range(layout.stages)]
    timetable = in_ticks(layout, of_first(microbatches, orders))
    return with_slots("dualpipev", layout, microbatches, timetable, lockstep=False)


def _order(stages: int, microbatches: int, stage: int) -> list[Pair]:
    """The work of `stage` in order: the cells of `_steps`, as pairs (micro-batch, chunk)."""
    chunks = (stage, 2 * stages - 1 - stage)
    forwards, backwards = ([count(), count()] for _ in range(2))
    return [
        (
            None if forward is None else (next(forwards[forward]), chunks[forward]),
            None if backward is None else (next(backwards[backward]), chunks[backward]),
        )
        for forward, backward in _steps(stages, microbatches, stage)
    ]


def _steps(stages: int, microbatches: int, stage: int) -> Iterator[tuple[int | None, int | None]]:
    """Yields each cell of a stage as (forward, backward). Each of them is the chunk, DOWN or UP, or None for no work.

    Comments number the steps as in the module's docstring.
    """
    behind = stages - 1 - stage
    yield from [(DOWN, None)] * (2 * behind)  # 1
    yield from [(DOWN, None), (UP, None)] * (stage + 1)  # 2
    yield from [(None, UP), (UP, None)] * behind  # 3
    rounds = microbatches - 2 * stages + stage + 1
    first = [(DOWN, None), (None, UP)] if behind == 0 else [(DOWN, UP)]
    yield from [*first, (UP, DOWN)]  # 4
    yield from [(DOWN, UP), (UP, DOWN)] * (rounds - 1)
    yield from [(None, UP), (UP, DOWN)] * behind  # 5
    yield from [(None, UP), (None, DOWN)] * (stage + 1)  # 6
    yield from [(None, DOWN)] * behind  # 7
