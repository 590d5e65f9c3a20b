"""DualPipeV, the V variant of DualPipe on the folded layout: co-executes forward and backward of opposite direction.

Each stage holds chunk d, "down", and chunk 2P - 1 - d, "up". Stage d runs, in order,

    1   2 (P - 1 - d)       times   F down
    2   d + 1               times   F down, F up
    3   P - 1 - d           times   B up, F up
    4   M - 2P + d + 1      times   F down with B up, F up with B down       co-executed
    5   P - 1 - d           times   B up, F up with B down                   the second co-executed
    6   d + 1               times   B up, B down
    7   P - 1 - d           times   B down

In the first round of step 4, the last stage runs F down and B up separately, which shortens the bubble. The original
splits some backwards into gradients of inputs and of weights, and fills bubbles with the latter. Our backward computes
both at once, so these bubbles stay. A step with fewer than 2P micro-batches uses the schedule for 2P without the
missing ones.

Compared with the W schedule: the layout is the same, and forward and backward are co-executed as well, but they cross
the stages in opposite directions. The bubble is shorter. Residuals need one chunk more. The schedule is not lockstep:
one stage may co-execute while another goes one way only, so the program needs branches.

Source: DeepSeek-AI's DualPipe, `dualpipev.py`; Sea AI Lab's "cut in half" of DualPipe.
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
    """The work of `stage`: `_steps` with micro-batch numbers and chunks."""
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
    """Yields what a stage does in each cell: (forward, backward), each DOWN, UP or None if it does not take place.

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
