"""What playing a schedule gives, as data: when each instruction runs, and what each collective is hidden under."""

from dataclasses import dataclass

from dhelix.passes.evaluation.roofline_costs import Lane


@dataclass(frozen=True)
class Interval:
    """An instruction on its lane, from `start` to `end` seconds; `body` repeated `count` times for a loop."""

    instruction: str
    lane: Lane
    start: float
    end: float
    body: "Timeline | None" = None
    count: int = 1


@dataclass(frozen=True)
class CollectiveTime:
    """All executions of one collective, loops counted.

    Attributes:
      alone: seconds it would take if nothing ran beside it; `hidden + exposed` is what it takes.
      hidden: of these, seconds under compute; `exposed`: while compute waits.
      under: compute instructions that run meanwhile, and for how long, longest first.
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
    """A sequence played from idle lanes. Seconds, loops counted.

    Attributes:
      seconds: from the first instruction to the last.
      compute: the compute lane is busy; `compute_alone` without what collectives slow it down by.
      hidden: communication (of any lane) and compute run; `exposed`: communication runs and compute waits.
      idle: nothing runs, in pauses between kernels; `compute + exposed + idle` is `seconds`.
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
        """What compute loses by running beside collectives."""
        return self.compute - self.compute_alone
