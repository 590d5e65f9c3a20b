"""The timeline of one measured step on one GPU, as a picture."""

from __future__ import annotations

from collections.abc import Iterator

from dhelix.launch.inspect.tables import outcome
from dhelix.launch.inspect.traces.collectives import UNNAMED, Program
from dhelix.launch.inspect.traces.measurement import Measurement
from dhelix.launch.shown.figures import SHORT
from dhelix.launch.shown.instruction_words import part_of
from dhelix.launch.shown.timeline_plot import COMMUNICATION, COMPUTE, Bar, Picture, Window
from dhelix.passes.framework import fingerprint
from dhelix.runtime.profiling.traces.gpu_runs import GpuRuns

_AROUND = 3.0  # the enlarged period is so many times as long as the exposed collective in its middle
_LONGEST = 0.2  # and at most this fraction of the step


def of(measured: Measurement, title: str = "") -> Picture:
    """One step (`GpuRuns.step`) of the GPU that is shown."""
    runs = next(of_gpu for of_gpu in measured.runs if of_gpu.gpu.number == measured.shown.gpu)
    begin, end = runs.step
    bars = tuple(sorted(_bars(runs, measured.program_facts, begin, end), key=lambda bar: (bar.start, bar.end)))
    where = f"GPU {runs.gpu.number}" + (f" of {runs.gpu.host}" if len(measured.hosts) > 1 else "")
    gpu, begins = measured.shown, "a step takes" if measured.steps else "the trace lasts"
    summary = f"{where}: {outcome(begins, 'measured', gpu.step_ms, gpu.communication_ms, gpu.hidden_ms)}"
    return Picture(title or fingerprint.unmark(measured.program), summary, bars, tuple(_windows(measured, bars)))


def _bars(runs: GpuRuns, program: Program, begin: float, end: float) -> Iterator[Bar]:
    for name, executions in runs.of.items():
        instruction = program.instructions.get(name)
        what = program.describe(name)
        part = part_of(instruction) if instruction is not None else "other"
        lane = COMMUNICATION if name in runs.collectives else COMPUTE
        for run in executions:
            if begin <= run.start < end:
                start, stop = 1e3 * (run.start - begin), 1e3 * (run.end - begin)
                yield Bar(start, stop, lane, part, what, name or UNNAMED, SHORT.get(what, ""))


def _windows(measured: Measurement, bars: tuple[Bar, ...]) -> Iterator[Window]:
    """The period around one execution of the most exposed collective."""
    worst = next((one.instruction for one in measured.collectives if one.exposed_ms > 0.0), None)
    found = [bar for bar in bars if bar.name == worst]
    if not found:
        return
    bar, length = found[len(found) // 2], max(each.end for each in bars)
    width = min(_AROUND * (bar.end - bar.start), _LONGEST * length)
    start = max(0.0, min((bar.start + bar.end - width) / 2, length - width))
    yield Window(start, start + width, f"around {worst}, the most exposed collective: {width:,.3f} ms")
