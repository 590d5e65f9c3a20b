"""Loops of the executor run as often as the critical path of the schedule says."""

from __future__ import annotations

import pytest

from dhelix.passes.pipeline_fold import LOCKSTEP, SCHEDULES, PipelineCosts, evaluate, layout_of, make_schedule
from dhelix.passes.pipeline_fold.loop_trips import trips_of
from dhelix.passes.pipeline_fold.phases import phases


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in LOCKSTEP])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 16), (4, 8), (4, 32)])
def test_the_loops_take_as_long_as_the_schedule(name: str, stages: int, microbatches: int) -> None:
    """With forward 1 and backward 2, `evaluate` says how long a step takes in which stages meet at messages."""
    schedule = make_schedule(name, layout_of(name, 64, stages), microbatches)
    layers = 0
    for phase, runs in zip(phases(schedule), trips_of(schedule), strict=True):
        for (_, ticks), trips in zip(phase.runs, runs, strict=True):
            layers += phase.rounds * ticks * (trips.forward + 2 * trips.backward + 3 * trips.both)
    exact = float(evaluate(schedule, PipelineCosts(1, 2), meetings=True).step_time)
    assert layers == pytest.approx(exact, rel=0.06)  # trips are whole numbers


def test_one_stage_computes_each_end_once_a_microbatch() -> None:
    schedule = make_schedule("1f1b", layout_of("1f1b", 8, 2), 8)
    heads = sum(
        phase.rounds * ticks * trips.head
        for phase, runs in zip(phases(schedule), trips_of(schedule), strict=True)
        for (_, ticks), trips in zip(phase.runs, runs, strict=True)
    )
    assert 8 <= heads <= 9  # the loop of all ticks has one round more
