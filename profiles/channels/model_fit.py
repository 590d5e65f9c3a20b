"""Fits the channel model to measured overlaps, and says how well it predicts others.

    model = fit(overlap, measured)          # least squares of the logarithms of all times
    errors(model, held_out)                 # relative error of each time

Few measurements determine some parameters badly. A weak prior keeps these near usual values. It weighs far less than a
measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from dhelix.profiles.channels.channel_model import (
    Array,
    Bandwidth,
    ChannelModel,
    ChannelSetting,
    Links,
    Overlap,
)
from dhelix.profiles.channels.nccl_setting import ChannelError

_USUAL_LINKS = Links(link=2e10, channel=4e9, half_chunk=2e5, per_chunk=1e-5, per_channel=3e-6)
_USUAL_BANDWIDTH = Bandwidth(channel=0.02, half_chunk=5e5, limit=0.6)
_PRIOR = 0.003
"""Weight of the prior. A parameter that differs by a factor e counts like a time that differs by 0.3 %."""

_EVALUATIONS = 60
_IDLE = 0.005
"""Fraction of an overlap in which computation may wait, although it is said to take all the time."""


@dataclass(frozen=True)
class MeasuredTimes:
    """The times of an overlap under the settings of its collectives.

    Attributes:
      settings: of each collective.
      collectives: seconds of each collective.
      computations: seconds of each computation.
      count: how often this was measured. The times are means.
      whole: measured seconds of the overlap; 0 if only its parts were measured.
    """

    settings: tuple[ChannelSetting, ...]
    collectives: tuple[float, ...]
    computations: tuple[float, ...]
    count: int = 1
    whole: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the overlap, Z."""
        return self.whole or max(sum(self.collectives), sum(self.computations))

    @property
    def bound_by_computation(self) -> bool:
        """Whether computation takes all the time, so that faster collectives gain nothing."""
        if self.whole:
            return self.whole <= sum(self.computations) * (1.0 + _IDLE)
        return sum(self.collectives) < sum(self.computations)


def columns(settings: Sequence[Sequence[ChannelSetting]]) -> tuple[Array, Array]:
    """Channels and chunks as arrays of shape [collectives, settings]."""
    channels = np.array([[one.channels for one in each] for each in settings], dtype=float).T
    return channels, np.array([[one.chunk for one in each] for each in settings], dtype=float).T


def fit(overlap: Overlap, measured: Sequence[MeasuredTimes], start: ChannelModel | None = None) -> ChannelModel:
    """The model whose times differ least from the measured ones.

    Args:
      start: a model to begin with, such as the last fit.

    Raises:
      ChannelError: nothing was measured, or something else than this overlap.
    """
    check(overlap, measured)
    channels, chunk = columns([one.settings for one in measured])
    x = np.array([one.collectives for one in measured]).T
    y = np.array([one.computations for one in measured]).T
    weight = np.sqrt([one.count for one in measured])
    least = y.min(axis=1)
    prior = _numbers(ChannelModel(overlap, _USUAL_LINKS, _USUAL_BANDWIDTH, tuple(least), (0.5,) * len(least)))

    def residuals(numbers: Array) -> Array:
        times = _model(overlap, numbers).times(channels, chunk)
        off = [weight * np.log(found / wanted) for found, wanted in zip(times, (x, y), strict=True)]
        return np.concatenate([*(part.ravel() for part in off), _PRIOR * (numbers - prior)])

    begin = prior if start is None else _numbers(start)
    return _model(overlap, least_squares(residuals, begin, max_nfev=_EVALUATIONS).x)


def errors(model: ChannelModel, measured: Sequence[MeasuredTimes]) -> tuple[Array, Array]:
    """Relative errors of the model's times: [collectives, measurements] and [computations, measurements]."""
    check(model.overlap, measured)
    x, y = model.times(*columns([one.settings for one in measured]))
    wanted = np.array([one.collectives for one in measured]).T, np.array([one.computations for one in measured]).T
    return x / wanted[0] - 1.0, y / wanted[1] - 1.0


def check(overlap: Overlap, measured: Sequence[MeasuredTimes]) -> None:
    """Raises ChannelError unless all measurements are positive times of this overlap."""
    if not measured:
        raise ChannelError("a model needs at least one measured overlap")
    wanted = len(overlap.volumes), len(overlap.volumes), len(overlap.waves)
    for one in measured:
        found = len(one.settings), len(one.collectives), len(one.computations)
        if found != wanted:
            raise ChannelError(
                f"settings, collectives and computations of a measurement are {found}, of the overlap {wanted}"
            )
        if min(*one.collectives, *one.computations) <= 0.0:
            raise ChannelError("a measured time is not positive; measure again")


def _numbers(model: ChannelModel) -> Array:
    """A model's parameters, mapped to all real numbers."""
    links, taken, m = model.links, model.bandwidth, np.array(model.memory)
    positive = [
        *(links.link, links.channel, links.half_chunk, links.per_chunk, links.per_channel),
        *(taken.channel, taken.half_chunk),
        *model.alone,
    ]
    return np.concatenate([np.log(positive), _logit(np.array([taken.limit])), _logit(np.clip(m, 1e-6, 1 - 1e-6))])


def _model(overlap: Overlap, numbers: Array) -> ChannelModel:
    positive = np.exp(np.clip(numbers[: 7 + len(overlap.waves)], -60.0, 60.0))
    shares = 1.0 / (1.0 + np.exp(-numbers[len(positive) :]))
    links, bandwidth = Links(*positive[:5]), Bandwidth(*positive[5:7], limit=min(float(shares[0]), 0.95))
    return ChannelModel(overlap, links, bandwidth, tuple(positive[7:]), tuple(shares[1:]))


def _logit(share: Array) -> Array:
    return np.log(share / (1.0 - share))
