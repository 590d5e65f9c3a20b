"""1F1B, interleaved 1F1B and DualPipeV, and how orders of work become ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import (
    LOCKSTEP,
    SCHEDULES,
    Schedule,
    fold_layout,
    interleaved_layout,
    layout_of,
    linear_layout,
    make_schedule,
    validate,
)
from dhelix.passes.pipeline_fold.ticks import Pair, in_ticks

stage_counts = st.integers(1, 6)
microbatch_counts = st.integers(1, 20)


def _order(schedule: Schedule, stage: int) -> str:
    """The work of a stage: "F0.1" is micro-batch 0, chunk 1 forward; "+" joins the work that one cell co-executes."""
    cells = (tick[stage] for tick in schedule.ticks)
    names = (
        "+".join(
            f"{letter}{work.microbatch}.{work.chunk}"
            for letter, work in (("F", cell.forward), ("B", cell.backward))
            if work is not None
        )
        for cell in cells
    )
    return " ".join(name for name in names if name)


@given(st.sampled_from(SCHEDULES), stage_counts, microbatch_counts, st.integers(2, 3), st.integers(0, 7))
def test_every_schedule_is_valid(name: str, stages: int, microbatches: int, chunks_per_stage: int, more: int) -> None:
    layers = stages * max(2, chunks_per_stage) + more
    schedule = make_schedule(name, layout_of(name, layers, stages, chunks_per_stage), microbatches)
    validate(schedule)
    assert schedule.name == name
    assert schedule.lockstep == (name in LOCKSTEP)


@given(stage_counts, microbatch_counts)
def test_1f1b_keeps_as_many_microbatches_as_stages_lie_behind(stages: int, microbatches: int) -> None:
    schedule = make_schedule("1f1b", linear_layout(stages, stages), microbatches)
    assert len(schedule.ticks) == 2 * (microbatches + stages - 1)
    assert schedule.slots == min(stages, microbatches)
    for stage in range(stages):
        live = peak = 0
        for tick in schedule.ticks:
            live += (tick[stage].forward is not None) - (tick[stage].backward is not None)
            peak = max(peak, live)
        assert peak == min(stages - stage, microbatches)


def test_1f1b_alternates() -> None:
    schedule = make_schedule("1f1b", linear_layout(3, 3), 4)
    assert [_order(schedule, stage).replace(f".{stage}", "") for stage in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_goes_through_the_chunks_in_groups_of_as_many_microbatches_as_stages() -> None:
    schedule = make_schedule("interleaved", interleaved_layout(4, 2, 2), 4)
    assert _order(schedule, 0) == ("F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0")
    assert _order(schedule, 1) == ("F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1")


@given(stage_counts, st.integers(1, 4), st.integers(2, 3))
def test_interleaved_wastes_no_tick_when_stages_divide_microbatches(stages: int, groups: int, chunks: int) -> None:
    schedule = make_schedule("interleaved", interleaved_layout(chunks * stages, stages, chunks), groups * stages)
    assert len(schedule.ticks) == 2 * chunks * groups * stages + 2 * (stages - 1)


def test_dual_pipe_v_by_hand() -> None:
    schedule = make_schedule("dualpipev", fold_layout(4, 2), 5)
    assert _order(schedule, 0) == (
        "F0.0 F1.0 F2.0 F0.3 B0.3 F1.3 F3.0+B1.3 F2.3+B0.0 F4.0+B2.3 F3.3+B1.0 B3.3 F4.3+B2.0 B4.3 B3.0 B4.0"
    )
    assert _order(schedule, 1) == (
        "F0.1 F0.2 F1.1 F1.2 F2.1 B0.2 F2.2+B0.1 F3.1+B1.2 F3.2+B1.1 F4.1+B2.2 F4.2+B2.1 B3.2 B3.1 B4.2 B4.1"
    )


@given(st.integers(2, 6), st.integers(0, 12))
def test_dual_pipe_v_holds_a_chunk_more_than_w(stages: int, more: int) -> None:
    schedule = make_schedule("dualpipev", fold_layout(2 * stages, stages), 2 * stages + more)
    assert schedule.slots == 2 * stages + 1


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("1f1b", fold_layout(8, 2), "linear_layout"),
        ("interleaved", fold_layout(8, 2), "interleaved_layout"),
        ("dualpipev", linear_layout(8, 2), "fold_layout"),
        ("w", interleaved_layout(8, 2, 2), "fold_layout"),
        ("gpipe", linear_layout(8, 2), "take one of w, interleaved_si, 1f1b, interleaved, dualpipev"),
    ],
)
def test_another_layout_is_refused(name: str, layout, says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        make_schedule(name, layout, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_microbatch_is_refused(name: str) -> None:
    with pytest.raises(DhelixError, match="0 micro-batches"):
        make_schedule(name, layout_of(name, 8, 2), 0)


def test_stages_that_wait_for_one_another_are_refused() -> None:
    orders = [[((0, 0), None), (None, (0, 0))], [(None, (0, 1)), ((0, 1), None)]]
    with pytest.raises(DhelixError, match="deadlock in tick 1"):
        in_ticks(linear_layout(2, 2), orders)


def test_two_messages_of_a_kind_arrive_one_after_the_other() -> None:
    # Chunk 0 of micro-batch 1 and chunk 2 of micro-batch 0 could run at once; both send to stage 1.
    layout = fold_layout(6, 3)
    orders = [
        [((0, 0), None), ((1, 0), None), ((2, 0), None), ((3, 0), None)],
        [((0, 1), None), ((1, 1), None), ((0, 4), None)],
        [((0, 2), None), ((0, 3), None)],
    ]
    timetable = in_ticks(layout, orders)
    assert [row[0][0] for row in timetable] == [(0, 0), (1, 0), (2, 0), None, (3, 0), None][: len(timetable)]


def test_forward_and_backward_by_turns() -> None:
    forward, backward = ([way(m, stage) for stage in (0, 1) for m in range(4)] for way in (_ahead, _behind))
    first = [*forward[:3], backward[0], forward[3], backward[1]]
    second = [pair for m in range(3) for pair in (forward[4 + m], backward[4 + m])]
    timetable = in_ticks(linear_layout(2, 2), [first, second], one_way=True)
    assert [[_letters(pair) for pair in column] for column in zip(*timetable, strict=True)] == [
        ["F0", "F1", "", "F2", "B0", "F3", "B1"],
        ["", "F0", "B0", "F1", "B1", "F2", "B2"],
    ]


@given(stage_counts, microbatch_counts, st.integers(2, 3))
def test_interleaved_goes_one_way_in_each_tick(stages: int, microbatches: int, chunks: int) -> None:
    schedule = make_schedule("interleaved", interleaved_layout(chunks * stages, stages, chunks), microbatches)
    for tick in schedule.ticks:
        assert not (any(cell.forward for cell in tick) and any(cell.backward for cell in tick))


def _ahead(microbatch: int, chunk: int) -> Pair:
    return (microbatch, chunk), None


def _behind(microbatch: int, chunk: int) -> Pair:
    return None, (microbatch, chunk)


def _letters(pair: Pair) -> str:
    return "".join(f"{letter}{item[0]}" for letter, item in zip("FB", pair, strict=True) if item is not None)
