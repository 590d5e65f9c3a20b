"""Loops over ticks: each tick holds what it needs, neighbours without messages do not rendezvous, and loops are few."""

from typing import Any

import pytest
from hypothesis import given, settings

from dhelix.passes.pipeline_fold import Pattern, Schedule, patterns, phases, transfers
from dhelix.tests.passes.pipeline_fold.drawn_schedules import STEPS, make


def patterns_by_tick(schedule: Schedule) -> tuple[Pattern, ...]:
    """The pattern of each tick. Checks that phases cover the ticks once and in order."""
    first = 0
    for phase in phases(schedule):
        assert phase.first == first and phase.rounds >= 1
        first += phase.rounds * len(phase.patterns)
    result = patterns(schedule)
    assert first == len(result) == len(schedule.ticks)
    return result


@settings(max_examples=60)
@given(STEPS)
def test_each_tick_runs_what_it_needs(step: Any) -> None:
    schedule = make(step)
    for tick, pattern in enumerate(patterns_by_tick(schedule)):
        cells, last = schedule.ticks[tick], schedule.layout.chunks - 1
        forward = [cell.forward for cell in cells if cell.forward]
        backward = [cell.backward for cell in cells if cell.backward]
        assert pattern.embed or not any(work.chunk == 0 for work in forward)
        assert pattern.embed_backward or not any(work.chunk == 0 for work in backward)
        assert pattern.head or not any(work.chunk == last for work in backward)
        if schedule.lockstep:  # all stages compute it, so it holds nothing that no stage needs
            assert pattern.both == bool(forward and backward)
            assert pattern.forward == bool(forward and not backward)
            assert pattern.backward == bool(backward and not forward)
            assert pattern.head == any(work.chunk == last for work in backward)
        for cell in cells:
            assert pattern.both or not (cell.forward and cell.backward)
            assert pattern.forward or pattern.both or not cell.forward
            assert pattern.backward or pattern.both or not cell.backward
            if not schedule.lockstep:  # a stage with work in one direction needs a loop for that direction alone
                assert pattern.forward or cell.backward or not cell.forward
                assert pattern.backward or cell.forward or not cell.backward
        held = pattern.activations, pattern.cotangents
        for messages, needed in zip(held, transfers(schedule, tick), strict=True):
            assert set(needed) <= set(messages.ways)
            for ways in (messages.ways, messages.before):
                assert len({sender for sender, _ in ways}) == len({receiver for _, receiver in ways}) == len(ways)


@settings(max_examples=60)
@given(STEPS)
def test_what_a_tick_makes_leaves_at_its_end_or_beside_the_next_one(step: Any) -> None:
    schedule = make(step)
    held = patterns_by_tick(schedule)
    for tick, pattern in enumerate(held):
        needed = transfers(schedule, tick)
        for kind, ways in zip(("activations", "cotangents"), needed, strict=True):
            messages = getattr(pattern, kind)
            if messages.late:
                assert not schedule.lockstep
                assert set(ways) <= set(getattr(held[tick + 1], kind).before) if ways else True
                goes = held[tick + 1].goes_forward if kind == "activations" else held[tick + 1].goes_backward
                assert not (ways and goes)


@pytest.mark.parametrize("microbatches", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_loops_of_w(stages: int, microbatches: int) -> None:
    """Warm-up, steady phase and cool-down have the right lengths; more micro-batches do not make more loops."""
    schedule = make(("w", stages, microbatches, 0, 2))
    patterns = patterns_by_tick(schedule)
    kinds = ["both" if p.both else "forward" if p.forward else "backward" for p in patterns]
    steady = 2 * microbatches - 2
    assert kinds == ["forward"] * 2 * stages + ["both"] * steady + ["backward"] * 2 * stages
    assert sum(p.head for p in patterns) == microbatches
    assert len(phases(schedule)) <= 10


@pytest.mark.parametrize("groups", [1, 2, 4, 16])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 4), (4, 2), (8, 2), (8, 4)])
def test_the_loops_of_interleaved_si(stages: int, chunks: int, groups: int) -> None:
    """The head runs only when a stage needs it, and the number of bodies does not grow with micro-batches."""
    schedule = make(("interleaved_si", stages, groups * stages, 0, chunks))
    held = patterns_by_tick(schedule)
    kinds = ["both" if p.both else "forward" if p.forward else "backward" for p in held]
    steady = chunks * (groups - 1) * stages + stages - 1
    assert kinds == ["forward"] * chunks * stages + ["both"] * steady + ["backward"] * chunks * stages
    assert sum(p.head for p in held) == groups * stages
    assert sum(len(phase.runs) for phase in phases(schedule)) <= 13


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_neighbours_under_1f1b_meet_every_other_tick(stages: int) -> None:
    held = patterns(make(("1f1b", stages, 16, 0, 2)))
    for tick, pattern in enumerate(held):
        first = range(tick % 2, stages - 1, 2)
        assert pattern.activations.now == tuple((stage, stage + 1) for stage in first)
        assert pattern.cotangents.now == tuple((stage + 1, stage) for stage in first)
        assert not pattern.activations.before and not pattern.cotangents.before


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_under_interleaved_1f1b_all_go_the_same_way_and_messages_travel_meanwhile(stages: int) -> None:
    schedule = make(("interleaved", stages, 6 * stages, 0, 2))
    assert not any(pattern.goes_forward and pattern.goes_backward for pattern in patterns(schedule))
    steady = max(phases(schedule), key=lambda phase: phase.rounds * len(phase.patterns))
    assert sorted((pattern.forward, pattern.backward) for pattern in steady.patterns) == [(False, True), (True, False)]
    for pattern in steady.patterns:  # each of the two patterns receives what the other one made
        made, comes = (pattern.activations, pattern.cotangents)[:: 1 if pattern.forward else -1]
        assert made.late and len(made.ways) == len(comes.before) == stages
    assert len(phases(schedule)) <= 6
