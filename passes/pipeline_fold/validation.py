"""Checks a schedule before it runs. A `DhelixError` names the tick, the stage and the fault.

    shape          Each tick has one cell for each stage. All stages have the same number of chunks. Each chunk has at
                   least one layer, and the lengths of two chunks differ by at most one layer.
    work           For every micro-batch, every chunk has one forward and one backward, on the stage that holds it.
    dependencies   The inputs of a forward or backward were produced in an earlier tick.
    slots          The slot of a forward exists and is free. Or the backward of the same tick frees it; then the forward
                   stores its residuals in the other order. A backward has the slot and the order of its forward.
    messages       A stage gets at most one activation and one cotangent per tick, from itself or another stage.
    lockstep       See `_check_lockstep`.

The type `Cell` ensures at most one forward and one backward per cell, and so at most one sent message of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule, Work
from dhelix.passes.pipeline_fold.slots import scratch
from dhelix.passes.pipeline_fold.transfers import handed_over


def validate(schedule: Schedule) -> None:
    """Raises DhelixError for the first fault in `schedule`."""
    _check_layout(schedule.layout)
    for number, tick in enumerate(schedule.ticks):
        if len(tick) != schedule.layout.stages:
            raise DhelixError(f"tick {number}: {len(tick)} cells for {schedule.layout.stages} stages")
    forwards, backwards = _check_work(schedule, "forward"), _check_work(schedule, "backward")
    _check_dependencies(schedule, forwards, backwards)
    for stage in range(schedule.layout.stages):
        _check_slots(schedule, stage)
    _check_messages(schedule)
    if schedule.lockstep:
        _check_lockstep(schedule, forwards, backwards)


def _check_layout(layout: Layout) -> None:
    if len(layout.chunk_layers) != len(layout.stage_of):
        raise DhelixError(f"layout: {len(layout.chunk_layers)} chunk lengths for {len(layout.stage_of)} chunks")
    if min(layout.chunk_layers) < 1 or layout.padded - min(layout.chunk_layers) > 1:
        raise DhelixError(
            f"layout: chunks of {layout.chunk_layers} layers; lengths must be at least 1 and differ by at most 1"
        )
    for stage in range(layout.stages):
        if len(layout.chunks_of(stage)) * layout.stages != layout.chunks:
            raise DhelixError(f"layout: stage {stage} holds {len(layout.chunks_of(stage))} of {layout.chunks} chunks")


def _works(schedule: Schedule, direction: str) -> Iterator[tuple[int, int, Work]]:
    """Yields (tick, stage, work) for all work in `direction`."""
    for number, tick in enumerate(schedule.ticks):
        for stage, cell in enumerate(tick):
            work = cell.forward if direction == "forward" else cell.backward
            if work is not None:
                yield number, stage, work


def _check_work(schedule: Schedule, direction: str) -> dict[tuple[int, int], int]:
    """The tick of each (micro-batch, chunk) in `direction`. Raises DhelixError for wrong, repeated or missing work."""
    layout, ticks = schedule.layout, dict[tuple[int, int], int]()
    for tick, stage, work in _works(schedule, direction):
        where, item = f"tick {tick}, stage {stage}: {direction} of {_name(work)}", (work.microbatch, work.chunk)
        if not (0 <= work.microbatch < schedule.microbatches and 0 <= work.chunk < layout.chunks):
            raise DhelixError(f"{where}: there are {schedule.microbatches} micro-batches and {layout.chunks} chunks")
        if layout.stage_of[work.chunk] != stage:
            raise DhelixError(f"{where}: the chunk is on stage {layout.stage_of[work.chunk]}")
        if item in ticks:
            raise DhelixError(f"{where}: already done in tick {ticks[item]}")
        ticks[item] = tick
    for microbatch in range(schedule.microbatches):
        for chunk, stage in enumerate(layout.stage_of):
            if (microbatch, chunk) not in ticks:
                raise DhelixError(f"stage {stage}: {direction} of micro-batch {microbatch}, chunk {chunk} is missing")
    return ticks


def _check_dependencies(
    schedule: Schedule, forwards: dict[tuple[int, int], int], backwards: dict[tuple[int, int], int]
) -> None:
    last = schedule.layout.chunks - 1
    for tick, stage, work in _works(schedule, "forward"):
        made = forwards[work.microbatch, work.chunk - 1] if work.chunk else -1
        if made >= tick:
            raise DhelixError(f"tick {tick}, stage {stage}: forward of {_name(work)}: its input is made in tick {made}")
    for tick, stage, work in _works(schedule, "backward"):
        item = (work.microbatch, work.chunk)
        made = max(forwards[item], backwards[work.microbatch, work.chunk + 1] if work.chunk < last else -1)
        if made >= tick:
            where = f"tick {tick}, stage {stage}: backward of {_name(work)}"
            raise DhelixError(f"{where}: its input is made in tick {made}")


def _check_slots(schedule: Schedule, stage: int) -> None:
    held: dict[int, Work] = {}
    for number, tick in enumerate(schedule.ticks):
        forward, backward = tick[stage].forward, tick[stage].backward
        if backward is not None:
            if held.get(backward.slot) != backward:
                what = f"holds {_name(held[backward.slot])}" if backward.slot in held else "is empty"
                if backward.slot in held and _name(held[backward.slot]) == _name(backward):
                    what = "is stored in the other order"
                raise DhelixError(
                    f"tick {number}, stage {stage}: backward of {_name(backward)}: slot {backward.slot} {what}"
                )
            del held[backward.slot]
        if forward is not None:
            where = f"tick {number}, stage {stage}: forward of {_name(forward)}: slot {forward.slot}"
            if not 0 <= forward.slot < schedule.slots:
                raise DhelixError(f"{where} is not one of the {schedule.slots} slots")
            if forward.slot in held:
                raise DhelixError(f"{where} still holds {_name(held[forward.slot])}")
            if backward is not None and backward.slot == forward.slot and backward.reversed == forward.reversed:
                raise DhelixError(
                    f"{where} is read in the same tick, so it must be written in the other order; flip `reversed`"
                )
            held[forward.slot] = forward


def _check_messages(schedule: Schedule) -> None:
    for tick in range(len(schedule.ticks)):
        for kind, hops in (
            ("activations", handed_over(schedule, tick, "forward")),
            ("cotangents", handed_over(schedule, tick, "backward")),
        ):
            receivers = sorted(receiver for _, receiver in hops)
            for first, second in zip(receivers, receivers[1:], strict=False):
                if first == second:
                    raise DhelixError(f"tick {tick}, stage {first}: receives two {kind}")


def _check_lockstep(
    schedule: Schedule, forwards: dict[tuple[int, int], int], backwards: dict[tuple[int, int], int]
) -> None:
    """Checks that the schedule can run without branches. Then stages without work in a tick compute masked results.

    - The first ticks have only forwards, then ticks have both, and the last ticks have only backwards.
    - A message is used in the very next tick, because the next message replaces it.
    - A stage with a masked forward has a slot to write to (`scratch`).
    - With P stages, masked work takes at most as long as P - 1 micro-batches, which is the bubble of 1F1B. A schedule
      above that limit would be faster with branches.
    """
    layout = schedule.layout
    forward_ticks = sorted({tick for tick, _, _ in _works(schedule, "forward")})
    backward_ticks = sorted({tick for tick, _, _ in _works(schedule, "backward")})
    phases = [*range(len(forward_ticks))], [*range(len(schedule.ticks) - len(backward_ticks), len(schedule.ticks))]
    if (forward_ticks, backward_ticks) != phases:
        raise DhelixError("lockstep: ticks must go forward only, then both ways, then backward only, without a gap")
    for direction, ticks, step in (("forward", forwards, 1), ("backward", backwards, -1)):
        for (microbatch, chunk), tick in sorted(ticks.items()):
            used = ticks.get((microbatch, chunk + step), tick + 1)
            if used != tick + 1:
                where = f"tick {tick}, stage {layout.stage_of[chunk]}: {direction}"
                raise DhelixError(
                    f"{where} of micro-batch {microbatch}, chunk {chunk}: lockstep uses a message in the next tick, "
                    f"not in tick {used}"
                )
    scratch(schedule)
    allowed = (schedule.microbatches + layout.stages - 1) * layout.chunks // layout.stages
    if max(len(forward_ticks), len(backward_ticks)) > allowed:
        raise DhelixError(
            f"lockstep: {len(forward_ticks)} ticks go forward and {len(backward_ticks)} backward, but 1F1B's bubble "
            f"allows {allowed}: set lockstep=False"
        )


def _name(work: Work) -> str:
    return f"micro-batch {work.microbatch}, chunk {work.chunk}"
