"""The critical path of an estimated step: the operators that decide its length, so that only they are worth shortening.

The path is followed from the end of the step to its start. An operator begins when the one before it on its lane ends,
or when a collective that it waits for ends. If it begins after a pause as before every kernel, it did not wait. A
collective begins after the one before it on its lane, or when compute reaches its start.

    compute         ██A██ ██B██        ██C██       path: A, G, C. All of G counts, although B hides its beginning
    communication         █████G██████
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane

PAUSE = ""
"""The name of pauses between kernels on the path."""
_SAME = 1e-9  # seconds; ends that differ by less are equal
_Path = tuple[dict[str, float], dict[str, int]]  # seconds and executions of each instruction


@dataclass(frozen=True)
class OnPath:
    """An instruction on the critical path: its executions on the path in one step, and their time."""

    instruction: str
    executions: int
    ms: float


def critical_path(timeline: Timeline, pause: float) -> tuple[OnPath, ...]:
    """The instructions on the path, longest first. Their times add up to the step's.

    Args:
      pause: seconds for which compute pauses before a kernel without waiting for a collective.
    """
    seconds, counts = _follow(timeline, pause, {})
    found = (OnPath(name, counts[name], 1e3 * total) for name, total in seconds.items() if total > 0.0)
    return tuple(sorted(found, key=lambda one: (-one.ms, one.instruction)))


def _follow(timeline: Timeline, pause: float, known: dict[int, _Path]) -> _Path:
    """The path through one run of a timeline.

    Args:
      known: paths that were already followed, by the timelines' identities. Nests of calls share timelines, and to
        follow each call anew would take time exponential in their depth.
    """
    if id(timeline) in known:
        return known[id(timeline)]
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    busy = sorted((i for i in timeline.intervals if i.end > i.start), key=lambda i: (i.end, i.lane is Lane.COMPUTE))
    compute = [i for i in busy if i.lane is Lane.COMPUTE]
    # By identity: to hash an interval means to hash the whole timeline of its body.
    gaps = {id(after): after.start - earlier.end for earlier, after in itertools.pairwise(compute)}
    before = {id(after): earlier for earlier, after in itertools.pairwise(compute)}
    at, number, interval = timeline.seconds, len(busy) - 1, None
    while True:
        if interval is not None and gaps.get(id(interval), math.inf) <= pause + _SAME:
            interval = before[id(interval)]  # compute did not wait: a collective may have ended in the usual pause
        else:
            while number >= 0 and busy[number].end > at + _SAME:
                number -= 1
            if number < 0:
                break
            interval = busy[number]
        seconds[PAUSE] += max(0.0, at - interval.end)
        if interval.body is None:
            seconds[interval.instruction] += min(at, interval.end) - interval.start
            counts[interval.instruction] += 1
        else:
            inside = _follow(interval.body, pause, known)
            for name, taken in inside[0].items():
                seconds[name] += interval.count * taken
            for name, runs in inside[1].items():
                counts[name] += interval.count * runs
        at = interval.start
    seconds[PAUSE] += max(0.0, at)
    known[id(timeline)] = seconds, counts
    return seconds, counts
