"""Reads every execution of every instruction from a profiler trace, and whether other work disturbed the execution.

XLA writes the HLO instruction of each kernel into the kernel's event (`hlo_op`). An execution is a span of time on one
stream. Its kernels carry the same instruction's name and follow each other closely. Names of kernels are not used.

    for gpu, found in executions.record(run_the_step, "jit_train_step").items():
        for execution in found: execution.name, execution.seconds, execution.undisturbed

Kernels in a CUDA graph carry the name of XLA's command buffer instead. Work that NCCL gives to copy engines carries no
name. A measuring program runs marks before such work: small operators that the trace names. `between_marks` gives the
work the name of its mark.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.runtime.processes import agreement
from dhelix.runtime.profiling.traces import trace

_ANONYMOUS = re.compile("command_buffer|$")
_NANO = 1e-9
_DISTURBED = 0.05
_PAUSE = 100e-6
_BETWEEN_KERNELS = 20e-6  # longest pause within one execution; the next iteration of a loop comes after a longer pause


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of one instruction on one GPU. Times are in seconds, by the trace's clock.

    Attributes:
      name: name of the instruction.
      shared: seconds of overlap with executions on other streams. If several of them overlap at once, each one counts.
      stream: name of the CUDA stream.
    """

    name: str
    start: float
    end: float
    shared: float = 0.0
    stream: str = ""

    @property
    def undisturbed(self) -> bool:
        """Whether almost nothing else ran during this execution. A few copies of small arrays do not disturb it."""
        return self.shared <= _DISTURBED * self.seconds

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel or copy in the trace. Times are in seconds.

    Attributes:
      name: name of its instruction; empty if the trace names no instruction.
      of_module: whether the event names the module.
    """

    start: float
    end: float
    stream: str
    name: str
    of_module: bool = True


def record(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> dict[int, list[Execution]]:
    """Calls `run` under the profiler, and returns the executions as `of_trace` does.

    `run` must wait for the work that it starts.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # leaves out the host's events, which are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return of_trace(trace.load(folder), module_name, rename)


def record_everywhere(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> list[list[Execution]]:
    """Records the executions on the GPUs of all processes, and returns one list for each GPU.

    All processes must call this function together. The times of each GPU come from its node's clock. The arguments are
    those of `record`.

    Raises:
      DhelixError: the trace of some process has no kernel of the module.
    """
    found = agreement.together("record a trace", lambda: record(run, module_name, rename), (DhelixError,))
    if jax.process_count() == 1:
        return list(found.values())
    here = [[astuple(execution) for execution in of_gpu] for of_gpu in found.values()]
    told = (json.loads(text) for text in agreement.gathered("exchange times", json.dumps(here)))
    return [[Execution(*fields) for fields in of_gpu] for of_process in told for of_gpu in of_process]


def of_trace(
    profile: trace.Profile, module_name: str, rename: Callable[[str], str | None] | None = None
) -> dict[int, list[Execution]]:
    """Reads the executions of a module's instructions from a trace.

    Args:
      profile: see `trace.load`.
      module_name: name of the compiled module, such as `jit_train_step`.
      rename: maps a name in the trace to another name, or returns None to keep the name. Instructions that get the same
        name can become one execution.

    Returns:
      A map from the numbers of this process's GPUs that ran the module to their executions, sorted by start.

    Raises:
      DhelixError: the trace has no kernel of the module.
    """
    gpus = {}
    for device in trace.devices(profile):
        plane = next(p for p in profile.planes if p.name == device)
        events = list(_events(plane, module_name, rename))
        if any(event.of_module for event in events):
            gpus[int(device.rpartition(":")[2])] = of_events(events)
    if not gpus:
        raise DhelixError(f"the trace has no kernels of {module_name} on a GPU; was it recorded while the module ran?")
    return gpus


def of_events(events: Iterable[Event]) -> list[Execution]:
    """Joins the kernels of each instruction to executions, on one GPU. The result is sorted by start."""
    by_stream: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        before = by_stream[event.stream]
        if before and _continues(event, before[-1]):
            before[-1] = replace(before[-1], end=max(before[-1].end, event.end))
        else:
            before.append(event)
    joined = sorted((e for stream in by_stream.values() for e in stream), key=lambda e: (e.start, e.end))
    result = [Execution(e.name, e.start, e.end, stream=e.stream) for e in joined]
    active: list[int] = []
    for number, event in enumerate(joined):
        active = [n for n in active if joined[n].end > event.start]
        for other in active:
            both = min(event.end, joined[other].end) - event.start
            for n in (number, other):
                result[n] = replace(result[n], shared=result[n].shared + both)
        active.append(number)
    return result


def gap_seconds(executions: list[Execution]) -> float:
    """The median idle time between two consecutive kernels of a GPU; 0 if the GPU is never idle.

    A mean would include long waits for collectives, which are no cost of a kernel. Pauses longer than _PAUSE are left
    out, because the host causes them.
    """
    busy = trace.merge((e.start, e.end) for e in executions)
    gaps = (after[0] - before[1] for before, after in itertools.pairwise(busy))
    return statistics.median([gap for gap in gaps if gap < _PAUSE] or [0.0])


def between_marks(executions: Iterable[Execution], is_mark: Callable[[str], bool]) -> Iterator[Execution]:
    """Gives each execution without a name the name of the last mark before it. Marks are left out.

    Executions that have a name keep it. All executions that get the name of the same mark become one execution.
    """
    mark, pending = "", None
    for execution in executions:
        if is_mark(execution.name):
            mark = execution.name
        elif _ANONYMOUS.match(execution.name):
            if pending is not None and pending.name == mark:
                pending = replace(pending, end=max(pending.end, execution.end))
                continue
            if pending is not None:
                yield pending
            pending = replace(execution, name=mark)
        else:
            yield execution
    if pending is not None:
        yield pending


def _events(plane: Any, module_name: str, rename: Callable[[str], str | None] | None) -> Iterator[Event]:
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module")}
            module = stats.get("hlo_module", "")
            if module not in ("", module_name):
                continue
            name = str(stats.get("hlo_op", "")).rsplit("::", 1)[-1]
            name = (rename(name) or name) if rename else name
            start = event.start_ns * _NANO
            yield Event(start, start + event.duration_ns * _NANO, line.name, name, bool(module))


def _continues(event: Event, before: Event) -> bool:
    """Whether `event` belongs to the same execution as `before`, the previous event of the same stream."""
    if event.name != before.name or _ANONYMOUS.match(event.name):
        return False
    return event.start - before.end <= _BETWEEN_KERNELS
