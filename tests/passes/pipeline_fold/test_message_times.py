"""Steps whose messages are rendezvous: which schedules lose no time, and what waiting costs, worked out by hand."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.passes.pipeline_fold import (
    SCHEDULES,
    PipelineCosts,
    Schedule,
    evaluate,
    interleaved_layout,
    layout_of,
    linear_layout,
    make_schedule,
)
from dhelix.passes.pipeline_fold.schedules.one_forward_one_backward import one_forward_one_backward
from dhelix.passes.pipeline_fold.slots import with_slots
from dhelix.passes.pipeline_fold.ticks import in_ticks

stage_counts = st.integers(1, 6)
times = st.fractions(Fraction(1, 3), 5, max_denominator=6)
OWN = PipelineCosts(1, 2, shared_ends=False)


def step(schedule: Schedule, costs: PipelineCosts, **how: Any) -> Fraction:
    return evaluate(schedule, costs, **how).step_time


def both(schedule: Schedule, costs: PipelineCosts) -> tuple[Fraction, Fraction]:
    """Step times with buffered messages, and with rendezvous."""
    return step(schedule, costs), step(schedule, costs, meetings=True)


@settings(max_examples=40)
@given(stage_counts, st.integers(1, 20), times, times)
def test_1f1b_waits_for_nothing_but_its_messages(
    stages: int, microbatches: int, forward: Fraction, backward: Fraction
) -> None:
    schedule = one_forward_one_backward(linear_layout(2 * stages, stages), microbatches)
    buffered, met = both(schedule, PipelineCosts(forward, backward))
    assert met == buffered == 2 * (microbatches + stages - 1) * (forward + backward)


@settings(max_examples=40)
@given(stage_counts, st.integers(1, 4), st.integers(2, 3), times, times)
def test_nor_does_interleaved_1f1b(
    stages: int, groups: int, chunks: int, forward: Fraction, backward: Fraction
) -> None:
    layout = interleaved_layout(chunks * stages, stages, chunks)
    schedule = make_schedule("interleaved", layout, groups * stages)
    buffered, met = both(schedule, PipelineCosts(forward, backward))
    assert met == buffered == (chunks * groups * stages + stages - 1) * (forward + backward)


@settings(max_examples=30)
@given(st.sampled_from(SCHEDULES), stage_counts, st.integers(1, 12), times, st.booleans(), st.booleans())
def test_meetings_never_make_a_step_shorter(
    name: str, stages: int, microbatches: int, send: Fraction, shared: bool, beside: bool
) -> None:
    schedule = make_schedule(name, layout_of(name, 2 * stages, stages), microbatches)
    costs = replace(OWN, embedding=1, head=2, send=send, shared_ends=shared)
    met, beside_met = (step(schedule, costs, meetings=True, sends_beside=each) for each in (False, True))
    assert met >= evaluate(schedule, costs).ideal_time
    assert beside_met <= met
    if name == "w":
        assert met == beside_met == step(schedule, costs)


def test_a_forward_that_meets_a_backward_each_tick_takes_as_long_as_that() -> None:
    """Interleaved 1F1B with every cell as early as possible has forward next to backward in the whole steady phase."""
    layout, microbatches = interleaved_layout(4, 2, 2), 16
    turns = make_schedule("interleaved", layout, microbatches)
    orders = [
        [
            (cell.forward and _item(cell.forward), cell.backward and _item(cell.backward))
            for cell in (tick[stage] for tick in turns.ticks)
            if cell.forward or cell.backward
        ]
        for stage in range(2)
    ]
    early = with_slots("interleaved", layout, microbatches, in_ticks(layout, orders), lockstep=False)
    buffered, met = both(early, OWN)
    assert both(turns, OWN) == (buffered, buffered) == (33 * 3, 33 * 3)
    assert met > 1.2 * buffered


def _item(work: Any) -> tuple[int, int]:
    return work.microbatch, work.chunk


def test_sends_are_waited_for_or_go_on_beside_the_next_tick() -> None:
    late = replace(OWN, send=Fraction(1, 2))
    schedule = make_schedule("interleaved", interleaved_layout(4, 2, 2), 16)
    waited, beside = (step(schedule, late, meetings=True, sends_beside=each) for each in (False, True))
    # Every tick sends. With `sends_beside`, fewer than eight sends do not overlap with the next tick.
    assert waited == 33 * 3 + len(schedule.ticks) * late.send
    assert beside < 33 * 3 + 8 * late.send


@pytest.mark.parametrize(("name", "ticks"), [("1f1b", 2 * 16), ("interleaved", 0)])
def test_shared_ends_join_all_stages(name: str, ticks: int) -> None:
    """Under 1F1B, a forward then waits for a backward. If all stages run the same direction, this costs nothing."""
    schedule = make_schedule(name, layout_of(name, 4, 2), 16)
    tiny = replace(OWN, head=Fraction(1, 1000), shared_ends=True)
    chunk = schedule.layout.padded
    lost = step(schedule, tiny, meetings=True) - step(schedule, OWN, meetings=True)
    assert lost == pytest.approx(chunk * ticks / 2 * (2 - 1), abs=2.1)
