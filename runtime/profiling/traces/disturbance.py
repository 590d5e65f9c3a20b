"""Measures in a trace how much longer operators take because something else runs beside them.

In a step, equal operators run many times: once for each layer and micro-batch. Some of these executions overlap with
collectives, and others run alone. The median of those that ran alone is the time of the operator. What an overlapping
execution takes beyond this time is slow-down:

    alone        ████████                 10.0 ms, the median of equal executions with nothing beside them
    overlapping  ██████████               12.5 ms, beside an all-gather: slowed down by 2.5 ms

Equal operators have the same profile key (`passes/evaluation/operator_keys.py`), or, without the program, the same
instruction. The median is that of the same GPU if enough executions ran alone there, else of all GPUs. An operator that
never runs alone has no known time. The result says for how much time this holds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.trace import Interval, overlap

ENOUGH = 3
"""Smallest number of undisturbed executions that give an operator's time."""
_BESIDE = 0.05  # an execution overlaps with collectives if they run for more than this fraction of it


@dataclass(frozen=True)
class SlowDown:
    """Time that executions lose because collectives run beside them, in seconds.

    Attributes:
      seconds: the sum over the overlapping executions whose time alone is known. Less than 0 if they were faster.
      overlapping: time of all overlapping executions.
      known: time of those whose time alone is known.
    """

    seconds: float
    overlapping: float
    known: float

    @property
    def known_share(self) -> float:
        return self.known / self.overlapping if self.overlapping else 1.0


def together(parts: Iterable[SlowDown]) -> SlowDown:
    """The slow-down on several streams of one GPU."""
    found = list(parts)
    return SlowDown(*(sum(getattr(part, name) for part in found) for name in ("seconds", "overlapping", "known")))


def alone(executions: Iterable[tuple[Hashable, Execution]]) -> dict[Hashable, float]:
    """The seconds that each kind of operator takes alone. A kind with fewer than ENOUGH such executions has none.

    Args:
      executions: a kind and an execution each, of one GPU, or of all GPUs of one type.
    """
    samples: dict[Hashable, list[float]] = defaultdict(list)
    for kind, execution in executions:
        if execution.undisturbed:
            samples[kind].append(execution.seconds)
    return {kind: statistics.median(found) for kind, found in samples.items() if len(found) >= ENOUGH}


def slow_down(
    executions: Iterable[tuple[Hashable, Execution]],
    communication: Sequence[Interval],
    known: Mapping[Hashable, float],
) -> SlowDown:
    """The slow-down on one GPU.

    Args:
      executions: a kind and an execution each, of operators that compute.
      communication: when collectives ran, in seconds, as a result of `trace.merge`.
      known: see `alone`.
    """
    total = overlapping = covered = 0.0
    ordered = sorted(executions, key=lambda found: found[1].start)
    first = 0
    for kind, execution in ordered:
        while first < len(communication) and communication[first][1] <= execution.start:
            first += 1
        last = first
        while last < len(communication) and communication[last][0] < execution.end:
            last += 1
        beside = overlap([(execution.start, execution.end)], communication[first:last])
        if beside <= _BESIDE * execution.seconds:
            continue
        overlapping += execution.seconds
        if kind in known:
            covered += execution.seconds
            total += execution.seconds - known[kind]
    return SlowDown(total, overlapping, covered)
