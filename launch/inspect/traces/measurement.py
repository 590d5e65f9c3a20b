"""What a trace says of a step: measured times of each GPU and each collective, in milliseconds for one step.

`measure` puts the parts together that `dhelix.runtime.profiling.traces` reads from the trace. If the trace holds the
compiled program, as `.xplane.pb` files do, each collective has its kind, size and groups, and times are for one step.
Otherwise only names are known, and times are for the whole trace.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.inspect.answers.critical_path import OnPath
from dhelix.launch.inspect.answers.operations import Operation, Utilization, operations, utilization
from dhelix.launch.inspect.inspection import Inspection
from dhelix.launch.inspect.traces.collectives import (
    NO_PROGRAM,
    MeasuredCollective,
    Program,
    collectives_of,
    waits_of,
)
from dhelix.launch.inspect.traces.critical_path import measured_path
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.hlo import Computation, Instruction
from dhelix.profiles import hardware as hardware_of
from dhelix.profiles.hardware import Hardware
from dhelix.runtime.profiling.traces import arrivals, disturbance, idle, trace
from dhelix.runtime.profiling.traces.disturbance import SlowDown
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.gpu_runs import GpuRuns
from dhelix.runtime.profiling.traces.recording import Recording

_MANY = 0.02  # fraction of compute that names no instruction, above which a note says so


@dataclass(frozen=True)
class MeasuredStream:
    """The times of one CUDA stream in one step, in milliseconds.

    Attributes:
      slow_down_ms: the part of `compute_ms` that is lost because collectives run beside it.
      communication_ms: `hidden_ms + exposed_ms`. It is hidden while any stream computes.
    """

    name: str
    compute_ms: float
    slow_down_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class MeasuredGpu:
    """The times of one GPU in one step, in milliseconds.

    Attributes:
      step_ms: `compute_ms + exposed_ms + idle_ms`.
      communication_ms: `hidden_ms + exposed_ms`.
      slow_down_ms: the part of `compute_ms` that is lost because collectives run beside compute.
      slow_down_known: the fraction of the overlapping compute for which this loss is known.
      waited_ms: time that its collectives wait for other GPUs.
      delays_ms: time that others wait while only this GPU is missing.
      pauses: the parts of `idle_ms` by their causes.
      path: what decided the length of one step; empty if the steps are unknown.
    """

    gpu: int
    host: str
    step_ms: float
    compute_ms: float
    slow_down_ms: float
    slow_down_known: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    idle_ms: float
    waited_ms: float
    delays_ms: float
    pauses: Mapping[str, idle.Pauses]
    path: tuple[OnPath, ...]
    streams: tuple[MeasuredStream, ...]


@dataclass(frozen=True)
class Measurement:
    """The measured times of a program.

    Attributes:
      steps: number of steps in the trace; 0 if unknown. Then all times are for the whole trace.
      collectives: most exposed first.
      operations: what computes, as means over the GPUs, longest first; empty if the program is unknown.
      utilization: how well the GPUs' arithmetic is used; None if the program or the GPU is unknown.
      clock_offsets_ms: how far each host's clock is ahead of the first one's; its times are shifted by this.
      chosen: number of the GPU whose path, streams and pauses are shown; None if the user has chosen none.
      predicted: the estimate for the program in the trace; None if there is none.
      runs, program_facts: all executions, and what is known of their instructions, for pictures; not in the JSON.
    """

    source: str
    program: str
    hosts: tuple[str, ...]
    steps: int
    gpus: tuple[MeasuredGpu, ...]
    collectives: tuple[MeasuredCollective, ...]
    operations: tuple[Operation, ...]
    utilization: Utilization | None
    clock_offsets_ms: Mapping[str, float]
    notes: tuple[str, ...]
    chosen: int | None = None
    predicted: Inspection | None = dataclasses.field(default=None, repr=False)
    runs: tuple[GpuRuns, ...] = dataclasses.field(default=(), repr=False, compare=False)
    program_facts: Program = dataclasses.field(default=NO_PROGRAM, repr=False, compare=False)

    def mean(self, name: str) -> float:
        """The mean of a field of `MeasuredGpu` over all GPUs."""
        return sum(getattr(gpu, name) for gpu in self.gpus) / len(self.gpus)

    @property
    def slowest(self) -> MeasuredGpu:
        return max(self.gpus, key=lambda gpu: gpu.step_ms)

    @property
    def shown(self) -> MeasuredGpu:
        """The GPU that pictures and tables of a single GPU show: the chosen one, or the one with the longest steps."""
        return self.slowest if self.chosen is None else next(gpu for gpu in self.gpus if gpu.gpu == self.chosen)

    @property
    def shown_for_pauses(self) -> MeasuredGpu:
        """Like `shown`. But if none is chosen, it is the GPU that is idle longest."""
        return max(self.gpus, key=lambda gpu: gpu.idle_ms) if self.chosen is None else self.shown

    def says_which(self) -> str:
        """A sentence on which GPU is shown and why; "" if there is only one."""
        if len(self.gpus) == 1:
            return ""
        which = f"GPU {self.shown.gpu} of {self.shown.host}"
        why = "--gpu chooses it" if self.chosen is not None else "its steps are longest; --gpu chooses another one"
        return f"Picture, critical path and streams are of {which}: {why}."

    def to_dict(self) -> dict[str, Any]:
        """Everything but the runs, as JSON values."""
        fields = dataclasses.asdict(replace(self, runs=(), predicted=None, program_facts=NO_PROGRAM))
        del fields["runs"], fields["program_facts"], fields["chosen"]
        fields["shown_gpu"] = self.shown.gpu
        fields["predicted"] = self.predicted.to_dict() if self.predicted else None
        if self.utilization is not None:
            fields["utilization"] |= {"mfu": self.utilization.mfu, "hfu": self.utilization.hfu}
        return {"estimated": False, **fields}


def measure(
    recording: Recording,
    predicted: Inspection | None = None,
    notes: Sequence[str] = (),
    hardware: Hardware | None = None,
    chosen: int | None = None,
) -> Measurement:
    """Measures a recording.

    Args:
      predicted: an estimate for the recording's program, which is shown beside the measured times.
      notes: sentences on this estimate.
      hardware: the GPUs that ran; None if dhelix does not know them.
      chosen: number of the GPU to show; default: the one with the longest steps.

    Raises:
      DhelixError: the recording lacks the GPU `chosen`.
    """
    _check_chosen(recording, chosen)
    program = Program.of(recording.module)
    runs = [GpuRuns.of_gpu(gpu, recording.module, recording.collectives) for gpu in recording.gpus]
    offsets = _clock_offsets(runs, program)
    runs = [of_gpu.earlier(offsets.get(of_gpu.gpu.host, 0.0)) for of_gpu in runs]
    steps = max(of_gpu.steps for of_gpu in runs)
    kinds = _Kinds(program)
    collectives, met = collectives_of(runs, program, max(steps, 1), kinds.__getitem__, predicted)
    waited, delays = waits_of(met)
    computing = [[(kinds[name], run) for name, run in of_gpu.computing] for of_gpu in runs]
    everywhere = disturbance.alone(itertools.chain.from_iterable(computing))
    gpus = []
    for of_gpu, executions in zip(runs, computing, strict=True):
        by_stream: dict[str, list[tuple[Hashable, Execution]]] = defaultdict(list)
        for kind, run in executions:
            by_stream[run.stream].append((kind, run))
        # An operator whose time depends on the data, such as a scatter, takes longer on one GPU than on another.
        known = everywhere | disturbance.alone(executions)
        lost = {name: disturbance.slow_down(on, of_gpu.communication, known) for name, on in by_stream.items()}
        number = of_gpu.gpu.number
        gpus.append(_gpu(of_gpu, lost, max(of_gpu.steps, 1), waited.get(number, 0.0), delays.get(number, 0.0)))
    ran = _operations(runs, program, hardware)
    step_ms = sum(gpu.step_ms for gpu in gpus) / len(gpus)
    return Measurement(
        source=recording.source,
        program=recording.program,
        hosts=recording.hosts,
        steps=steps,
        gpus=tuple(gpus),
        collectives=tuple(collectives),
        operations=ran,
        utilization=utilization(ran, hardware, step_ms) if hardware is not None and ran else None,
        clock_offsets_ms={host: 1e3 * seconds for host, seconds in offsets.items()},
        notes=(*recording.notes, *_notes(recording, runs, offsets), *notes),
        chosen=chosen,
        predicted=predicted,
        runs=tuple(runs),
        program_facts=program,
    )


def _check_chosen(recording: Recording, chosen: int | None) -> None:
    last = len(recording.gpus) - 1
    if chosen is not None and chosen > last:
        has = f"its GPUs are 0 to {last}, counted over all hosts" if last else "its only GPU is 0"
        raise DhelixError(f"{recording.source} has no GPU {chosen} that ran {recording.program}: {has}")


def _operations(runs: Sequence[GpuRuns], program: Program, hardware: Hardware | None) -> tuple[Operation, ...]:
    """What computes in one step, as means over the GPUs. Work follows from the program, and times from the trace."""
    work = Costs(hardware or hardware_of.H200)
    found: dict[str, list[float]] = {}
    for of_gpu in runs:
        for name, run in of_gpu.computing:
            if name in program.instructions:
                sums = found.setdefault(name, [0.0, 0.0])
                sums[0] += 1 / (max(of_gpu.steps, 1) * len(runs))
                sums[1] += 1e3 * run.seconds / (max(of_gpu.steps, 1) * len(runs))
    named = [(program.instructions[name], count, ms) for name, (count, ms) in found.items()]
    often = _often({instruction: count for instruction, count, _ in named})
    done = ((i, min(count, often[i.computation]), ms, work[i]) for i, count, ms in named)
    return operations(done, hardware, program.words)


def _often(counts: Mapping[Instruction, float]) -> dict[Computation, float]:
    """How often each computation ran: as often as most of its instructions; as the fewest of them, if they disagree.

    A call of a library may be several kernels, such as a product and the sum of its parts. Each is an execution in the
    trace, but the work is done once.
    """
    found: dict[Computation, Counter[float]] = defaultdict(Counter)
    for instruction, count in counts.items():
        found[instruction.computation][round(count, 6)] += 1
    return {c: max(of_it, key=lambda count: (of_it[count], -count)) for c, of_it in found.items()}


class _Kinds(dict[str, Hashable]):
    """Maps the name of an instruction to its profile key, or to its name if it has no key."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __missing__(self, name: str) -> Hashable:
        instruction = self._program.instructions.get(name)
        self[name] = found = (key_of(instruction) if instruction is not None else None) or name
        return found


def _gpu(runs: GpuRuns, lost: Mapping[str, SlowDown], steps: int, waited: float, delays: float) -> MeasuredGpu:
    """The times of a GPU. `lost` is the slow-down on each of its streams."""
    report = trace.report(runs.gpu.name, runs.gpu.kernels)
    whole = disturbance.together(lost.values())
    causes = idle.pauses(runs.gpu.kernels, runs.gpu.launched, [1e3 * start for start in runs.unshifted])
    return MeasuredGpu(
        gpu=runs.gpu.number,
        host=runs.gpu.host,
        step_ms=report.span_ms / steps,
        compute_ms=report.compute_ms / steps,
        slow_down_ms=1e3 * whole.seconds / steps,
        slow_down_known=whole.known_share,
        communication_ms=report.communication_ms / steps,
        hidden_ms=report.hidden_ms / steps,
        exposed_ms=report.exposed_ms / steps,
        idle_ms=report.idle_ms / steps,
        waited_ms=1e3 * waited / steps,
        delays_ms=1e3 * delays / steps,
        pauses={str(cause): replace(found, ms=found.ms / steps) for cause, found in causes.items()},
        path=measured_path(runs) if runs.steps else (),
        streams=tuple(
            MeasuredStream(
                stream.name,
                stream.compute_ms / steps,
                1e3 * lost[stream.name].seconds / steps if stream.name in lost else 0.0,
                stream.communication_ms / steps,
                stream.hidden_ms / steps,
                (stream.communication_ms - stream.hidden_ms) / steps,
            )
            for stream in report.streams
        ),
    )


def _clock_offsets(runs: Sequence[GpuRuns], program: Program) -> dict[str, float]:
    """How far each host's clock is ahead of the first host's, in seconds."""
    recorded = [of_gpu.gpu.number for of_gpu in runs]
    names = sorted(set().union(*(of_gpu.collectives for of_gpu in runs)))
    return arrivals.clock_offsets(
        {of_gpu.gpu.number: of_gpu.gpu.host for of_gpu in runs},
        (({r.gpu.number: r.of.get(name, ()) for r in runs}, program.groups(name, recorded)) for name in names),
    )


def _notes(recording: Recording, runs: Sequence[GpuRuns], offsets: Mapping[str, float]) -> Iterator[str]:
    if apart := [host for host in recording.hosts if host not in offsets]:
        yield f"no collective aligns the clocks of {', '.join(apart)}: who waits for whom is not known there"
    kernels = [kernel for of_gpu in runs for kernel in of_gpu.gpu.kernels if not kernel.is_communication]
    total = sum(kernel.end - kernel.start for kernel in kernels)
    nameless = sum(kernel.end - kernel.start for kernel in kernels if not kernel.instruction)
    if nameless > _MANY * total:
        yield (
            f"{nameless / total:.0%} of compute belongs to CUDA graphs or names no instruction, so it is in no row; "
            "record with XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    if recording.module is None:
        return
    if not all(of_gpu.steps for of_gpu in runs):
        yield "the trace holds no whole step: times are for the whole trace"
    if len({of_gpu.steps for of_gpu in runs}) > 1:
        yield "the GPUs recorded different numbers of steps; each one's times are for one of its own steps"
    devices = recording.module.partitions
    if devices > len(runs):
        yield (
            f"{len(runs)} of {devices} GPUs were recorded: who waits for the others is unknown, and links may be "
            "faster than shown"
        )
