"""Validation: the errors that it finds in a schedule, and the places that it names."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import (
    LOCKSTEP,
    SCHEDULES,
    Cell,
    Layout,
    Schedule,
    Work,
    fold_layout,
    layout_of,
    linear_layout,
    make_schedule,
    validate,
    w_schedule,
)
from dhelix.passes.pipeline_fold.slots import Item, with_slots

W = w_schedule(fold_layout(4, 2), 5)
Change = Callable[[Cell], Cell]


def _changed(schedule: Schedule, tick: int, stage: int, change: Change) -> Schedule:
    ticks = [list(cells) for cells in schedule.ticks]
    ticks[tick][stage] = change(ticks[tick][stage])
    return replace(schedule, ticks=tuple(tuple(cells) for cells in ticks))


def _with(work: Work | None, **fields: int) -> Work:
    assert work is not None
    return replace(work, **fields)


def _forward(**fields: int) -> Change:
    return lambda cell: replace(cell, forward=_with(cell.forward, **fields))


def _backward(**fields: int) -> Change:
    return lambda cell: replace(cell, backward=_with(cell.backward, **fields))


@pytest.mark.parametrize(
    ("tick", "stage", "change", "says"),
    [
        (0, 0, lambda cell: Cell(), "stage 0: forward of micro-batch 0, chunk 0 is missing"),
        (13, 0, lambda cell: Cell(), "stage 0: backward of micro-batch 3, chunk 0 is missing"),
        (2, 0, _forward(microbatch=0), "tick 2, stage 0: forward of micro-batch 0, chunk 0: already done in tick 0"),
        (2, 0, _forward(microbatch=5), "there are 5 micro-batches and 4 chunks"),
        (2, 0, _forward(chunk=1), "tick 2, stage 0: forward of micro-batch 1, chunk 1: the chunk is on stage 1"),
        (2, 0, _forward(slot=4), "tick 2, stage 0: forward of micro-batch 1, chunk 0: slot 4 is not one of the 4"),
        (2, 0, _forward(slot=0), "slot 0 still holds micro-batch 0, chunk 0"),
        (4, 0, _backward(slot=3), "tick 4, stage 0: backward of micro-batch 0, chunk 3: slot 3 is empty"),
        (4, 0, _backward(slot=1), "slot 1 holds micro-batch 1, chunk 0"),
        (4, 0, _backward(reversed=True), "slot 2 is stored in the other order"),
        (7, 0, lambda cell: Cell(replace(cell.forward, reversed=cell.backward.reversed), cell.backward), "flip"),
    ],
)
def test_what_is_wrong_in_a_cell(tick: int, stage: int, change: Change, says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        validate(_changed(W, tick, stage, change))


def _by_hand(layout: Layout, *ticks: tuple[Cell, ...], slots: int = 4, lockstep: bool = False) -> Schedule:
    return Schedule("by hand", layout, 1, ticks, slots, lockstep)


def test_results_are_read_in_a_later_tick() -> None:
    down, up = Work(0, 0, 0), Work(0, 1, 0)
    idle, layout = Cell(), linear_layout(2, 2)
    good = [(Cell(down), idle), (idle, Cell(up)), (idle, Cell(None, up)), (Cell(None, down), idle)]
    validate(_by_hand(layout, *good))
    with pytest.raises(DhelixError, match="tick 0, stage 1: forward of .* chunk 1: its input is made in tick 0"):
        validate(_by_hand(layout, (Cell(down), Cell(up)), *good[2:]))
    with pytest.raises(DhelixError, match="tick 2, stage 0: backward of .* chunk 0: its input is made in tick 2"):
        validate(_by_hand(layout, *good[:2], (Cell(None, down), Cell(None, up))))
    with pytest.raises(DhelixError, match="tick 1, stage 1: backward of .* chunk 1: its input is made in tick 1"):
        validate(_by_hand(layout, good[0], (idle, Cell(up, up)), good[3]))


def test_chunks_of_one_stage_depend_on_one_another_too() -> None:
    first, second = Work(0, 0, 0), Work(0, 1, 1)
    layout = fold_layout(2, 1)
    ticks = [(Cell(first),), (Cell(second),), (Cell(None, second),), (Cell(None, first),)]
    validate(_by_hand(layout, *ticks))
    with pytest.raises(DhelixError, match="tick 0, stage 0: .* chunk 1: its input is made in tick 1"):
        validate(_by_hand(layout, ticks[1], ticks[0], *ticks[2:]))


def test_a_stage_gets_one_message_of_a_kind() -> None:
    # Chunk 0 of micro-batch 1, on stage 0, and chunk 3 of micro-batch 0, on stage 2, both send to stage 1.
    layout = fold_layout(6, 3)
    before, after = [[(0, 0)], [(0, 1)], [(0, 2)]], [[(0, 4)], [(0, 5)], *([(1, chunk)] for chunk in range(1, 6))]

    def schedule(*between: list[Item]) -> Schedule:
        forward = [[(item, None) for item in _by_stage(layout, row)] for row in (*before, *between, *after)]
        order = [(microbatch, chunk) for microbatch in range(2) for chunk in reversed(range(6))]
        backward = [[(None, mine) for mine in _by_stage(layout, [item])] for item in order]
        return with_slots("by hand", layout, 2, [*forward, *backward], lockstep=False)

    validate(schedule([(1, 0)], [(0, 3)]))
    with pytest.raises(DhelixError, match="tick 3, stage 1: receives two activations"):
        validate(schedule([(1, 0), (0, 3)]))


def _by_stage(layout: Layout, items: list[Item]) -> list[Item | None]:
    return [next((item for item in items if layout.stage_of[item[1]] == s), None) for s in range(layout.stages)]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(2, (1, 1, 1, 1), (0, 0, 0, 1)), "stage 0 holds 3 of 4 chunks"),
        (Layout(2, (1, 3), (0, 1)), "differ by at most 1"),
        (Layout(2, (1, 0), (0, 1)), "at least 1"),
        (Layout(2, (1,), (0, 1)), "1 chunk lengths for 2 chunks"),
    ],
)
def test_what_is_wrong_with_a_layout(layout: Layout, says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        validate(_by_hand(layout))


def test_every_stage_has_a_cell() -> None:
    with pytest.raises(DhelixError, match="tick 1: 1 cells for 2 stages"):
        validate(replace(W, ticks=(W.ticks[0], W.ticks[1][:1], *W.ticks[2:])))


def test_lockstep_is_said_of_lockstep_alone() -> None:
    validate(replace(W, lockstep=False))
    for name in set(SCHEDULES) - set(LOCKSTEP):
        schedule = make_schedule(name, layout_of(name, 8, 2), 8)
        with pytest.raises(DhelixError, match="lockstep"):
            validate(replace(schedule, lockstep=True))


def test_lockstep_needs_a_slot_for_masked_work() -> None:
    layout = fold_layout(4, 2)
    small = w_schedule(layout, 1)
    assert small.slots == 3
    with pytest.raises(DhelixError, match="tick 3, stage 1: no slot is free for the masked forward"):
        validate(replace(small, slots=2))


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 9), st.data())
def test_no_cell_can_be_left_out_or_done_twice(name: str, stages: int, microbatches: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, layout_of(name, 2 * stages, stages), microbatches)
    busy = [(t, s) for t, cells in enumerate(schedule.ticks) for s, cell in enumerate(cells) if cell != Cell()]
    tick, stage = data.draw(st.sampled_from(busy))
    with pytest.raises(DhelixError, match="is missing"):
        validate(_changed(schedule, tick, stage, lambda cell: Cell()))
    twice = replace(schedule, ticks=(*schedule.ticks, schedule.ticks[tick]))
    with pytest.raises(DhelixError, match="already done in tick"):
        validate(twice)
