"""Turns a schedule into tables that the SPMD program reads. Each table has one entry per tick and stage.

    W, P = 2, forward      tick    0     1     2     3
    stage 0                       F0.0        F1.0  F0.3      tick 2: micro-batch 1, the first chunk, from the embedding
    stage 1                             F0.1  F0.2  F1.1      tick 3: micro-batch 1, from what tick 2 put in the inbox

F1.0 is the forward pass of micro-batch 1 in chunk 0. W is a schedule, and P is the number of stages.

A message that arrives before it is needed waits in the stage's inbox, an array with one or more places. This module
assigns a place to each message. The schedule W needs only one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dhelix.passes.pipeline_fold import Schedule, Work, patterns, scratch


@dataclass(frozen=True)
class Direction:
    """The tables of one direction, forward or backward: int32[ticks, stages] or bool[ticks, stages].

    The work of a stage in a tick is the forward or backward pass of one chunk for one micro-batch.

    Attributes:
      on: whether the stage has work.
      microbatch: the micro-batch of the work.
      place: the index of the work's chunk among the stage's chunks.
      layers: number of the chunk's layers without padding layers.
      slot: slot of the residual ring for the work's residuals. A stage without work may still compute a forward pass
        and drop the result; then `slot` is where this pass may write.
      reversed: whether the slot holds the residuals of the last layer first.
      takes: the inbox place that holds the work's input.
      opens: whether the work reads the embedding's result or the head's cotangent instead of a message.
      closes: whether the work's result goes to the head or the embedding's backward pass instead of another chunk.
      stays: whether the stage itself reads the work's result next.
      puts: the inbox place for the message that arrives at the end of the tick.
      late_stays, late_puts: `stays` and `puts` for the previous tick's result, if it is sent late (`phases.Messages`).
      inbox: the number of inbox places.
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
    late_stays: np.ndarray
    late_puts: np.ndarray
    inbox: int


def directions(schedule: Schedule) -> tuple[Direction, Direction]:
    """Returns the tables of the forward and of the backward direction."""
    return _direction(schedule, forward=True), _direction(schedule, forward=False)


def _direction(schedule: Schedule, forward: bool) -> Direction:
    layout, last = schedule.layout, schedule.layout.chunks - 1
    first, final = (0, last) if forward else (last, 0)
    step = 1 if forward else -1
    shape = len(schedule.ticks), layout.stages
    table = {
        name: np.zeros(shape, np.int32)
        for name in ("microbatch", "place", "layers", "slot", "reversed", "takes", "puts", "late_puts")
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
    inbox = _fill_inbox(schedule, forward, table["takes"], table["puts"], table["late_puts"])
    flags["late_stays"] = np.roll(flags["stays"], 1, axis=0)
    return Direction(**flags, **{**table, "reversed": table["reversed"].astype(bool)}, inbox=inbox)


def _works(schedule: Schedule, forward: bool) -> Iterator[tuple[int, int, Work | None]]:
    for tick, cells in enumerate(schedule.ticks):
        for stage, cell in enumerate(cells):
            yield tick, stage, cell.forward if forward else cell.backward


def _fill_inbox(schedule: Schedule, forward: bool, takes: np.ndarray, puts: np.ndarray, late_puts: np.ndarray) -> int:
    """Fills in the inbox place of each message (`takes`, `puts` and `late_puts`). Returns the number of inbox places.

    If a tick of this direction receives no message, it still writes to the inbox, but to a place without a waiting
    message.
    """
    layout, brings, places = schedule.layout, _brought(schedule, forward), 1
    for stage in range(layout.stages):
        waiting: dict[int, int] = {}  # inbox place -> the tick that takes the message
        was_late = False
        for tick, pattern in enumerate(patterns(schedule)):
            messages = pattern.activations if forward else pattern.cotangents
            goes = pattern.goes_forward if forward else pattern.goes_backward
            # A stage takes a message at the start of a tick, and puts new messages at the end.
            waiting = {place: taken for place, taken in waiting.items() if taken > tick}
            writes = [(late_puts, brings.get((tick - 1, stage)) if was_late else None)] * bool(messages.before)
            writes += [(puts, brings.get((tick, stage)))] * (goes and not messages.late)
            for table, taken in writes:
                place = next(place for place in range(len(waiting) + 1) if place not in waiting)
                table[tick, stage] = place
                places = max(places, place + 1)
                if taken is not None:
                    waiting[place] = taken
                    takes[taken, stage] = place
            was_late = bool(messages.late)
    return places


def _brought(schedule: Schedule, forward: bool) -> dict[tuple[int, int], int]:
    """Maps (tick that makes a message, stage that takes it) to the tick that takes it."""
    layout, step = schedule.layout, 1 if forward else -1
    needed = {
        (work.microbatch, work.chunk): (tick, stage)
        for tick, stage, work in _works(schedule, forward)
        if work is not None
    }
    brings = {}
    for (microbatch, chunk), (tick, _) in needed.items():
        taken = needed.get((microbatch, chunk + step))
        if 0 <= chunk + step < layout.chunks and taken is not None:
            brings[tick, taken[1]] = taken[0]
    return brings
