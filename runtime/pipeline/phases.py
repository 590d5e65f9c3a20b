"""A schedule as a program reads it: tables by tick and stage, and loops over ticks that look alike.

    ticks of W, P = 2, M = 4      0 1 2 3 | 4 5 6 7 8 9 | 10 | 11 12 13
    goes                             F    |  F and B    |  B |    B
    phase                          loop   |    loop     |    |  loop + 1      (the head belongs to ticks 4, 6, 8 and 10)

A phase is a loop whose body holds `period` ticks. In its ticks of one place in the body every stage does the same kind
of work, and messages travel the same ways: one collective-permute, over the ways of all of them together. So each
phase costs what its ticks cost: a warm-up tick computes no backward pass, and only ticks that need the head hold it.

What arrives before it is needed waits in the stage's inbox; places are given out here, one for W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dhelix.passes.pipeline_fold import Schedule, Work, scratch, transfers

LONGEST_PERIOD = 4


@dataclass(frozen=True)
class Direction:
    """What each stage does in one direction, int32[ticks, stages] or bool[ticks, stages].

    Attributes:
      on: whether it does anything.
      microbatch, place: which one, of which of its chunks.
      layers: how many of the chunk's layers are no padding.
      slot, reversed: where the residuals lie; for a masked forward, where it may write.
      takes: the inbox's place that what it starts from lies at.
      opens: whether it starts from no message: the embedding's result, or the head's cotangent.
      closes: whether its result is no message but the head's input, or the embedding's cotangent.
      stays: whether its result is for the stage itself.
      puts: the inbox's place for what the tick brings.
      inbox: how many places there are.
    """

    on: np.ndarray
    microbatch: np.ndarray
    place: np.ndarray
    layers: np.ndarray
    slot: np.ndarray
    reversed: np.ndarray
    takes: np.ndarray
    opens: np.ndarray
    closes: np.ndarray
    stays: np.ndarray
    puts: np.ndarray
    inbox: int


@dataclass(frozen=True)
class Pattern:
    """What the ticks at one place of a phase's body hold. Sends are (from stage, to stage) pairs."""

    forward: bool
    backward: bool
    both: bool
    embed: bool
    head: bool
    embed_backward: bool
    activations: tuple[tuple[int, int], ...]
    cotangents: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Phase:
    """`rounds` times the ticks of `patterns`, from tick `first` on."""

    first: int
    rounds: int
    patterns: tuple[Pattern, ...]


def directions(schedule: Schedule) -> tuple[Direction, Direction]:
    """The tables of the forward and of the backward direction."""
    return _direction(schedule, forward=True), _direction(schedule, forward=False)


def phases(schedule: Schedule) -> tuple[Phase, ...]:
    """The schedule's ticks, in order, as few loops."""
    ticks = [_pattern(schedule, tick) for tick in range(len(schedule.ticks))]
    result, first = [], 0
    while first < len(ticks):
        end = first + 1
        while end < len(ticks) and (not schedule.lockstep or _kind(ticks[end]) == _kind(ticks[first])):
            end += 1
        for phase in _loops(ticks, first, end, schedule.lockstep):
            result.append(phase)
        first = end
    return tuple(result)


def _loops(ticks: Sequence[Pattern], first: int, end: int, lockstep: bool) -> Iterator[Phase]:
    while first < end:
        candidates = [_longest(ticks[first:end], period, lockstep) for period in range(1, LONGEST_PERIOD + 1)]
        worth = [_worth(ticks[first:], body, rounds, lockstep) for body, rounds in candidates]
        body, rounds = candidates[worth.index(max(worth))]
        if rounds == 1:
            body = body[:1]
        yield Phase(first, rounds, tuple(body))
        first += rounds * len(body)


def _worth(ticks: Sequence[Pattern], body: Sequence[Pattern], rounds: int, lockstep: bool) -> float:
    """Ticks that the loop saves compiling; in a schedule that is not lockstep, less the sends that it adds.

    Who takes part in a send waits for the other side: neighbours that have nothing to say must not meet, or a stage
    that goes forward would wait in each tick for one that goes backward, twice as long. In lockstep all wait anyway.
    """
    covered = rounds * len(body)
    if lockstep:
        return covered - len(body)
    held = rounds * sum(len(pattern.activations) + len(pattern.cotangents) for pattern in body)
    own = sum(len(pattern.activations) + len(pattern.cotangents) for pattern in ticks[:covered])
    stages = 1 + max((max(hop) for pattern in body for hop in pattern.activations), default=0)
    return covered - len(body) - (held - own) / stages


def _longest(ticks: Sequence[Pattern], period: int, lockstep: bool) -> tuple[list[Pattern], int]:
    """The body of a loop of `period` ticks that covers as many of the first ticks as it can, and its rounds."""
    body, covered = list(ticks[:period]), 1
    for start in range(period, len(ticks) - period + 1, period):
        joined = [_join(a, b, lockstep) for a, b in zip(body, ticks[start : start + period], strict=True)]
        if any(pattern is None for pattern in joined):
            break
        body, covered = [pattern for pattern in joined if pattern is not None], covered + 1
    return body, covered


def _join(a: Pattern, b: Pattern, lockstep: bool) -> Pattern | None:
    """One pattern that serves both, or None. In lockstep a head that only one of them needs would cost the other."""
    activations = _joined_sends(a.activations, b.activations)
    cotangents = _joined_sends(a.cotangents, b.cotangents)
    if activations is None or cotangents is None or (lockstep and a.head != b.head):
        return None
    return Pattern(
        a.forward or b.forward,
        a.backward or b.backward,
        a.both or b.both,
        a.embed or b.embed,
        a.head or b.head,
        a.embed_backward or b.embed_backward,
        activations,
        cotangents,
    )


def _joined_sends(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    sends = sorted({*a, *b})
    senders, receivers = {sender for sender, _ in sends}, {receiver for _, receiver in sends}
    return tuple(sends) if len(senders) == len(receivers) == len(sends) else None


def _kind(pattern: Pattern) -> tuple[bool, bool]:
    return (pattern.forward or pattern.both, pattern.backward or pattern.both)


def _pattern(schedule: Schedule, tick: int) -> Pattern:
    cells, last = schedule.ticks[tick], schedule.layout.chunks - 1
    forward = [cell.forward for cell in cells if cell.forward is not None]
    backward = [cell.backward for cell in cells if cell.backward is not None]
    both = any(cell.forward is not None and cell.backward is not None for cell in cells)
    if schedule.lockstep:
        both = bool(forward and backward)
    activations, cotangents = transfers(schedule, tick)
    return Pattern(
        forward=bool(forward) and not (schedule.lockstep and both),
        backward=bool(backward) and not (schedule.lockstep and both),
        both=both,
        embed=any(work.chunk == 0 for work in forward),
        head=any(work.chunk == last for work in backward),
        embed_backward=any(work.chunk == 0 for work in backward),
        activations=tuple(sorted(activations)),
        cotangents=tuple(sorted(cotangents)),
    )


def _direction(schedule: Schedule, forward: bool) -> Direction:
    layout, last = schedule.layout, schedule.layout.chunks - 1
    first, final = (0, last) if forward else (last, 0)
    step = 1 if forward else -1
    shape = len(schedule.ticks), layout.stages
    table = {
        name: np.zeros(shape, np.int32)
        for name in ("microbatch", "place", "layers", "slot", "reversed", "takes", "puts")
    }
    flags = {name: np.zeros(shape, bool) for name in ("on", "opens", "closes", "stays")}
    masked = scratch(schedule) if schedule.lockstep and forward else None
    for tick, stage, work in _works(schedule, forward):
        if work is None:
            where = masked[tick][stage] if masked else None
            table["slot"][tick, stage], table["reversed"][tick, stage] = where or (0, False)
            continue
        flags["on"][tick, stage] = True
        flags["opens"][tick, stage] = work.chunk == first
        flags["closes"][tick, stage] = work.chunk == final
        flags["stays"][tick, stage] = work.chunk != final and layout.stage_of[work.chunk + step] == stage
        table["microbatch"][tick, stage] = work.microbatch
        table["place"][tick, stage] = layout.place_of(work.chunk)
        table["layers"][tick, stage] = layout.chunk_layers[work.chunk]
        table["slot"][tick, stage], table["reversed"][tick, stage] = work.slot, work.reversed
    inbox = _fill_inbox(schedule, forward, table["takes"], table["puts"])
    return Direction(**flags, **{**table, "reversed": table["reversed"].astype(bool)}, inbox=inbox)


def _works(schedule: Schedule, forward: bool) -> Iterator[tuple[int, int, Work | None]]:
    for tick, cells in enumerate(schedule.ticks):
        for stage, cell in enumerate(cells):
            yield tick, stage, cell.forward if forward else cell.backward


def _fill_inbox(schedule: Schedule, forward: bool, takes: np.ndarray, puts: np.ndarray) -> int:
    """Fills in where messages wait, and returns how many places that takes.

    A tick that brings nothing still writes: to a place that nothing waits in.
    """
    layout, step = schedule.layout, 1 if forward else -1
    needed = {
        (work.microbatch, work.chunk): (tick, stage)
        for tick, stage, work in _works(schedule, forward)
        if work is not None
    }
    brings = {}  # (tick, stage): when what it brings is taken
    for (microbatch, chunk), (tick, _) in needed.items():
        taken = needed.get((microbatch, chunk + step))
        if 0 <= chunk + step < layout.chunks and taken is not None:
            brings[tick, taken[1]] = taken[0]
    places = 1
    for stage in range(layout.stages):
        waiting: dict[int, int] = {}  # place: when it is taken
        for tick in range(len(schedule.ticks)):
            # A message is taken at the start of a tick, and another one put at its end.
            waiting = {place: taken for place, taken in waiting.items() if taken > tick}
            place = next(place for place in range(len(waiting) + 1) if place not in waiting)
            puts[tick, stage] = place
            places = max(places, place + 1)
            taken = brings.get((tick, stage))
            if taken is not None:
                waiting[place] = taken
                takes[taken, stage] = place
    return places
