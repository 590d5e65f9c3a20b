"""Fits the channel model to measured overlaps, and says how well it predicts others.

    model = fit(overlap, measured)          # least squares of the logarithms of all times
    model = fit_grid(overlap, measured)     # of a whole grid: also the number of channels that run at most
    errors(model, held_out)                 # relative error of each time

Few measurements determine some parameters badly. A weak prior keeps these near usual values. It weighs far less than a
measurement.

On a grid, computation beside equal collectives differed by 15 %. Probably the thread blocks of a collective land on
other SMs, and a product takes one more wave or not. So a time far from the model weighs less there (SciPy's `soft_l1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

_USUAL_LINKS = Links(link=2e10, channel=4e9, half_chunk=2e5, per_chunk=1e-5, per_channel=3e-6, slowed=0.1)
_USUAL_BANDWIDTH = Bandwidth(channel=0.02, half_chunk=5e5, limit=0.6)
_PRIOR = 0.003
"""Weight of the prior. A parameter that differs by a factor e counts like a time that differs by 0.3 %."""

_EVALUATIONS = 60
_FAR = 0.03
"""A time of a grid that is off by more than this fraction weighs less."""

_WORTH = 0.95
"""A limit on channels must lower the sum of squares to this part."""

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
    begin = None if start is None else _numbers(start)
    return _fitted(overlap, measured, begin, math.inf if start is None else start.links.most)[0]


def fit_grid(overlap: Overlap, measured: Sequence[MeasuredTimes]) -> ChannelModel:
    """The model of a grid of channels and chunks: `fit` for each number of channels that may be the most that run.

    Takes about as many fits as the grid has numbers of channels.

    Raises:
      ChannelError: nothing was measured, or something else than this overlap.
    """
    tried = sorted({one.channels for each in measured for one in each.settings})[:-1]
    model, cost = _fitted(overlap, measured, None, math.inf)
    for most in tried:
        other, lower = _fitted(overlap, measured, None, most)
        if lower < _WORTH * cost:
            model, cost = other, lower
    return _fitted(overlap, measured, _numbers(model), model.links.most, "soft_l1")[0]


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


def _fitted(
    overlap: Overlap, measured: Sequence[MeasuredTimes], begin: Array | None, most: float, loss: str = "linear"
) -> tuple[ChannelModel, float]:
    """A fitted model and its cost, from the parameters `begin`."""
    check(overlap, measured)
    channels, chunk = columns([one.settings for one in measured])
    x = np.array([one.collectives for one in measured]).T
    y = np.array([one.computations for one in measured]).T
    weight = np.sqrt([one.count for one in measured])
    least = y.min(axis=1)
    usual = ChannelModel(overlap, _USUAL_LINKS, _USUAL_BANDWIDTH, tuple(least), (0.5,) * len(least))
    prior = _numbers(replace(usual, factors=((1.0, 1.0),) * len(overlap.kinds)))

    def residuals(numbers: Array) -> Array:
        times = _model(overlap, numbers, most).times(channels, chunk)
        off = [weight * np.log(found / wanted) for found, wanted in zip(times, (x, y), strict=True)]
        return np.concatenate([*(part.ravel() for part in off), _PRIOR * (numbers - prior)])

    start = prior if begin is None else begin
    found = least_squares(residuals, start, max_nfev=_EVALUATIONS, loss=loss, f_scale=_FAR)
    return _model(overlap, found.x, most), float(found.cost)


def _numbers(model: ChannelModel) -> Array:
    """A model's parameters, mapped to all real numbers. The first type of collective has no factors of its own."""
    links, taken, m = model.links, model.bandwidth, np.array(model.memory)
    positive = [
        *(links.link, links.channel, links.half_chunk, links.per_chunk, links.per_channel, links.slowed),
        *(taken.channel, taken.half_chunk),
        *model.alone,
    ]
    shares = _logit(np.array([taken.limit])), _logit(np.clip(m, 1e-6, 1 - 1e-6))
    own = dict(zip(model.overlap.kinds, model.factors, strict=True))
    factors = [number for pair in list(own.values())[1:] for number in pair]
    return np.concatenate([np.log(positive), *shares, np.log(factors)])


def _model(overlap: Overlap, numbers: Array, most: float) -> ChannelModel:
    n = len(overlap.waves)
    positive = np.exp(np.clip(numbers[: 8 + n], -60.0, 60.0))
    shares = 1.0 / (1.0 + np.exp(-numbers[8 + n : 9 + 2 * n]))
    links = Links(*positive[:5], most=most, slowed=float(positive[5]))
    bandwidth = Bandwidth(*positive[6:8], limit=min(float(shares[0]), 0.95))
    own = [[1.0, 1.0], *np.exp(np.clip(numbers[9 + 2 * n :], -60.0, 60.0)).reshape(-1, 2).tolist()]
    by_kind = dict(zip(dict.fromkeys(overlap.kinds), map(tuple, own), strict=False))
    factors = tuple(by_kind[kind] for kind in overlap.kinds)
    return ChannelModel(overlap, links, bandwidth, tuple(positive[8:]), tuple(shares[1:]), factors)


def _logit(share: Array) -> Array:
    return np.log(share / (1.0 - share))
