"""Reads every execution of single instructions from a profiler trace, and whether other work disturbed it.

XLA writes the HLO instruction of each kernel into the kernel's event (`hlo_op`). An execution is a span of a stream
whose kernels carry one instruction's name and follow each other closely. Names of kernels are never used.

    for gpu, found in executions.record(run_the_step, "jit_train_step").items():
        for execution in found: execution.name, execution.seconds, execution.undisturbed

Kernels in a CUDA graph carry the name of XLA's command buffer instead. Work that NCCL gives to copy engines carries no
name. `between_marks` assigns both to the operators of a measuring program, which runs marks for that purpose.
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
_BETWEEN_KERNELS = 20e-6  # longest pause within one instruction; a loop's next iteration comes later


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of one instruction on one GPU. Times in seconds of the trace's clock.

    `shared`: seconds in which other streams ran kernels or copies; each of several overlapping ones counts.
    """

    name: str
    start: float
    end: float
    shared: float = 0.0

    @property
    def undisturbed(self) -> bool:
        """Whether almost nothing ran meanwhile. A few copies of a layer's small arrays do not count."""
        return self.shared <= _DISTURBED * self.seconds

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel or copy. Times in seconds.

    `name`: its instruction's name, empty if the trace has none; `of_module`: False if the event does not name the
    module.
    """

    start: float
    end: float
    stream: str
    name: str
    of_module: bool = True


def record(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> dict[int, list[Execution]]:
    """Runs `run` under the profiler and returns the executions; see `of_trace`.

    `run` must wait for the work that it starts.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # without the host's events, which are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return of_trace(trace.load(folder), module_name, rename)


def record_everywhere(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> list[list[Execution]]:
    """The same as `record`, for the GPUs of all processes, which call it together. Each GPU has its node's clock.

    Raises:
      DhelixError: in some process, a trace holds no kernel of the module.
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
    """Executions of a module's instructions, sorted by start, for each GPU of this process that ran the module.

    Args:
      profile: see `trace.load`.
      module_name: name of the compiled module, such as `jit_train_step`.
      rename: maps XLA's names to other names, so that several instructions become one execution; None: no change.

    Returns:
      Lists of executions by the GPU's number in this process.

    Raises:
      DhelixError: the trace holds no kernel of the module.
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
    """Executions on one GPU, sorted by start. Joins the kernels of an instruction and computes `shared`."""
    by_stream: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        before = by_stream[event.stream]
        if before and _continues(event, before[-1]):
            before[-1] = replace(before[-1], end=max(before[-1].end, event.end))
        else:
            before.append(event)
    joined = sorted((e for stream in by_stream.values() for e in stream), key=lambda e: (e.start, e.end))
    result = [Execution(e.name, e.start, e.end) for e in joined]
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

    The median ignores the long idle times around collectives, which are no cost of a kernel. Pauses longer than _PAUSE
    are left out, because the host causes them.
    """
    busy = trace.merge((e.start, e.end) for e in executions)
    gaps = (after[0] - before[1] for before, after in itertools.pairwise(busy))
    return statistics.median([gap for gap in gaps if gap < _PAUSE] or [0.0])


def between_marks(executions: Iterable[Execution], is_mark: Callable[[str], bool]) -> Iterator[Execution]:
    """Gives executions without a name the name of the last mark before them; marks are left out.

    Executions with a name keep it. Consecutive executions of one mark become one execution.
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
    """Whether `event` is a further kernel of the instruction that its stream ran before it."""
    if event.name != before.name or _ANONYMOUS.match(event.name):
        return False
    return event.start - before.end <= _BETWEEN_KERNELS
