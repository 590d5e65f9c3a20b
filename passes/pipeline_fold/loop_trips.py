"""How often the executor's loops run, so that the time of its program can be predicted.

    for phase, runs in zip(phases(schedule), trips_of(schedule), strict=True):
        for (pattern, ticks), trips in zip(phase.runs, runs, strict=True):
            trips.forward, trips.backward, trips.both, trips.embed, trips.head, trips.embed_backward

In a schedule that is not lockstep, a stage runs a loop over layers if it has such work in the tick, else zero times.
The same holds for embedding and head (`dhelix.runtime.pipeline.executor`). So the trip counts depend on the stage:

    tick       0    1    2    3    4    5
    stage 0   F0        F1   B0   F2   B1           the step takes as long as the work on its critical path,
    stage 1        F0   B0   F1   B1   F2           which changes stages only where they exchange messages

Counted is the work of the stage that the critical path is on in a tick. Times of forward and backward are 1 and 2, and
stages meet as in `message_times.py`. Ticks that share a place in the program have their mean, rounded so that sums
stay right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dhelix.passes.pipeline_fold.phases import Phase, patterns, phases
from dhelix.passes.pipeline_fold.schedule import Cell, Schedule
from dhelix.passes.pipeline_fold.transfers import Hop

_FORWARD, _BACKWARD, _HEAD = 1.0, 2.0, 0.01  # times of a chunk; the head decides if stages work equally long
_KINDS = ((True, False), (False, True), (True, True))  # forward and backward of the loops over layers


@dataclass(frozen=True)
class Trips:
    """Iterations of loops over layers: with a forward alone, a backward alone, and both; and of embedding and head."""

    forward: int
    backward: int
    both: int
    embed: int
    head: int
    embed_backward: int


def trips_of(schedule: Schedule) -> list[list[Trips]]:
    """For each phase of the schedule, the iterations in each of its runs."""
    places = [_cells(schedule, phase) for phase in phases(schedule)]
    layers = [_Loop.of(schedule, cells, *kind) for runs in places for cells in runs for kind in _KINDS]
    trips, last = iter(_rounded(layers)), schedule.layout.chunks - 1
    return [[Trips(next(trips), next(trips), next(trips), *_ends(cells, last)) for cells in runs] for runs in places]


def _cells(schedule: Schedule, phase: Phase) -> list[list[Cell]]:
    """What the critical path does in each run of a phase, in all of its rounds."""
    stages = _critical_stages(schedule)
    found, place, length = list[list[Cell]](), 0, len(phase.patterns)
    for _, ticks in phase.runs:
        firsts = range(phase.first + place, phase.first + phase.rounds * length, length)
        found.append([schedule.ticks[t][stages[t]] for first in firsts for t in range(first, first + ticks)])
        place += ticks
    return found


@dataclass(frozen=True)
class _Loop:
    """A loop over layers: its mean iterations, and the time of one more iteration at all of its places."""

    mean: float
    time: float

    @classmethod
    def of(cls, schedule: Schedule, cells: Sequence[Cell], forward: bool, backward: bool) -> _Loop:
        share = sum(_has(cell) == (forward, backward) for cell in cells) / len(cells)
        return cls(schedule.layout.padded * share, len(cells) * (_FORWARD * forward + _BACKWARD * backward))


def _rounded(loops: Sequence[_Loop]) -> list[int]:
    """Whole iterations near the means, such that all loops together take about as long as with the means."""
    found = [round(loop.mean) for loop in loops]
    while True:
        missing = sum(loop.time * (loop.mean - trips) for loop, trips in zip(loops, found, strict=True))
        others = [
            math.floor(loop.mean) + math.ceil(loop.mean) - trips for loop, trips in zip(loops, found, strict=True)
        ]
        left = [abs(missing - loop.time * (b - a)) for loop, a, b in zip(loops, found, others, strict=True)]
        best = min(range(len(loops)), key=lambda number: left[number])
        if left[best] >= abs(missing) - 1e-9:
            return found
        found[best] = others[best]


def _ends(cells: Sequence[Cell], last: int) -> tuple[int, int, int]:
    """Iterations of embedding, head, and embedding backward."""

    def mean(yes: Iterable[bool]) -> int:
        return round(sum(yes) / len(cells))

    return (
        mean(cell.forward is not None and cell.forward.chunk == 0 for cell in cells),
        mean(cell.backward is not None and cell.backward.chunk == last for cell in cells),
        mean(cell.backward is not None and cell.backward.chunk == 0 for cell in cells),
    )


@functools.lru_cache(maxsize=4)
def _critical_stages(schedule: Schedule) -> tuple[int, ...]:
    """For each tick, the stage that the step's critical path is on."""
    last, clock = schedule.layout.chunks - 1, [0.0] * schedule.layout.stages
    sources = list[tuple[list[int], list[int]]]()  # of each tick: who decides when a stage begins, and when it ends
    for pattern, cells in zip(patterns(schedule), schedule.ticks, strict=True):
        clock, begins = _met((pattern.activations.before, pattern.cotangents.before), clock)
        clock = [now + _work(cell, last) for now, cell in zip(clock, cells, strict=True)]
        clock, ends = _met((pattern.activations.now, pattern.cotangents.now), clock)
        sources.append((begins, ends))
    stage, found = clock.index(max(clock)), list[int]()
    for begins, ends in reversed(sources):
        found.append(ends[stage])
        stage = begins[ends[stage]]
    return tuple(reversed(found))


def _met(exchanges: Sequence[Sequence[Hop]], clock: Sequence[float]) -> tuple[list[float], list[int]]:
    """The times after exchanges, and for each stage the one whose time it now has."""
    times, sources = list(clock), list(range(len(clock)))
    for ways in exchanges:
        arrived, before = list(times), list(sources)
        for pair in ways:
            later = max(pair, key=lambda stage: arrived[stage])
            for stage in pair:
                if arrived[later] > times[stage]:
                    times[stage], sources[stage] = arrived[later], before[later]
    return times, sources


def _has(cell: Cell) -> tuple[bool, bool]:
    return cell.forward is not None, cell.backward is not None


def _work(cell: Cell, last: int) -> float:
    forward, backward = _has(cell)
    head = cell.backward is not None and cell.backward.chunk == last
    return _FORWARD * forward + _BACKWARD * backward + _HEAD * head
