"""Coordinate descent on measured times, and what each collective would choose alone: two baselines.

    descend(measurements, space, start)     one place up or down for one collective, until nothing is faster
    alone(measurements, space, start)       the same for each collective's own time, as AutoCCL tunes

`alone` ignores computation. It is right only where communication takes longer than computation.

Cost: at most four measurements for each collective and each step of the way.
"""

from __future__ import annotations

from collections.abc import Callable

from dhelix.passes.tuning.measurements import LimitReached, Measurements
from dhelix.passes.tuning.space import Settings, Space, neighbours
from dhelix.profiles.channels.model_fit import MeasuredTimes


def descend(measurements: Measurements, space: Space, start: Settings) -> MeasuredTimes:
    """Moves to faster neighbours until there is none. Returns the best settings with their times."""
    current = measurements.of(start)
    try:
        while (found := _faster(measurements, space, current, lambda one: one.seconds)) is not None:
            current = found
    except LimitReached:
        pass
    return min(current, measurements.best, key=lambda one: one.seconds)


def alone(measurements: Measurements, space: Space, start: Settings) -> MeasuredTimes:
    """Minimises each collective's own time. Returns these settings with their times."""
    current = measurements.of(start)
    try:
        while (found := _faster(measurements, space, current, lambda one: sum(one.collectives))) is not None:
            current = found
    except LimitReached:
        pass
    return current


def _faster(
    measurements: Measurements, space: Space, current: MeasuredTimes, seconds: Callable[[MeasuredTimes], float]
) -> MeasuredTimes | None:
    """The first neighbour that is faster by more than the noise."""
    for settings in neighbours(current.settings, space):
        if settings not in measurements:
            found = measurements.of(settings)
            if seconds(found) < seconds(current) * (1.0 - measurements.noise):
                return found
    return None
