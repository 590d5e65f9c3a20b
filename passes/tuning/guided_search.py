"""Tunes the collectives of an overlap: a model proposes settings, and measurements decide.

    1  all at the smallest setting          if computation takes longer, this is the best (Lagom section 3.4)
    2  a few settings spread over the space each collective has another one in each measurement
    3  fit the model, measure what it calls best; again, until it proposes nothing new
    4  descent: measure neighbours of the best that the model does not call slower, nearest to the best first
    5  measure the leading settings again, if there is noise

The paper moves one collective at a time, and ties its channels to its chunks. The model knows how all of them act on
computation, so one measurement moves all. It predicts in form only: other GPUs may follow other formulas. Two things
make up for this. A prediction is corrected by the errors at settings near it, and step 4 measures.

Cost: steps 1 and 2 take six measurements, step 3 at most eight. Step 4 takes at most four for each collective and each
move, usually far fewer, because the model leaves out most neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhelix.passes.tuning.measurements import LimitReached, Measurements
from dhelix.passes.tuning.space import Settings, Space, neighbours
from dhelix.profiles.channels.channel_model import Array, ChannelModel, ChannelSetting, Overlap
from dhelix.profiles.channels.model_fit import MeasuredTimes, columns, fit

_SPREAD = ((1.0, 1.0), (0.5, 0.3), (0.2, 0.7), (0.85, 0.45), (0.5, 0.85))
"""Places of step 2: channels and chunks, from the smallest to the largest."""

_STRIDE = 2
"""How many places of _SPREAD lie between a collective's place and the next one's."""

_PROPOSALS = 8
_SLOWER = 0.01
"""A neighbour that is predicted to be slower by more than this is not measured."""

_SWEEPS = 4
_AGAIN = 3
"""How often a leading setting is measured again."""

_SECOND = 1e-3
"""The least weight of the shorter of communication and computation, so that predictions of equal length differ."""


def tune(measurements: Measurements, overlap: Overlap, space: Space, start: Settings | None = None) -> MeasuredTimes:
    """Returns the best settings that were found, with their times.

    Uses fewer measurements if `measurements` has a limit; the best so far is then returned.

    Args:
      start: settings that were good for a similar overlap. They replace steps 1 and 2.

    Raises:
      ChannelError: the times are not those of `overlap`.
    """
    try:
        return _tune(measurements, overlap, space, start)
    except LimitReached:
        return measurements.best


def _tune(measurements: Measurements, overlap: Overlap, space: Space, start: Settings | None) -> MeasuredTimes:
    collectives = range(len(overlap.volumes))
    if start is not None:
        measurements.of(start)
    else:
        # Step 1: the least that computation can lose.
        first = measurements.of(tuple(space.smallest for _ in collectives))
        if first.bound_by_computation:
            return first
        # Step 2: settings from which the model can be fitted.
        for n in range(len(_SPREAD)):
            places = [_SPREAD[(n + _STRIDE * j) % len(_SPREAD)] for j in collectives]
            measurements.of(tuple(space.at(*place) for place in places))

    # Step 3: what the model calls best.
    model = None
    for _ in range(_PROPOSALS):
        predictor = Predictor(fit(overlap, measurements.all, model), measurements.all)
        model = predictor.model
        settings = predictor.best(space, [measurements.best.settings, *_starts(space, len(collectives))])
        if settings in measurements:
            break
        measurements.of(settings)

    # Step 4: descent.
    best = measurements.best
    while (found := _better_neighbour(measurements, overlap, space, best, model)) is not None:
        best = found

    # Step 5: a measurement that was lucky does not win.
    if measurements.noise:
        near = [one.settings for one in measurements.all if one.seconds <= best.seconds * (1.0 + measurements.noise)]
        return measurements.settled({best.settings: None} | dict.fromkeys(near), _AGAIN)
    return best


def _starts(space: Space, collectives: int) -> list[Settings]:
    return [(space.at(*place),) * collectives for place in ((0.5, 0.85), (0.25, 0.5))]


def _better_neighbour(
    measurements: Measurements, overlap: Overlap, space: Space, best: MeasuredTimes, start: ChannelModel | None
) -> MeasuredTimes | None:
    """The first measured neighbour that is faster by more than the noise."""
    new = [settings for settings in neighbours(best.settings, space) if settings not in measurements]
    if not new:
        return None
    predictor = Predictor(fit(overlap, measurements.all, start), measurements.all)
    *seconds, here = predictor.seconds([*new, best.settings])
    for predicted, settings in sorted(zip(seconds, new, strict=True)):
        if predicted > here * (1.0 + _SLOWER):
            return None
        found = measurements.of(settings)
        if found.seconds < best.seconds * (1.0 - measurements.noise):
            return found
    return None


class Predictor:
    """A fitted model, corrected near settings that were measured.

    The correction is a mean of the errors of measurements. A measurement weighs exp(-d) at d places of the grid, if
    places differ by a factor of two.

    In a real step, the two streams wait for each other. So an overlap takes longer than max(X, Y), by a part of the
    shorter one. This part is the median of the measured ones.
    """

    def __init__(self, model: ChannelModel, measured: Sequence[MeasuredTimes]) -> None:
        self.model = model
        self._channels, self._chunk = columns([one.settings for one in measured])
        x, y = model.times(self._channels, self._chunk)
        self._x = np.log(np.array([one.collectives for one in measured]).T / x)
        self._y = np.log(np.array([one.computations for one in measured]).T / y)
        waits = [_waits(one) for one in measured if one.whole]
        self._second = max(float(np.median(waits)), _SECOND) if waits else _SECOND

    def seconds(self, settings: Sequence[Settings]) -> Array:
        """Predicted times of the overlap."""
        return self._seconds(*columns(settings))

    def best(self, space: Space, starts: Sequence[Settings]) -> Settings:
        """The settings with the least predicted time, by coordinate descent over all settings from several starts."""
        found = [self._descend(space, start) for start in starts]
        return min(found, key=lambda one: one[0])[1]

    def _descend(self, space: Space, start: Settings) -> tuple[float, Settings]:
        every = space.all()
        current, least = list(start), float(self.seconds([start])[0])
        for _ in range(_SWEEPS):
            before = least
            for j in range(len(current)):
                seconds = self._one_moved(current, j, every)
                if seconds.min() < least:
                    least, current[j] = float(seconds.min()), every[int(seconds.argmin())]
            if least == before:
                break
        return least, tuple(current)

    def _one_moved(self, current: Sequence[ChannelSetting], j: int, every: Sequence[ChannelSetting]) -> Array:
        """Predicted times with each of `every` for collective j."""
        channels, chunk = (np.repeat(part, len(every), axis=1) for part in columns([current]))
        channels[j], chunk[j] = (part[0] for part in columns([[one] for one in every]))
        return self._seconds(channels, chunk)

    def _seconds(self, channels: Array, chunk: Array) -> Array:
        x, y = self.model.times(channels, chunk)
        places = np.abs(np.log2(channels[:, :, None] / self._channels[:, None]))
        places += np.abs(np.log2(chunk[:, :, None] / self._chunk[:, None]))  # [collectives, settings, measurements]
        x = x * np.exp(_mean(np.exp(-places), self._x[:, None]))
        y = y * np.exp(_mean(np.exp(-places.mean(axis=0)), self._y[:, None]))
        total = x.sum(axis=0), y.sum(axis=0)
        return np.maximum(*total) + self._second * np.minimum(*total)


def _waits(one: MeasuredTimes) -> float:
    """The part of the shorter of communication and computation that is not hidden, from 0 to 1."""
    shorter, longer = sorted((sum(one.collectives), sum(one.computations)))
    return min(max((one.whole - longer) / shorter, 0.0), 1.0)


def _mean(weights: Array, values: Array) -> Array:
    """Weighted means over the last axis. Far from all measurements, the mean goes to 0."""
    return (weights * values).sum(axis=-1) / (weights.sum(axis=-1) + 0.05)
