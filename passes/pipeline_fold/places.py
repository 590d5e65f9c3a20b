"""At which place of a stage's ring the residuals of each layer lie.

Slots (`schedule.Work`) say how many chunks' residuals a stage holds at most. The program gives out memory layer by
layer, in the order in which it reads and writes: a layer's forward takes a place, its backward gives it back. So nothing
is held longer than needed, whatever the order of layers within a tick.

In the ticks of a lockstep schedule in which all stages go both ways, forward runs one layer ahead:

    layers of a chunk: 4        tick t                                                tick t + 1
    forward      F0 |  F1  F2  F3 | F0 of t + 1 |  F1  F2  F3 | ...
    backward        |  B3  B2  B1 | B0 of t     |  B3  B2  B1 | ...
    sends                         x of t, then dx of t

What a tick makes is sent while there is still a layer to compute in the other direction, and F0 and B0 of neighbouring
ticks make up one more co-executed pair. Being ahead costs one place, that of the very first F0: W needs 2P chunks and
one layer. In other ticks a stage goes through its layers in one loop.

In lockstep a stage without a forward writes along; it does so to a place that is free at that moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dhelix.passes.pipeline_fold.schedule import Cell, Schedule

Event = tuple[Literal["forward", "backward"], int, int]


@dataclass(frozen=True)
class Places:
    """
    Attributes:
      forward, backward: int32[ticks, stages, padded]: where the layers of the tick's work write and read.
      count: how many places each stage needs, of one layer each.
    """

    forward: np.ndarray
    backward: np.ndarray
    count: int


def residual_places(schedule: Schedule) -> Places:
    """The places of all residuals, for the order of layers that `layer_order` says."""
    shape = len(schedule.ticks), schedule.layout.stages, schedule.layout.padded
    forward, backward = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    counts = [_give_out(schedule, stage, forward, backward) for stage in range(schedule.layout.stages)]
    return Places(forward, backward, max(counts))


def layer_order(schedule: Schedule, stage: int) -> Iterator[Event]:
    """What one stage's program does with its ring, in order: (direction, tick, layer of the chunk)."""
    layers = range(schedule.layout.padded)
    ahead = False  # whether the forward of this tick has run its first layer
    for tick, cells in enumerate(schedule.ticks):
        goes = _goes(cells if schedule.lockstep else cells[stage : stage + 1])
        if goes == (True, True):
            if schedule.lockstep and not ahead:
                yield "forward", tick, 0
            lead = 1 if schedule.lockstep else 0
            for layer in layers[lead:]:
                yield "backward", tick, layers[-1] + lead - layer
                yield "forward", tick, layer
            if schedule.lockstep:
                yield "backward", tick, 0
                ahead = tick + 1 < len(schedule.ticks) and _goes(schedule.ticks[tick + 1]) == (True, True)
                if ahead:
                    yield "forward", tick + 1, 0
            continue
        for layer in layers if goes[0] else ():
            yield "forward", tick, layer
        for layer in reversed(layers) if goes[1] else ():
            yield "backward", tick, layer


def _goes(cells: tuple[Cell, ...]) -> tuple[bool, bool]:
    return any(cell.forward is not None for cell in cells), any(cell.backward is not None for cell in cells)


def _give_out(schedule: Schedule, stage: int, forward: np.ndarray, backward: np.ndarray) -> int:
    """Fills in one stage's places, the lowest first, and returns how many it needs."""
    free: list[int] = []
    count, held = 0, dict[tuple[int, int, int], int]()
    for direction, tick, layer in layer_order(schedule, stage):
        cell = schedule.ticks[tick][stage]
        if direction == "backward":
            if cell.backward is not None:
                place = held.pop((cell.backward.microbatch, cell.backward.chunk, layer))
                backward[tick, stage, layer] = place
                heapq.heappush(free, place)
            continue
        if not free:
            heapq.heappush(free, count)
            count += 1
        forward[tick, stage, layer] = free[0]
        if cell.forward is not None:
            held[cell.forward.microbatch, cell.forward.chunk, layer] = heapq.heappop(free)
    return count
