"""What one GPU of a recording ran, by instruction: the common input of all that measures a trace.

    runs = GpuRuns.of_gpu(gpu, module)
    runs.of["all-gather-start.3"][0].seconds        # the first execution of this instruction
    runs.steps, runs.starts                         # how many steps there are, and when each began

A collective that the trace names by the instruction inside its async pair is listed under the pair's start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.runtime.profiling.traces import trace
from dhelix.runtime.profiling.traces.executions import Event, Execution, of_events
from dhelix.runtime.profiling.traces.module_executions import by_instruction, steps_in
from dhelix.runtime.profiling.traces.recording import Gpu
from dhelix.runtime.profiling.traces.trace import Interval

_IN_GRAPH = "command_buffer"  # the name of kernels that belong to a CUDA graph and name no instruction


@dataclass(frozen=True)
class GpuRuns:
    """The executions on one GPU. Times are in seconds.

    Attributes:
      of: the executions of each instruction, by its name, sorted by start. Async pairs are listed under their start.
      collectives: names of the instructions that communicate, of those in `of`.
      compute, communication: when the GPU computed, and when it communicated.
      starts: when each step began; empty if the steps are unknown.
      ahead: seconds that the host's clock is ahead of the clock that the times above are by.
    """

    gpu: Gpu
    of: Mapping[str, Sequence[Execution]]
    collectives: frozenset[str]
    compute: Sequence[Interval]
    communication: Sequence[Interval]
    starts: Sequence[float]
    ahead: float = 0.0

    @classmethod
    def of_gpu(cls, gpu: Gpu, module: HloModule | None, collectives: frozenset[str] = frozenset()) -> GpuRuns:
        """Joins the kernels of a GPU to executions.

        Args:
          module: the program; None if it is unknown. Then instructions have the names that the trace gives.
          collectives: names of its instructions that communicate.
        """
        events = [
            Event(k.start / 1e3, k.end / 1e3, k.stream, k.instruction or ("" if k.is_communication else _IN_GRAPH))
            for k in gpu.kernels
        ]
        found = of_events(events)
        talking = {k.instruction for k in gpu.kernels if k.is_communication} | collectives
        starts: list[float] = []
        if module is None:
            of: dict[str, list[Execution]] = {}
            for execution in found:
                of.setdefault(execution.name, []).append(execution)
        else:
            times = by_instruction(module, found)
            of = {i.name: runs for i, runs in times.items() if i.opcode not in CONTROL_FLOW}
            steps = steps_in(module, times)
            once = [times[i] for i in sequence_of(module.entry) if i in times and len(times[i]) == steps]
            starts = [run.start for run in min(once, key=lambda runs: runs[0].start)] if once else []
        return cls(
            gpu,
            of,
            frozenset(talking & of.keys()),
            trace.merge((k.start / 1e3, k.end / 1e3) for k in gpu.kernels if not k.is_communication),
            trace.merge((k.start / 1e3, k.end / 1e3) for k in gpu.kernels if k.is_communication),
            starts,
        )

    @property
    def steps(self) -> int:
        """The number of steps in the trace; 0 if unknown."""
        return len(self.starts)

    @property
    def step(self) -> tuple[float, float]:
        """When one step begins and ends: the second one, the only one, or the whole trace if steps are unknown."""
        every = [run for executions in self.of.values() for run in executions]
        if not every:
            return 0.0, 0.0
        first, last = min(run.start for run in every), max(run.end for run in every)
        edges = [*(self.starts or [first]), last]
        number = 1 if len(edges) > 2 else 0
        return edges[number], edges[number + 1]

    @property
    def computing(self) -> Iterator[tuple[str, Execution]]:
        """Names of the instructions that compute, with each of their executions."""
        return ((name, run) for name, runs in self.of.items() if name not in self.collectives for run in runs)

    def earlier(self, seconds: float) -> GpuRuns:
        """The same, by a clock that is `seconds` behind this one."""
        if not seconds:
            return self
        of = {
            name: [dataclasses.replace(run, start=run.start - seconds, end=run.end - seconds) for run in runs]
            for name, runs in self.of.items()
        }
        compute, communication = (
            [(start - seconds, end - seconds) for start, end in spans] for spans in (self.compute, self.communication)
        )
        starts = [start - seconds for start in self.starts]
        return dataclasses.replace(
            self, of=of, compute=compute, communication=communication, starts=starts, ahead=self.ahead + seconds
        )

    @property
    def unshifted(self) -> list[float]:
        """`starts` by the clock of the GPU's host, as the times of its kernels."""
        return [start + self.ahead for start in self.starts]
