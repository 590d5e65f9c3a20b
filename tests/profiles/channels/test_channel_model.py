"""Times of overlaps by channels and chunks: exact small cases, and a model that is fitted to another one's times."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dhelix.profiles.channels.channel_model import (
    Bandwidth,
    ChannelModel,
    ChannelSetting,
    Links,
    Overlap,
    played,
)
from dhelix.profiles.channels.model_fit import MeasuredTimes, columns, errors, fit, fit_grid
from dhelix.profiles.channels.nccl_setting import ChannelError

OVERLAP = Overlap(volumes=(3e7, 1e7), waves=(2.5, 7.2), sms=84)
MODEL = ChannelModel(
    OVERLAP, Links(1.5e10, 3e9, 1e5, 8e-6, 4e-6), Bandwidth(0.03, 4e5, 0.5), (1.2e-3, 2.5e-3), (0.3, 0.7)
)


def settings(*pairs: tuple[int, int]) -> tuple[ChannelSetting, ...]:
    return tuple(ChannelSetting(channels, kibibytes * 1024) for channels, kibibytes in pairs)


def measured(model: ChannelModel, *each: tuple[ChannelSetting, ...]) -> list[MeasuredTimes]:
    x, y = model.times(*columns(each))
    return [MeasuredTimes(one, tuple(x[:, n]), tuple(y[:, n])) for n, one in enumerate(each)]


def test_computations_advance_at_the_rate_beside_each_collective() -> None:
    """The first takes 2 s beside the first collective and half of that alone. Its collective ends after 1 s."""
    y = played([1.0, 1.0], [[np.array([2.0]), np.array([4.0])]] * 2, np.array([[1.0], [1.0]]))
    first = 1.0 + 1.0 + (0.5 - 1.0 / 4.0)  # half done after 1 s, a quarter beside the second collective, the rest alone
    np.testing.assert_allclose(y[:, 0], [first, 1.0])


def test_with_no_collective_left_a_computation_takes_its_time_alone() -> None:
    y = played([1.0, 3.0], [[np.array([2.0])]] * 2, np.array([[0.0]]))
    np.testing.assert_allclose(y[:, 0], [1.0, 3.0])


def test_more_channels_and_larger_chunks_speed_up_collectives_and_slow_down_computation() -> None:
    small, channels, chunks = measured(MODEL, settings((2, 128), (2, 128)), settings((8, 128), (8, 128)),
                                       settings((2, 1024), (2, 1024)))  # fmt: skip
    for more in (channels, chunks):
        assert sum(more.collectives) < sum(small.collectives)
    one = dataclasses.replace(MODEL, overlap=dataclasses.replace(OVERLAP, waves=(math.inf, math.inf)))
    beside = [one.beside(np.array([float(n)]), np.array([c]))[1, 0] for n, c in ((2, 1e5), (8, 1e5), (2, 1e6))]
    assert one.alone[1] < beside[0] < min(beside[1:])


def test_waves_are_whole() -> None:
    """2 waves on 84 SMs remain 2 waves as long as the blocks fit; then there are 3."""
    one = dataclasses.replace(MODEL, overlap=dataclasses.replace(OVERLAP, waves=(1.9, 1.0)), memory=(0.0, 0.0))
    beside = one.beside(np.array([4.0, 5.0]), np.array([1e5, 1e5]))[0]
    np.testing.assert_allclose(beside, [one.alone[0], 1.5 * one.alone[0]])


def test_an_unknown_launch_has_no_steps() -> None:
    one = dataclasses.replace(MODEL, overlap=dataclasses.replace(OVERLAP, waves=(math.inf, 1.0)), memory=(0.0, 0.0))
    np.testing.assert_allclose(one.beside(np.array([42.0]), np.array([1e5]))[0], [2 * one.alone[0]])


def test_a_fitted_model_predicts_settings_that_were_held_out() -> None:
    grid = [settings((a, b), (c, d)) for a, b, c, d in
            ((1, 64, 1, 64), (32, 4096, 8, 128), (8, 256, 2, 1024), (2, 1024, 16, 512), (16, 512, 4, 2048),
             (4, 2048, 32, 64), (3, 128, 12, 4096), (12, 64, 3, 256))]  # fmt: skip
    found = fit(OVERLAP, measured(MODEL, *grid))
    x, y = errors(found, measured(MODEL, settings((6, 300), (6, 300)), settings((10, 700), (3, 90))))
    assert np.abs(x).max() < 0.02 and np.abs(y).max() < 0.02


def test_more_channels_than_the_communicator_has_change_nothing() -> None:
    one = dataclasses.replace(MODEL, links=dataclasses.replace(MODEL.links, most=4))
    at_most, asked = measured(one, settings((4, 512), (4, 512)), settings((16, 512), (24, 512)))
    assert (at_most.collectives, at_most.computations) == (asked.collectives, asked.computations)


def test_a_type_of_collective_has_a_rate_of_its_own() -> None:
    """Half the rate of a channel doubles the time of one channel, which is far below the links."""
    links = Links(link=1e12, channel=1e9, half_chunk=1.0, per_chunk=1e-15, per_channel=1e-15)
    overlap = dataclasses.replace(OVERLAP, volumes=(1e7, 1e7), kinds=("all-gather", "reduce-scatter"))
    one = dataclasses.replace(MODEL, overlap=overlap, links=links, factors=((1.0, 1.0), (0.5, 1.0)))
    gather, scatter = one.collectives(np.ones((2, 1)), np.full((2, 1), 1e6))[:, 0]
    assert scatter == pytest.approx(2 * gather, rel=1e-3)


def test_a_fit_of_a_grid_finds_the_channels_that_run_and_the_types() -> None:
    """One time that is off by a half does not move the model."""
    overlap = dataclasses.replace(OVERLAP, waves=(math.inf, math.inf), kinds=("all-gather", "reduce-scatter"))
    links = dataclasses.replace(MODEL.links, most=4)
    true = dataclasses.replace(MODEL, overlap=overlap, links=links, factors=((1.0, 1.0), (0.7, 2.0)))
    grid = [settings((n, kib), (n, kib)) for n in (1, 2, 4, 8) for kib in (64, 256, 1024, 4096)]
    times = measured(true, *grid)
    off = dataclasses.replace(times[5], computations=(1.5 * times[5].computations[0], times[5].computations[1]))
    found = fit_grid(overlap, [*times[:5], off, *times[6:]])
    assert found.links.most == 4
    assert found.factors[0] == (1.0, 1.0) and found.factors[1][0] == pytest.approx(0.7, rel=0.05)
    x, y = errors(found, times)
    assert np.median(np.abs(x)) < 0.02 and np.median(np.abs(y)) < 0.02 and np.abs(y).max() < 0.1


def test_a_grid_in_which_all_channels_run_has_no_limit() -> None:
    grid = [settings((n, kib), (n, kib)) for n in (1, 4, 16) for kib in (64, 512, 4096)]
    assert fit_grid(OVERLAP, measured(MODEL, *grid)).links.most == math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ChannelSetting(0, 1024), "at least 1 channel"),
        (lambda: Overlap((), (1.0,), 84), "at least one collective"),
        (lambda: Overlap((1.0,), (0.0,), 84), "must be positive"),
        (lambda: Overlap((1.0, 1.0), (1.0,), 84, ("all-gather",)), "2 collectives cannot have 1 types"),
        (lambda: fit(OVERLAP, []), "at least one measured overlap"),
        (lambda: fit(OVERLAP, [MeasuredTimes(settings((1, 1)), (1.0,), (1.0,))]), r"\(1, 1, 1\), of the overlap"),
        (lambda: fit(OVERLAP, [MeasuredTimes(settings((1, 1), (1, 1)), (1.0, 0.0), (1.0, 1.0))]), "not positive"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(ChannelError, match=message):
        wrong()  # type: ignore[operator]
