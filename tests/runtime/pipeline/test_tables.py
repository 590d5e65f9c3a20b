"""Tables of a schedule: replayed tick by tick, they do what the schedule says, and lose no message."""

from typing import Any

import numpy as np
from hypothesis import given, settings

from dhelix.passes.pipeline_fold import Schedule, patterns, scratch
from dhelix.passes.pipeline_fold.transfers import Hop
from dhelix.runtime.pipeline.tables import Direction, directions
from dhelix.tests.passes.pipeline_fold.drawn_schedules import STEPS, make


@settings(max_examples=60)
@given(STEPS)
def test_tables_are_the_schedule(step: Any) -> None:
    schedule = make(step)
    layout, last = schedule.layout, schedule.layout.chunks - 1
    for table, kind, first, final in zip(
        directions(schedule), ("forward", "backward"), (0, last), (last, 0), strict=True
    ):
        for tick, cells in enumerate(schedule.ticks):
            for stage, cell in enumerate(cells):
                work = getattr(cell, kind)
                entry = {name: getattr(table, name)[tick, stage].item() for name in ("on", "opens", "closes", "stays")}
                if work is None:
                    assert not any(entry.values())
                    continue
                reader = work.chunk + (1 if kind == "forward" else -1)
                assert entry == {
                    "on": True,
                    "opens": work.chunk == first,
                    "closes": work.chunk == final,
                    "stays": work.chunk != final and layout.stage_of[reader] == stage,
                }
                assert layout.chunks_of(stage)[table.place[tick, stage]] == work.chunk
                assert table.microbatch[tick, stage] == work.microbatch
                assert table.layers[tick, stage] == len(layout.layers_of(work.chunk))
                assert (table.slot[tick, stage], table.reversed[tick, stage]) == (work.slot, work.reversed)
        if kind == "forward" and schedule.lockstep:
            spoilt = scratch(schedule)
            for tick, stage in zip(*np.nonzero(~table.on), strict=True):
                if spoilt[tick][stage] is not None:
                    assert (table.slot[tick, stage], table.reversed[tick, stage]) == spoilt[tick][stage]


def replay(schedule: Schedule, table: Direction, forward: bool) -> None:
    """Sends messages through inboxes as the executor does. Asserts that each work finds the message that it reads."""
    layout, step = schedule.layout, 1 if forward else -1
    boxes: list[list[Any]] = [[None] * table.inbox for _ in range(layout.stages)]
    late: list[Any] = [None] * layout.stages

    def bring(made: list[Any], ways: tuple[Hop, ...], stays: Any, puts: Any) -> None:
        arrives: list[Any] = [None] * layout.stages  # a permutation brings zeros to stages without a sender
        for sender, receiver in ways:
            arrives[receiver] = made[sender]
        for stage in range(layout.stages):
            boxes[stage][puts[stage]] = made[stage] if stays[stage] else arrives[stage]

    for tick, (cells, pattern) in enumerate(zip(schedule.ticks, patterns(schedule), strict=True)):
        messages = pattern.activations if forward else pattern.cotangents
        made: list[Any] = [None] * layout.stages
        for stage, cell in enumerate(cells):
            work = cell.forward if forward else cell.backward
            if work is None:
                continue
            if not table.opens[tick, stage]:
                assert boxes[stage][table.takes[tick, stage]] == (work.microbatch, work.chunk - step)
            made[stage] = (work.microbatch, work.chunk)
        if messages.before:
            bring(late, messages.before, table.late_stays[tick], table.late_puts[tick])
        if not (pattern.goes_forward if forward else pattern.goes_backward):
            continue
        if messages.late:
            late = made
        else:
            bring(made, messages.now, table.stays[tick], table.puts[tick])


@settings(max_examples=100)
@given(STEPS)
def test_no_message_is_lost_in_an_inbox(step: Any) -> None:
    schedule = make(step)
    forward, backward = directions(schedule)
    replay(schedule, forward, forward=True)
    replay(schedule, backward, forward=False)
    if schedule.name in ("w", "1f1b") or (schedule.name == "interleaved" and schedule.microbatches % step[1] == 0):
        assert forward.inbox == backward.inbox == 1
