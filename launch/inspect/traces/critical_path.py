"""The critical path of a measured step: which instructions decided its length on one GPU.

The path is followed as that of an estimated step (`answers/critical_path.py`), from the end of the step to its start. A
trace does not say what an instruction waited for. So what computes counts as not having waited if it began at most
PAUSE after what computed before it. Otherwise, it waited for what ended last before it began.

A collective that waits for another GPU is on the path with this waiting.
"""

from __future__ import annotations

from dhelix.launch.inspect.answers.critical_path import OnPath, critical_path
from dhelix.launch.inspect.traces.collectives import UNNAMED
from dhelix.passes.evaluation.intervals import Interval, Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.runtime.profiling.traces.gpu_runs import GpuRuns

PAUSE = 10e-6
"""The longest pause before a kernel that the GPU itself needs, in seconds. Launching a kernel takes about 5 µs."""


def measured_path(runs: GpuRuns) -> tuple[OnPath, ...]:
    """The instructions on the path of `runs.step`, longest first. Pauses have the name `critical_path.PAUSE`."""
    begin, end = runs.step
    intervals = tuple(
        Interval(name or UNNAMED, lane, run.start - begin, run.end - begin)
        for name, executions in runs.of.items()
        for lane in (Lane.COMM if name in runs.collectives else Lane.COMPUTE,)
        for run in executions
        if begin <= run.start < end
    )
    return critical_path(Timeline(end - begin, 0.0, 0.0, 0.0, 0.0, intervals, ()), PAUSE)
