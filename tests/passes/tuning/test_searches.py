"""Searches for the settings of an overlap, on a model whose optimum brute force finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from dhelix.passes.tuning.descent import alone, descend
from dhelix.passes.tuning.greedy import greedy
from dhelix.passes.tuning.guided_search import tune
from dhelix.passes.tuning.measurements import LimitReached, Measurements
from dhelix.passes.tuning.space import Settings, Space, neighbours
from dhelix.profiles.channels.channel_model import Bandwidth, ChannelModel, ChannelSetting, Links, Overlap
from dhelix.profiles.channels.model_fit import MeasuredTimes, columns
from dhelix.profiles.channels.nccl_setting import ChannelError

SPACE = Space((1, 2, 4, 8, 16), (2**16, 2**18, 2**20))
NCCL = (ChannelSetting(8, 2**20),) * 2
LARGE = (ChannelSetting(16, 2**20),) * 2


def model(seconds: float) -> ChannelModel:
    """Two collectives beside three computations that take `seconds` alone, together."""
    overlap = Overlap((4e7, 2e7), (3.3, 8.8, 2.1), 84)
    return ChannelModel(
        overlap, Links(2e10, 2.5e9, 2e5, 1e-5, 4e-6), Bandwidth(0.05, 5e5, 0.6),
        tuple(part * seconds for part in (0.5, 0.3, 0.2)), (0.2, 0.6, 0.8),
    )  # fmt: skip


def measurements(of: ChannelModel, noise: float = 0.0, limit: int | None = None) -> Measurements:
    draw = np.random.default_rng(0)

    def run(settings: Settings) -> tuple[list[float], list[float]]:
        x, y = (part[:, 0] * (1 + noise * draw.standard_normal(len(part))) for part in of.times(*columns([settings])))
        return list(x), list(y)

    return Measurements(run, noise, limit)


def true(of: ChannelModel, settings: Settings) -> float:
    return max(float(part.sum()) for part in of.times(*columns([settings])))


def optimum(of: ChannelModel) -> float:
    return min(true(of, pair) for pair in itertools.product(SPACE.all(), repeat=2))


@pytest.mark.parametrize("seconds", [2e-3, 4e-3, 6e-3])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_guided_search_finds_the_optimum(seconds: float, noise: float) -> None:
    """Of 225 settings, it measures some 15."""
    of = model(seconds)
    seen = measurements(of, noise)
    found = tune(seen, of.overlap, SPACE)
    assert true(of, found.settings) <= optimum(of) * (1.0 + max(2 * noise, 0.005))
    assert seen.count <= 30 + 30 * bool(noise)


def test_where_computation_takes_longer_the_smallest_settings_stay() -> None:
    """They cost computation least, so one measurement suffices (Lagom section 3.4, condition 1)."""
    of = model(1.0)
    for search in (lambda m: tune(m, of.overlap, SPACE), lambda m: greedy(m, SPACE, 2)):
        seen = measurements(of)
        assert search(seen).settings == (SPACE.smallest,) * 2 and seen.count == 1


def test_the_papers_search_lets_a_collective_grow_until_communication_is_hidden() -> None:
    of = model(4e-3)
    seen = measurements(of)
    found = greedy(seen, SPACE, 2)
    assert found.seconds < true(of, (SPACE.smallest,) * 2) and seen.count < 15
    assert tune(measurements(of), of.overlap, SPACE).seconds <= found.seconds


def test_each_collective_alone_takes_what_makes_it_fastest() -> None:
    of = model(4e-3)
    found = alone(measurements(of), SPACE, NCCL)
    fastest = [min(of.times(*columns([pair]))[0][j, 0] for pair in itertools.product(SPACE.all(), repeat=2))
               for j in range(2)]  # fmt: skip
    np.testing.assert_allclose(found.collectives, fastest)


def test_descent_ends_where_no_neighbour_is_faster() -> None:
    of = model(4e-3)
    found = descend(measurements(of), SPACE, NCCL)
    assert found.seconds <= min(true(of, other) for other in neighbours(found.settings, SPACE))


@pytest.mark.parametrize("limit", [1, 3, 9])
@pytest.mark.parametrize(
    "search",
    [
        lambda m, of: tune(m, of.overlap, SPACE),
        lambda m, of: greedy(m, SPACE, 2),
        lambda m, of: descend(m, SPACE, NCCL),
        lambda m, of: alone(m, SPACE, NCCL),
    ],
)
def test_a_search_ends_when_no_more_may_be_measured(
    search: Callable[[Measurements, ChannelModel], MeasuredTimes], limit: int
) -> None:
    of = model(4e-3)
    seen = measurements(of, limit=limit)
    found = search(seen, of)
    assert found.settings in seen and seen.count <= limit


def test_measurements_are_made_once_and_averaged_when_repeated() -> None:
    times = iter([(2.0, 1.0), (4.0, 1.0)])
    seen = Measurements(lambda settings: tuple([value] for value in next(times)))  # type: ignore[arg-type, return-value]
    assert seen.of(NCCL).seconds == seen.of(NCCL).seconds == 2.0 and seen.count == 1
    assert seen.again(NCCL).seconds == 3.0 and seen.best.count == 2


def test_no_more_than_the_limit_is_measured() -> None:
    seen = measurements(model(1e-3), limit=1)
    seen.of(NCCL)
    assert seen.of(NCCL).settings == NCCL
    with pytest.raises(LimitReached):
        seen.of(LARGE)


def test_lucky_measurements_are_repeated() -> None:
    """The first time of LARGE is lucky. Measured again, NCCL's is less."""
    draws = {NCCL: iter([1.005, 1.005, 1.005, 1.005]), LARGE: iter([1.0, 1.02, 1.02, 1.02])}
    seen = Measurements(lambda settings: ([next(draws[settings])], [0.5]), noise=0.01)
    assert seen.settled([NCCL, LARGE], 3).settings == NCCL


def test_steps_of_algorithm_2_grow_both_values() -> None:
    assert SPACE.grown(ChannelSetting(2, 2**16), 0.1) == ChannelSetting(4, 2**18)
    assert SPACE.grown(ChannelSetting(4, 2**16), 1.0) == ChannelSetting(8, 2**18)
    assert SPACE.grown(SPACE.largest, 1.0) == SPACE.largest


@pytest.mark.parametrize("values", [(), (0, 1), (2, 2), (4, 2)])
def test_a_space_needs_ascending_values(values: tuple[int, ...]) -> None:
    with pytest.raises(ChannelError, match="positive and ascending"):
        Space(values, (1024,))
