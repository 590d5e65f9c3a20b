"""Assigns residual slots: the slot of each chunk for each micro-batch, and the slots that masked work may overwrite.

The input is a timetable: for each stage and tick, the (micro-batch, chunk) of its forward and of its backward. A slot
holds the residuals of one chunk for one micro-batch, from the tick of the forward to the tick of the backward. A
forward takes the lowest free slot. If no slot is free, the forward may take the slot that the backward of the same tick
frees. This is a hand-over. One loop over layers then computes both:

    iteration l     backward of layer padded - 1 - l, reads index p of the slot     forward of layer l, writes index p

So the new residuals are in the reverse order of the old residuals: `Work.reversed` flips at each hand-over.

In a lockstep schedule, a stage without a forward computes a masked forward in every tick in which another stage has a
forward. A masked forward must not overwrite live residuals, so `scratch` names a slot that it may write. `with_slots`
makes enough slots for this. The tests show that, with P stages, the W schedule never needs more than its 2P slots for
this.
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
    """The schedule of `timetable`, with the smallest number of slots that is enough for every stage.

    Args:
      name: name of the schedule.
      timetable: by tick and stage, the (micro-batch, chunk) of the forward and of the backward.
      lockstep: as in `Schedule`.
      reuse_within_tick: whether a forward may take the slot that the backward of the same tick frees.
    """
    masked = [lockstep and any(forward is not None for forward, _ in tick) for tick in timetable]
    slots = max(_needed(timetable, stage, masked, reuse_within_tick) for stage in range(layout.stages))
    columns = [list(_cells(timetable, stage, slots)) for stage in range(layout.stages)]
    return Schedule(name, layout, microbatches, tuple(zip(*columns, strict=True)), slots, lockstep)


def scratch(schedule: Schedule) -> tuple[tuple[tuple[int, bool] | None, ...], ...]:
    """By tick and stage: the (slot, reversed) that a masked forward may write, or None if no masked forward runs.

    If a stage has a forward in a tick, each stage without a forward runs a masked forward. The masked forward writes a
    slot that is free during the tick, or takes over the slot that the backward of the tick frees.

    Raises:
      DhelixError: a stage has no such slot.
    """
    columns = [list(_scratch(schedule, stage)) for stage in range(schedule.layout.stages)]
    return tuple(zip(*columns, strict=True))


def _needed(timetable: Timetable, stage: int, masked: Sequence[bool], reuse_within_tick: bool) -> int:
    """Number of slots that `stage` needs. `masked`: by tick, whether a stage without a forward runs a masked one."""
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
