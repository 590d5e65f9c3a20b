"""The estimated timeline of a step, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dhelix.launch.inspect.answers.memory import Moment, moments
from dhelix.launch.inspect.inspection import Inspection, Ran, unknown_text
from dhelix.launch.shown.figures import SHORT
from dhelix.launch.shown.timeline_plot import COMMUNICATION, COMPUTE, Bar, Picture, Window
from dhelix.launch.shown.units import size_unit, time_unit
from dhelix.passes.evaluation.intervals import Timeline, unfolded
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_parts import loops_to_look_at

_LANES = {
    Lane.COMPUTE: COMPUTE,
    Lane.COMM: COMMUNICATION,
    Lane.COMM_2: f"{COMMUNICATION}, second stream",
    Lane.HOST: f"{COMMUNICATION} with the host",
}


_CHANGE = 0.002
"""Fraction of the largest need by which memory must change to be drawn."""


def of(inspection: Inspection) -> Picture:
    """Draws all executions of the step, which may be hundreds of thousands."""
    ran = inspection.ran
    return Picture(
        inspection.title,
        _summary(inspection, ran.overlaps),
        tuple(_bars(inspection)),
        tuple(_windows(ran.timeline, ran.parts)),
        ran.overlaps,
        tuple(_memory(ran)),
        inspection.answers.memory.arguments,
    )


def _bars(inspection: Inspection) -> Iterator[Bar]:
    ran, copied = inspection.ran, {copy.instruction for copy in inspection.copies}
    for interval, start in unfolded(ran.timeline):
        name = interval.instruction
        what, key = ran.words[ran.instructions[name]], "copy" if name in copied else ran.parts[name]
        end = start + interval.end - interval.start
        yield Bar(1e3 * start, 1e3 * end, _LANES[interval.lane], key, what, name, SHORT.get(what, ""))


def _windows(timeline: Timeline, parts: Mapping[str, str]) -> Iterator[Window]:
    for start, body, runs in loops_to_look_at(timeline):
        title = f"one of {runs:,} iterations{_what_runs(body, parts)}: {1e3 * body.seconds:,.3f} ms"
        yield Window(1e3 * start, 1e3 * (start + body.seconds), title)


def _what_runs(body: Timeline, parts: Mapping[str, str]) -> str:
    found = {parts[c.instruction] for c in body.collectives}
    if {"alpha", "beta"} <= found or {"forward", "backward"} <= found:
        return ", backward of strand α and forward of strand β"
    directions = [word for word in ("forward", "backward") if word in found]
    return f", {directions[0]}" if directions else ""


def _summary(inspection: Inspection, overlaps: bool) -> str:
    unit = time_unit([inspection.step_ms])
    words = [
        f"predicted: step {unit.text(inspection.step_ms)}",
        f"exposed communication {unit.text(inspection.exposed_ms)}",
    ]
    if not overlaps:
        words = [f"a program for CPUs, at the speed of {inspection.hardware}: nothing overlaps; compile it for GPUs"]
    if inspection.unknown_kernels:
        words.append(unknown_text(inspection))
    if inspection.memory is not None:
        peak = inspection.memory.peak
        words.append(f"peak memory {size_unit([peak]).text(peak)}")
    return "  ·  ".join(words)


def _memory(ran: Ran) -> Iterator[tuple[float, int, int]]:
    """When the needed memory changes, in milliseconds, to how many bytes, and how many of them are residuals."""
    known = moments(next(iter(ran.instructions.values())).computation.module)
    found = ((start, known[i.instruction]) for i, start in unfolded(ran.timeline) if i.instruction in known)
    starts = sorted(found, key=lambda one: one[0])
    least = max((moment.bytes for _, moment in starts), default=0) * _CHANGE
    shown = Moment(-1, -1)
    for start, moment in starts:
        if max(abs(moment.bytes - shown.bytes), abs(moment.residuals - shown.residuals)) > least:
            shown = moment
            yield 1e3 * start, moment.bytes, moment.residuals
