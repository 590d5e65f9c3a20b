"""The measured times of each collective of a trace over all GPUs: hidden, exposed, how fast, and what lies under it."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dhelix.launch.inspect.inspection import CollectiveReport, Inspection, Under
from dhelix.launch.shown.instruction_words import Words, bytes_moved, communicates
from dhelix.passes.analysis.collectives import Collective, NamedMesh, named_mesh
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.estimates.roofline import wire_bytes
from dhelix.runtime.profiling.traces import disturbance, trace
from dhelix.runtime.profiling.traces.arrivals import GroupRuns, connected, group_runs
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.gpu_runs import GpuRuns

UNNAMED = "(no instruction)"
"""What collectives are called whose kernels name no instruction."""


@dataclass(frozen=True)
class GroupSpeed:
    """How fast the data of a collective moved in one group of GPUs.

    Attributes:
      gb_per_s: bytes that each GPU sends, divided by the time after the last GPU arrived; the median of all executions.
        Compare this with the link's bandwidth. None if sizes are unknown.
      skew_ms: mean time from the first GPU's arrival to the last one's.
    """

    gpus: tuple[int, ...]
    transfer_ms: float
    gb_per_s: float | None
    skew_ms: float


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective of the program. Times are for one step, as means over the GPUs that ran it, in milliseconds.

    Attributes:
      kind, bytes, devices, axes: see `CollectiveReport`; "", 0, 0 and () if the program is unknown.
      executions: number of executions on one GPU in one step.
      total_ms: `hidden_ms + exposed_ms`, from the start of its kernel. This includes waiting for other GPUs.
      slow_down_ms: the part of `total_ms` that is lost because compute runs beside it, by equal executions that ran
        alone; None if none did.
      waited_ms: the part of `total_ms` in which it waits for other GPUs.
      groups: the groups of GPUs, slowest first.
      predicted_ms, predicted_exposed_ms: estimates with overlap; None if there are none.
      under: the operators that overlap with it, longest first. Times are for one execution.
    """

    instruction: str
    kind: str
    bytes: int
    devices: int
    axes: tuple[str, ...]
    executions: float
    total_ms: float
    hidden_ms: float
    exposed_ms: float
    slow_down_ms: float | None
    waited_ms: float
    groups: tuple[GroupSpeed, ...]
    predicted_ms: float | None
    predicted_exposed_ms: float | None
    under: tuple[Under, ...]


@dataclass(frozen=True)
class Program:
    """What the compiled program says of a trace's instructions; everything is empty if the program is unknown.

    Attributes:
      gpu_of: the number of the GPU on which a partition runs.
      mesh: the mesh that the program names.
      words: what its instructions do.
    """

    module: HloModule | None
    instructions: Mapping[str, Instruction]
    gpu_of: Mapping[int, int]
    mesh: NamedMesh | None = None
    words: Words = field(default_factory=Words)

    @classmethod
    def of(cls, module: HloModule | None) -> Program:
        if module is None:
            return cls(None, {}, {})
        placed = module.proto.device_assignment.computation_devices
        devices = [part.replica_device_ids[0] for part in placed if len(part.replica_device_ids) == 1]
        ordered = sorted(devices)  # device ids need not begin at 0, and GPUs are numbered in their order
        gpu_of = {partition: ordered.index(device) for partition, device in enumerate(devices)}
        instructions = {i.name: i for c in module.computations for i in c.instructions}
        return cls(module, instructions, gpu_of, named_mesh(module))

    def describe(self, name: str) -> str:
        """What an instruction does, or its name if it is unknown."""
        return self.words[self.instructions[name]] if name in self.instructions else name or UNNAMED

    def groups(self, name: str, gpus: Sequence[int]) -> list[tuple[int, ...]]:
        """The groups in which a collective's GPUs communicate; only `gpus`, which were recorded."""
        found = self.collective(name)
        if found is None or not found.groups:
            return [tuple(gpus)]
        groups = [[self.gpu_of.get(partition, partition) for partition in group] for group in found.groups]
        together = connected(groups) if found.kind == "collective-permute" else groups
        present = [tuple(gpu for gpu in group if gpu in set(gpus)) for group in together]
        return [group for group in present if len(group) > 1]

    def collective(self, name: str) -> Collective | None:
        found = communicates(self.instructions[name]) if name in self.instructions else None
        return found if isinstance(found, Collective) else None


NO_PROGRAM = Program.of(None)


def collectives_of(
    runs: Sequence[GpuRuns],
    program: Program,
    steps: int,
    kind_of: Callable[[str], Hashable],
    predicted: Inspection | None,
) -> tuple[list[MeasuredCollective], dict[str, list[GroupRuns]]]:
    """The collectives, most exposed first, and the arrivals at each of them.

    Args:
      runs: of all GPUs, by one clock.
      steps: the number of steps, or 1 if it is unknown.
      kind_of: maps the name of an instruction to what equal instructions have in common.
      predicted: an estimate for the program.
    """
    names = sorted(set().union(*(of_gpu.collectives for of_gpu in runs)))
    recorded = [of_gpu.gpu.number for of_gpu in runs]
    met = {
        name: group_runs({r.gpu.number: r.of.get(name, ()) for r in runs}, program.groups(name, recorded))
        for name in names
    }
    last = {name: [group.last for group in met[name]] or [r.of[name] for r in runs if name in r.of] for name in names}
    known = disturbance.alone((kind_of(name), run) for name in names for group in last[name] for run in group)
    below = [_Under(of_gpu) for of_gpu in runs]
    measured = []
    for name in names:
        on = [n for n, of_gpu in enumerate(runs) if name in of_gpu.of]
        found = _collective(name, [runs[n] for n in on], [below[n] for n in on], program, steps, met[name])
        if (alone := known.get(kind_of(name))) is not None:
            lost = sum(run.seconds - alone for group in last[name] for run in group if not run.undisturbed)
            found = replace(found, slow_down_ms=1e3 * lost / (steps * len(last[name])))
        measured.append(found)
    if predicted is not None:
        expected = {report.instruction: report for report in predicted.collectives}
        measured = [_beside(found, expected.get(found.instruction)) for found in measured]
    return sorted(measured, key=lambda c: (-c.exposed_ms, -c.total_ms, c.instruction)), met


def _beside(found: MeasuredCollective, told: CollectiveReport | None) -> MeasuredCollective:
    if told is None:
        return found
    return replace(found, predicted_ms=told.hidden_ms + told.exposed_ms, predicted_exposed_ms=told.exposed_ms)


def _collective(
    name: str,
    runs: Sequence[GpuRuns],
    below: Sequence[_Under],
    program: Program,
    steps: int,
    met: Sequence[GroupRuns],
) -> MeasuredCollective:
    """The collective `name`, without slow-down and prediction. `runs` and `below` are those of the GPUs that ran it."""
    per = 1e3 / (steps * len(runs))  # from seconds on all GPUs in all steps to milliseconds on one GPU in one step
    spans = [trace.merge((run.start, run.end) for run in of_gpu.of[name]) for of_gpu in runs]
    total = per * sum(map(trace.length, spans))
    hidden = per * sum(trace.overlap(span, of_gpu.compute) for span, of_gpu in zip(spans, runs, strict=True))
    executions = sum(len(of_gpu.of[name]) for of_gpu in runs)
    beside: dict[str, float] = defaultdict(float)
    for of_gpu, others in zip(runs, below, strict=True):
        for what, seconds in (pair for run in of_gpu.of[name] for pair in others.beside(run)):
            beside[what] += seconds
    found = program.collective(name)
    return MeasuredCollective(
        instruction=name or UNNAMED,
        kind=found.kind if found else "",
        bytes=bytes_moved(found) if found else 0,
        devices=found.group_size(default=len(runs)) if found else 0,
        axes=program.mesh.over(found) if program.mesh and found else (),
        executions=executions / (steps * len(runs)),
        total_ms=total,
        hidden_ms=hidden,
        exposed_ms=total - hidden,
        slow_down_ms=None,
        waited_ms=per * sum(sum(group.waits.values()) for group in met),
        groups=_speeds(found, met),
        predicted_ms=None,
        predicted_exposed_ms=None,
        under=tuple(
            Under(what, program.describe(what), 1e3 * seconds / executions)
            for what, seconds in sorted(beside.items(), key=lambda item: (-item[1], item[0]))
        ),
    )


def _speeds(found: Collective | None, met: Sequence[GroupRuns]) -> tuple[GroupSpeed, ...]:
    speeds = []
    for group in met:
        together = (found, *found.others) if found else ()
        sent = sum(wire_bytes(each.kind, each.size, each.group_size(len(group.gpus))) for each in together)
        rate = sent / group.transfer / 1e9 if sent and group.transfer > 0 else None
        speeds.append(GroupSpeed(group.gpus, 1e3 * group.transfer, rate, 1e3 * group.skew))
    return tuple(sorted(speeds, key=lambda speed: (-speed.transfer_ms, speed.gpus)))


class _Under:
    """Finds what a GPU computes during a span of time."""

    def __init__(self, runs: GpuRuns) -> None:
        self._ordered = sorted(runs.computing, key=lambda item: (item[1].start, item[1].end))
        self._ends = list(itertools.accumulate((run.end for _, run in self._ordered), max))

    def beside(self, span: Execution) -> list[tuple[str, float]]:
        """Names of instructions, and the seconds of their overlap with `span`."""
        found = []
        for n in range(bisect.bisect_right(self._ends, span.start), len(self._ordered)):
            name, run = self._ordered[n]
            if run.start >= span.end:
                break
            both = min(run.end, span.end) - max(run.start, span.start)
            if both > 0.0:
                found.append((name, both))
        return found


def waits_of(met: Mapping[str, Sequence[GroupRuns]]) -> tuple[dict[int, float], dict[int, float]]:
    """The seconds that each GPU waited for others, and those that others waited only for it, over all collectives."""
    waited: dict[int, float] = defaultdict(float)
    delays: dict[int, float] = defaultdict(float)
    for group in itertools.chain.from_iterable(met.values()):
        for gpu in group.gpus:
            waited[gpu] += group.waits[gpu]
            delays[gpu] += group.delays[gpu]
    return waited, delays


def median_speed(collective: MeasuredCollective) -> float | None:
    """The median bandwidth of a collective's groups in GB/s; None if it is unknown."""
    rates = [group.gb_per_s for group in collective.groups if group.gb_per_s is not None]
    return statistics.median(rates) if rates else None
