"""What a tuner has measured so far.

measurements = Measurements(run, noise=0.01)      # run(settings) returns seconds: of collectives, of computations
measurements.of(settings).seconds                 # runs once; later calls return the same times
measurements.again(settings)                      # runs once more, and averages
measurements.best                                 # the settings with the least time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dhelix.passes.tuning.space import Settings
from dhelix.profiles.channels.model_fit import MeasuredTimes

type Run = Callable[
    [Settings], tuple[Sequence[float], Sequence[float]] | tuple[Sequence[float], Sequence[float], float]
]
"""Runs an overlap under settings. Returns seconds of each collective and of each computation, perhaps of the whole."""


class LimitReached(Exception):
    """No more measurements are allowed. The best one so far counts."""


class Measurements:
    """Times of an overlap under many settings.

    Attributes:
      noise: relative standard deviation of a time. A smaller difference between two measurements means nothing.
      count: how many measurements were made.

    Args:
      limit: the number of measurements that may be made; None for any number.
    """

    def __init__(self, run: Run, noise: float = 0.0, limit: int | None = None) -> None:
        self.noise, self.count = noise, 0
        self._run, self._limit = run, limit
        self._found: dict[Settings, MeasuredTimes] = {}

    def __contains__(self, settings: Settings) -> bool:
        return settings in self._found

    @property
    def all(self) -> list[MeasuredTimes]:
        return list(self._found.values())

    @property
    def best(self) -> MeasuredTimes:
        """The measurement with the least time; of equal ones the first."""
        return min(self._found.values(), key=lambda one: one.seconds)

    def of(self, settings: Settings) -> MeasuredTimes:
        """The times under `settings`, measured now if they are not known.

        Raises:
          LimitReached: they are not known, and no more measurements are allowed.
        """
        return self._found[settings] if settings in self._found else self.again(settings)

    def again(self, settings: Settings) -> MeasuredTimes:
        """Measures once more, and returns the means.

        Raises:
          LimitReached: no more measurements are allowed.
        """
        if self._limit is not None and self.count >= self._limit:
            raise LimitReached
        self.count += 1
        collectives, computations, *whole = self._run(settings)
        times = tuple(map(float, collectives)), tuple(map(float, computations))
        new = MeasuredTimes(settings, *times, whole=float(whole[0]) if whole else 0.0)
        old = self._found.get(settings)
        self._found[settings] = new if old is None else _mean(old, new)
        return self._found[settings]

    def add(self, known: MeasuredTimes) -> None:
        """Adds a measurement that was made for another purpose."""
        self._found.setdefault(known.settings, known)

    def settled(self, among: Iterable[Settings], rounds: int) -> MeasuredTimes:
        """The best of several, each measured `rounds` times more. What is clearly slower is measured no more."""
        left = list(among)
        for _ in range(rounds):
            best = min(self.of(one).seconds for one in left)
            left = [one for one in left if self.of(one).seconds <= best * (1.0 + 2.0 * self.noise)]
            if len(left) == 1:
                break
            for one in left:
                self.again(one)
        return min((self.of(one) for one in left), key=lambda one: one.seconds)


def _mean(old: MeasuredTimes, new: MeasuredTimes) -> MeasuredTimes:
    def of(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
        return tuple((old.count * x + y) / (old.count + 1) for x, y in zip(a, b, strict=True))

    collectives, computations = of(old.collectives, new.collectives), of(old.computations, new.computations)
    (whole,) = of((old.whole,), (new.whole,))
    return replace(old, collectives=collectives, computations=computations, count=old.count + 1, whole=whole)
