"""Assigns residual slots: the slot of each chunk of each micro-batch, and the slots that masked work may overwrite.

The input is a timetable: the (micro-batch, chunk) that each stage runs forward and backward in each tick. A chunk of a
micro-batch holds one slot of its stage from its forward tick to its backward tick. A forward takes the lowest free
slot. If no slot is free and reuse within a tick is allowed, the forward takes the slot that the backward of the same
tick frees:

    iteration l of the tick's loop     backward: layer padded - 1 - l, reads its place p     forward: layer l, writes p

So the new residuals are in the reverse order of the old residuals: `reversed` flips at each hand-over.

In a lockstep schedule a stage without a forward computes along in every tick in which another stage goes forward. Its
writes must not overwrite live residuals, so `scratch` names a slot without live residuals. `with_slots` makes the ring
large enough for such a slot in each of these ticks. The tests show that, with P stages, the W schedule never needs more
than its 2P slots for this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule, Work

# (micro-batch, chunk)
Item = tuple[int, int]
# By tick and stage: (forward, backward).
Timetable = Sequence[Sequence[tuple[Item | None, Item | None]]]


def with_slots(
    name: str,
    layout: Layout,
    microbatches: int,
    timetable: Timetable,
    *,
    lockstep: bool,
    reuse_within_tick: bool = True,
) -> Schedule:
    """The schedule of `timetable`, with the smallest ring of slots that is enough for every stage."""
    masked = [lockstep and any(forward is not None for forward, _ in tick) for tick in timetable]
    slots = max(_needed(timetable, stage, masked, reuse_within_tick) for stage in range(layout.stages))
    columns = [list(_cells(timetable, stage, slots)) for stage in range(layout.stages)]
    return Schedule(name, layout, microbatches, tuple(zip(*columns, strict=True)), slots, lockstep)


def scratch(schedule: Schedule) -> tuple[tuple[tuple[int, bool] | None, ...], ...]:
    """By tick and stage: the (slot, reversed) that a masked forward may write, or None if no masked forward runs.

    A masked forward runs on each stage without a forward in a tick in which another stage goes forward. The masked
    forward writes a slot that is free during the tick, or takes over the slot that the backward of the tick frees.

    Raises:
      DhelixError: a stage has no such slot.
    """
    columns = [list(_scratch(schedule, stage)) for stage in range(schedule.layout.stages)]
    return tuple(zip(*columns, strict=True))


def _needed(timetable: Timetable, stage: int, masked: Sequence[bool], reuse_within_tick: bool) -> int:
    """Number of slots that `stage` needs. `masked`: by tick, whether a stage without a forward computes along."""
    live, needed = 0, 1
    for tick, along in zip(timetable, masked, strict=True):
        forward, backward = tick[stage]
        writes = forward is not None or along
        handed_over = backward is not None and reuse_within_tick
        needed = max(needed, live, live + writes - handed_over)
        live += (forward is not None) - (backward is not None)
    return needed


def _cells(timetable: Timetable, stage: int, slots: int) -> Iterator[Cell]:
    free, held = set(range(slots)), dict[Item, Work]()
    for tick in timetable:
        forward, backward = tick[stage]
        ends = held.pop(backward) if backward is not None else None
        starts = None
        if forward is not None and free:
            starts = Work(*forward, slot=min(free))
        elif forward is not None and ends is not None:
            starts = Work(*forward, slot=ends.slot, reversed=not ends.reversed)
        if ends is not None:
            free.add(ends.slot)
        if forward is not None and starts is not None:
            free.remove(starts.slot)
            held[forward] = starts
        yield Cell(starts, ends)


def _scratch(schedule: Schedule, stage: int) -> Iterator[tuple[int, bool] | None]:
    free = set(range(schedule.slots))
    for number, tick in enumerate(schedule.ticks):
        forward, backward = tick[stage].forward, tick[stage].backward
        if forward is not None or all(cell.forward is None for cell in tick):
            yield None
        elif free:
            yield min(free), False
        elif backward is not None:
            yield backward.slot, not backward.reversed
        else:
            raise DhelixError(f"tick {number}, stage {stage}: no slot is free for the masked forward; add a slot")
        if backward is not None:
            free.add(backward.slot)
        if forward is not None:
            free.discard(forward.slot)
