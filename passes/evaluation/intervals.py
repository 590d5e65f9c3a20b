"""Results of a simulated schedule: when each instruction runs, and which compute hides each collective."""

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
