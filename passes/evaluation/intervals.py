"""Results of a simulated schedule: when each instruction runs, and which compute hides each collective."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dhelix.passes.evaluation.roofline_costs import Lane


@dataclass(frozen=True)
class Interval:
    """An instruction on its lane, from `start` to `end` in seconds. A loop is `count` repetitions of `body`."""

    instruction: str
    lane: Lane
    start: float
    end: float
    body: "Timeline | None" = None
    count: int = 1


@dataclass(frozen=True)
class CollectiveTime:
    """Totals over all executions of one collective, also in all loop iterations.

    Attributes:
      alone: seconds that the collective would take if nothing overlapped with it. In the simulation, it takes `hidden +
        exposed` seconds.
      hidden: seconds in which the collective and compute run.
      exposed: seconds in which the collective runs and compute waits.
      under: compute instructions that overlap with the collective, with the seconds of overlap, longest first.
    """

    instruction: str
    lane: Lane
    count: int
    alone: float
    hidden: float
    exposed: float
    under: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Timeline:
    """Result of the simulation of a sequence from idle lanes. All times are in seconds and count all loop iterations.

    Attributes:
      seconds: from the start of the first instruction to the end of the last: `compute + exposed + idle`.
      compute: seconds in which the compute lane is busy. `compute_alone` leaves out the slow-down by collectives.
      hidden: seconds in which communication (on any lane) and compute run.
      exposed: seconds in which communication runs and compute waits.
      idle: seconds in which nothing runs: the pauses between kernels.
    """

    seconds: float
    compute: float
    compute_alone: float
    hidden: float
    exposed: float
    intervals: tuple[Interval, ...]
    collectives: tuple[CollectiveTime, ...]
    idle: float = 0.0

    @property
    def communication(self) -> float:
        return self.hidden + self.exposed

    @property
    def slow_down(self) -> float:
        """Seconds that compute loses by overlapping with collectives."""
        return self.compute - self.compute_alone


def unfolded(timeline: Timeline, most: int = 100_000) -> Iterator[tuple[Interval, float]]:
    """Yields every interval of a step with its start. The intervals of a loop body come once for each iteration.

    Args:
      most: about how many intervals to yield. If there are more, each loop has its share, for its first iterations. No
        more than twice as many are yielded, also if a step has more loops than that.
    """
    sizes: dict[int, int] = {}  # by id, because a timeline's hash would go through all of it
    return itertools.islice(_unfolded(timeline, 0.0, most, sizes), 2 * most)


def _unfolded(timeline: Timeline, offset: float, most: int, sizes: dict[int, int]) -> Iterator[tuple[Interval, float]]:
    share = most / max(_size(timeline, sizes), most, 1)
    for interval in timeline.intervals:
        start, body = offset + interval.start, interval.body
        if body is None:
            yield interval, start
            continue
        iterations = max(int(share * interval.count), 1) if share < 1.0 else interval.count
        for iteration in range(min(iterations, interval.count)):
            own = int(share * interval.count * _size(body, sizes)) // iterations
            yield from _unfolded(body, start + iteration * body.seconds, own, sizes)


def _size(timeline: Timeline, sizes: dict[int, int]) -> int:
    """The number of intervals that a timeline unfolds into."""
    if id(timeline) not in sizes:
        sizes[id(timeline)] = sum(1 if i.body is None else i.count * _size(i.body, sizes) for i in timeline.intervals)
    return sizes[id(timeline)]
