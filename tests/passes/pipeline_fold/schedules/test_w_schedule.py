"""The W schedule: its ticks, its residual slots, and where masked work may write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import Schedule, fold_layout, linear_layout, scratch, transfers, validate, w_schedule

stage_counts = st.integers(1, 8)
microbatch_counts = st.integers(1, 24)


def _live_slots(schedule: Schedule, stage: int) -> list[set[int]]:
    """For each tick, the slots that are live when the tick begins: a later tick still reads them."""
    live, held = [], set[int]()
    for tick in schedule.ticks:
        live.append(set(held))
        forward, backward = tick[stage].forward, tick[stage].backward
        if backward is not None:
            held.remove(backward.slot)
        if forward is not None:
            held.add(forward.slot)
    return live


@given(stage_counts, microbatch_counts, st.integers(0, 5), st.booleans())
def test_is_valid_with_uneven_layers_too(stages: int, microbatches: int, more: int, reuse: bool) -> None:
    schedule = w_schedule(fold_layout(2 * stages + more, stages), microbatches, reuse_within_tick=reuse)
    validate(schedule)
    assert len(schedule.ticks) == 2 * microbatches + 4 * stages - 2
    assert schedule.slots <= 2 * stages + (not reuse)
    if microbatches >= stages + (not reuse):
        assert schedule.slots == 2 * stages + (not reuse)


@given(stage_counts, microbatch_counts)
def test_ticks_follow_the_formula(stages: int, microbatches: int) -> None:
    schedule = w_schedule(fold_layout(2 * stages, stages), microbatches)
    for tick, cells in enumerate(schedule.ticks):
        for cell in cells:
            if cell.forward is not None:
                assert tick == 2 * cell.forward.microbatch + cell.forward.chunk
            if cell.backward is not None:
                assert tick == 2 * cell.backward.microbatch + 4 * stages - 1 - cell.backward.chunk


@given(stage_counts, st.integers(1, 12))
def test_in_the_steady_phase_every_stage_co_executes_and_hands_its_slot_over(stages: int, more: int) -> None:
    microbatches = 2 * stages + more
    schedule = w_schedule(fold_layout(2 * stages, stages), microbatches)
    for cells in schedule.ticks[4 * stages - 2 : 2 * microbatches]:
        for cell in cells:
            assert cell.forward is not None and cell.backward is not None
            assert cell.forward.microbatch != cell.backward.microbatch
            assert cell.forward.slot == cell.backward.slot
            assert cell.forward.reversed is not cell.backward.reversed


@given(stage_counts, microbatch_counts)
def test_both_strands_move_the_same_way(stages: int, microbatches: int) -> None:
    schedule = w_schedule(fold_layout(2 * stages, stages), microbatches)
    for tick, cells in enumerate(schedule.ticks):
        hops = sum(transfers(schedule, tick), [])
        for sender, receiver in hops:
            assert receiver - sender == (1 if (tick + sender) % 2 == 0 else -1)
        assert len(hops) <= 2 * len(cells)


@given(stage_counts, microbatch_counts, st.booleans())
def test_masked_work_spoils_nothing(stages: int, microbatches: int, reuse: bool) -> None:
    schedule = w_schedule(fold_layout(2 * stages, stages), microbatches, reuse_within_tick=reuse)
    places = scratch(schedule)
    for stage in range(stages):
        for tick, live in enumerate(_live_slots(schedule, stage)):
            cells, place = schedule.ticks[tick], places[tick][stage]
            masked = cells[stage].forward is None and any(cell.forward is not None for cell in cells)
            assert (place is not None) == masked
            if place is None:
                continue
            slot, reversed_ = place
            assert 0 <= slot < schedule.slots
            ends = cells[stage].backward
            if slot in live:
                assert reuse and ends is not None and slot == ends.slot and reversed_ is not ends.reversed


def test_residuals_are_the_same_on_every_stage() -> None:
    schedule = w_schedule(fold_layout(8, 4), 12)
    for stage in range(4):
        assert max(len(live) for live in _live_slots(schedule, stage)) == schedule.slots == 8


def test_what_it_refuses() -> None:
    with pytest.raises(DhelixError, match="fold_layout"):
        w_schedule(linear_layout(8, 4), 4)
    with pytest.raises(DhelixError, match="0 micro-batches"):
        w_schedule(fold_layout(8, 4), 0)
