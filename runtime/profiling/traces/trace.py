"""Measures in a profiler trace of GPUs how much of the communication is hidden by compute.

    with jax.profiler.trace(folder):
        jax.block_until_ready(train_step(state, batch))
    report = trace.analyse(trace.load(folder), module=HloModule.from_text(compiled.as_text()))

A kernel or a copy counts as communication if its HLO instruction is a collective. XLA writes the instruction into the
event (`hlo_op`, `hlo_module`). If `module` is given, the instruction's opcode decides; otherwise its name decides. Two
kinds of events name no instruction. For these, the event's own name decides, and the report says how much time such
communication takes:

- An event of a CUDA graph carries only the command buffer's name. In a graph, NCCL's kernels and copies to other GPUs
  are communication. (A trace recorded with `--xla_gpu_enable_command_buffer=` has no graphs.)
- A copy that NCCL gives to copy engines carries no name, but XLA's own copies carry their instruction. So a copy
  without a name is NCCL's, unless it begins or ends in the host's memory. NCCL also copies the part of the data that
  stays on the GPU; this copy counts as communication, too.

Everything else is compute, including local copies on any engine.

Communication is hidden while compute runs on the same GPU. This does not say how much communication and compute slow
each other down. To find that out, compare the times of whole steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.hlo import HloModule

_COLLECTIVE_NAME = re.compile(
    "^(ragged-)?(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|psum"
    "|ppermute|send|recv)([-.0-9]|$)"
)
_COLLECTIVE_KERNEL = re.compile("nccl|nvshmem|all.?reduce|collective", re.IGNORECASE)
_NO_INSTRUCTION = re.compile("^(command_buffer|$)")
_COPY = re.compile("Memcpy")
_COPY_OF_HOST = re.compile("Memcpy(H2|.2H)")
_COPY_INSIDE = "MemcpyD2D"
_STATS = frozenset(("hlo_op", "hlo_module", "correlation_id"))

Interval = tuple[float, float]
Profile = Any  # a jax.profiler.ProfileData, which type checkers do not recognize as a type


@dataclass(frozen=True)
class StreamTime:
    """The times of one CUDA stream, in milliseconds.

    Attributes:
      hidden_ms: the part of `communication_ms` in which any stream computes.
    """

    name: str
    compute_ms: float
    communication_ms: float
    hidden_ms: float


@dataclass(frozen=True)
class CollectiveTime:
    """The times of one collective of the program, in milliseconds, summed over all its executions in the trace."""

    instruction: str
    executions: int
    total_ms: float
    hidden_ms: float


@dataclass(frozen=True)
class TraceReport:
    """The times of one GPU of a trace, in milliseconds. Where kernels overlap, the common time counts once.

    Attributes:
      device: name of the GPU's plane, which is the part of the trace with the GPU's events.
      span_ms: time from the first kernel's start to the last kernel's end.
      busy_ms: time in which any kernel or copy runs.
      compute_ms, communication_ms: time in which compute runs, and time in which communication runs.
      hidden_ms: time of communication that overlaps with compute; `exposed_ms` is the rest of communication.
      unnamed_ms: time of communication whose instruction the trace does not name. Only the names of its kernels and
        copies show that it is communication.
      copies_ms: time of copies that count as compute: within the GPU, from the host, or to the host.
      copy_engine_ms: time of copies that count as communication.
      streams: the times of each CUDA stream.
      collectives: the times of each collective, longest first.
    """

    device: str
    span_ms: float
    busy_ms: float
    compute_ms: float
    communication_ms: float
    hidden_ms: float
    unnamed_ms: float
    copies_ms: float
    copy_engine_ms: float
    streams: tuple[StreamTime, ...]
    collectives: tuple[CollectiveTime, ...]

    @property
    def exposed_ms(self) -> float:
        return self.communication_ms - self.hidden_ms

    @property
    def idle_ms(self) -> float:
        """Time in which the GPU runs nothing. Compute is idle for this time and for `exposed_ms`."""
        return self.span_ms - self.busy_ms

    @property
    def hidden_share(self) -> float:
        """The fraction of communication time that is hidden; 1 if there is no communication."""
        return self.hidden_ms / self.communication_ms if self.communication_ms else 1.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or a copy on one GPU. Times are in milliseconds, by the trace's clock.

    Attributes:
      stream: name of the CUDA stream.
      instruction: name of the HLO instruction; empty if the event names none.
      module: name of the HLO module; empty if the event names none.
      event: name of the kernel or copy.
      launch: number that the host's call for this launch has, too; empty if the trace does not know it.
    """

    start: float
    end: float
    stream: str
    instruction: str
    module: str
    event: str
    launch: str
    is_communication: bool

    @property
    def is_copy(self) -> bool:
        return bool(_COPY.match(self.event))

    @property
    def is_copy_of_host(self) -> bool:
        """Whether this copies from or to the host's memory."""
        return bool(_COPY_OF_HOST.match(self.event))


def find(path: str | Path) -> Path:
    """Returns `path` if it is a file, or the newest `.xplane.pb` file under a folder of `jax.profiler.trace`.

    Raises:
      DhelixError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(path.rglob("*.xplane.pb"), key=lambda p: (p.stat().st_mtime, str(p)))
        if not found:
            hint = f"record one with jax.profiler.trace({str(path)!r})"
            raise DhelixError(f"{path} holds no *.xplane.pb file; {hint}")
        path = found[-1]
    if not path.is_file():
        raise DhelixError(f"no trace at {path}; give an .xplane.pb file or a folder of jax.profiler.trace")
    return path


def load(path: str | Path) -> Profile:
    """Reads the trace file that `find` returns for `path`.

    Raises:
      DhelixError: there is no such file, or it is not a trace.
    """
    path = find(path)
    try:
        return ProfileData.from_serialized_xspace(path.read_bytes())
    except Exception as error:  # jaxlib raises its own error types
        raise DhelixError(f"{path} is not a profiler trace, or is cut short: {error}; record it again") from None


def devices(profile: Profile) -> list[str]:
    """Names of the GPU planes of the trace, such as `/device:GPU:0`."""
    names = [p.name for p in profile.planes if p.name and p.name.startswith("/device:GPU:")]
    return sorted(names, key=lambda name: (len(name), name))


def analyse(
    profile: Profile,
    module: HloModule | None = None,
    module_name: str | None = None,
    device: str | None = None,
) -> TraceReport:
    """Reports the overlap on one GPU.

    Args:
      profile: see `load`.
      module: the compiled module. If it is given, its opcodes decide which instructions are collectives, and kernels of
        other modules are left out.
      module_name: name of a module. If it is given, only kernels of this module and kernels without a module name
        count.
      device: name of a plane; default: the first GPU.

    Raises:
      DhelixError: the trace has no such GPU, or has no kernels of that module on the GPU.
    """
    names = devices(profile)
    device = device or (names[0] if names else None)
    if device not in names:
        present = ", ".join(names) or "none: record it on GPUs"
        raise DhelixError(f"the trace has no GPU {device or ''}; it has {present}")
    found = kernels(profile, device, module, module_name)
    if not found:
        wanted = module.name if module is not None else module_name
        raise DhelixError(f"the trace has no kernels{f' of module {wanted}' if wanted else ''} on {device}")
    return report(device, found)


def kernels(
    profile: Profile, device: str, module: HloModule | None = None, module_name: str | None = None
) -> list[Kernel]:
    """The kernels and copies on one GPU, stream by stream; arguments as in `analyse`."""
    plane = next(p for p in profile.planes if p.name == device)
    communication = None if module is None else collective_instructions(module)
    wanted = module.name if module is not None else module_name
    return [
        kernel
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if (kernel := _kernel(event, line.name, communication, wanted)) is not None
    ]


def collective_instructions(module: HloModule) -> frozenset[str]:
    """Names of the instructions that communicate: collectives, and the fusions and async starts that wrap them."""
    return frozenset(
        instruction.name
        for computation in module.computations
        for instruction in computation.instructions
        if find_collective(instruction) is not None
    )


def _kernel(event: Any, stream: str, communication: frozenset[str] | None, wanted: str | None) -> Kernel | None:
    stats = {key: str(value) for key, value in event.stats if key in _STATS}
    owner = stats.get("hlo_module", "")
    if wanted and owner and owner != wanted:
        return None
    name = stats.get("hlo_op", "").rsplit("::", 1)[-1]  # outer::inner if ops are nested
    if _NO_INSTRUCTION.match(name):
        name, is_communication = "", _looks_like_communication(event.name, in_graph=bool(name))
    elif communication is not None:
        is_communication = name in communication
    else:
        is_communication = bool(_COLLECTIVE_NAME.match(name.replace("_", "-")))
    start, launch = event.start_ns / 1e6, stats.get("correlation_id", "")
    end = start + event.duration_ns / 1e6
    return Kernel(start, end, stream, name, owner, event.name, launch, is_communication)


def _looks_like_communication(event_name: str, in_graph: bool) -> bool:
    """Whether an event that names no instruction is communication, by its name.

    In a CUDA graph, a copy inside one GPU counts as compute, because it may be a copy of XLA.
    """
    if not _COPY.match(event_name):
        return bool(_COLLECTIVE_KERNEL.search(event_name))
    return not _COPY_OF_HOST.match(event_name) and not (in_graph and event_name == _COPY_INSIDE)


def report(device: str, kernels: Sequence[Kernel]) -> TraceReport:
    """Sums up the kernels of one GPU, of which there must be at least one."""
    compute = merge((k.start, k.end) for k in kernels if not k.is_communication)
    collectives: dict[str, list[Kernel]] = defaultdict(list)
    streams: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        streams[kernel.stream].append(kernel)
        if kernel.is_communication:
            collectives[kernel.instruction].append(kernel)
    communication = merge((k.start, k.end) for k in kernels if k.is_communication)
    per_collective = [
        CollectiveTime(name or "(no instruction)", len(of), length(spans), overlap(spans, compute))
        for name, of in sorted(collectives.items())
        for spans in (merge((k.start, k.end) for k in of),)
    ]
    everything = merge((k.start, k.end) for k in kernels)
    return TraceReport(
        device=device,
        span_ms=everything[-1][1] - everything[0][0],
        busy_ms=length(everything),
        compute_ms=length(compute),
        communication_ms=length(communication),
        hidden_ms=overlap(communication, compute),
        unnamed_ms=length(merge((k.start, k.end) for k in collectives.get("", ()))),
        copies_ms=length(merge((k.start, k.end) for k in kernels if k.is_copy and not k.is_communication)),
        copy_engine_ms=length(merge((k.start, k.end) for k in kernels if k.is_copy and k.is_communication)),
        streams=tuple(
            StreamTime(
                name,
                length(merge((k.start, k.end) for k in of if not k.is_communication)),
                length(spans),
                overlap(spans, compute),
            )
            for name, of in sorted(streams.items())
            for spans in (merge((k.start, k.end) for k in of if k.is_communication),)
        ),
        collectives=tuple(sorted(per_collective, key=lambda c: -c.total_ms)),
    )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, as disjoint intervals in order. Intervals that touch become one interval."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length of the intersection of two results of `merge`."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
