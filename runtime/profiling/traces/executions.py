"""What a profiler trace says of single instructions: every execution, and whether anything disturbed it.

XLA writes into each kernel's event the HLO instruction it was launched for (`hlo_op`); an execution is the
stretch of a stream whose kernels carry one name and follow each other closely. Nothing here looks at the names of
kernels.

    for gpu, found in executions.record(run_the_step, "jit_train_step").items():
        for execution in found: execution.name, execution.seconds, execution.undisturbed

Kernels of a CUDA graph carry the name of XLA's command buffer instead, and what NCCL gives to copy engines carries
none. `between_marks` gives them back to the operators of a measuring program, which sets marks for that purpose.
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
_BETWEEN_KERNELS = 20e-6  # of one instruction; up to 11 us were seen, and a loop's next iteration comes later


@dataclass(frozen=True, slots=True)
class Execution:
    """One instruction, once, on one GPU. Times in seconds of the trace's clock.

    `shared`: seconds of it during which other streams ran kernels or copies, several of them counted each.
    """

    name: str
    start: float
    end: float
    shared: float = 0.0

    @property
    def undisturbed(self) -> bool:
        """Next to nothing ran meanwhile: a few copies of a layer's small arrays do not count."""
        return self.shared <= _DISTURBED * self.seconds

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel or copy. Times in seconds.

    `name`: of its instruction, empty if the trace names none; `of_module`: False if it does not name the module.
    """

    start: float
    end: float
    stream: str
    name: str
    of_module: bool = True


def record(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> dict[int, list[Execution]]:
    """Executions while `run` runs, under the profiler; it must wait for what it starts. Otherwise as `of_trace`."""
    options: Any = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # only what the GPUs did: the host's events are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return of_trace(trace.load(folder), module_name, rename)


def record_everywhere(
    run: Callable[[], object], module_name: str, rename: Callable[[str], str | None] | None = None
) -> list[list[Execution]]:
    """As `record`, of the GPUs of all processes, which call it together. Each GPU has its node's clock.

    Raises DhelixError: a trace holds no kernel of the module, in any of the processes.
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
    """Executions of a module's instructions by their start, for each GPU of this process that ran it.

    Args:
      profile: see `trace.load`.
      module_name: of the compiled module, such as `jit_train_step`.
      rename: maps XLA's name to the one wanted, so that several instructions make one execution; None: as it is.

    Returns:
      Lists by the GPU's number in this process.

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
    """Executions on one GPU by their start: joins the kernels of an instruction and says what was disturbed."""
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
    """Idle time of a GPU between two kernels that follow each other, the median; 0 if it is never idle.

    Not the mean: around collectives a GPU is idle for tens of microseconds, and that is not what a kernel costs. Pauses
    longer than _PAUSE are the host's, not a step's.
    """
    busy = trace.merge((e.start, e.end) for e in executions)
    gaps = (after[0] - before[1] for before, after in itertools.pairwise(busy))
    return statistics.median([gap for gap in gaps if gap < _PAUSE] or [0.0])


def between_marks(executions: Iterable[Execution], is_mark: Callable[[str], bool]) -> Iterator[Execution]:
    """Executions without a name of their own take that of the last mark before them; marks are left out.

    What has a name of its own keeps it, and consecutive pieces of one mark become one execution.
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
    """Whether an event is a further kernel of the instruction that its stream ran before it."""
    if event.name != before.name or _ANONYMOUS.match(event.name):
        return False
    return event.start - before.end <= _BETWEEN_KERNELS
