"""The pair model: hand-computed timelines and rates, and what it learns from a made-up machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.profiles.estimates.contention import MIN_RATE, ContentionModel, measured_rates, pair_seconds
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey, Key, PairKey
from dhelix.profiles.profile import PairTiming, Section, Timing
from dhelix.tests.profiles import synthetic
from dhelix.tests.profiles.synthetic import attention, collective, fusion, gemm

GEMM, GATHER = gemm(8192, 7168, 4096), collective("all-gather", 64)
SECONDS = st.floats(1e-6, 1e-1)
RATE = st.floats(MIN_RATE, 1.0)


def timed(first: float, second: float, rates: tuple[float, float]) -> PairTiming:
    """The timing of a pair that follows the model exactly."""
    return PairTiming(*pair_seconds(first, second, rates), first_alone=first, second_alone=second)


def test_two_phases() -> None:
    assert pair_seconds(400, 300, (0.8, 0.3)) == pytest.approx((650, 500, 650))
    assert pair_seconds(300, 400, (0.3, 0.8)) == pytest.approx((650, 650, 500))


def test_nothing_disturbed_takes_as_long_as_the_longer_side() -> None:
    assert pair_seconds(400, 300, (1.0, 1.0)) == (400, 400, 300)


def test_a_starved_second_side_runs_after_the_first() -> None:
    timing = PairTiming(seconds=700, first=400, second=700, first_alone=400, second_alone=300)
    assert measured_rates(timing) == (1.0, MIN_RATE)
    assert pair_seconds(400, 300, (1.0, MIN_RATE))[0] == pytest.approx(700, rel=0.01)


def test_a_side_that_starts_even_later_has_the_least_rate() -> None:
    assert measured_rates(PairTiming(720, 400, 720, 400, 300)) == (1.0, MIN_RATE)


def test_sides_that_end_together() -> None:
    assert measured_rates(PairTiming(500, 500, 500, 400, 300)) == pytest.approx((0.8, 0.6))


def test_faster_than_alone_counts_as_undisturbed() -> None:
    assert measured_rates(PairTiming(390, 390, 290, 400, 300)) == (1.0, 1.0)


def test_nothing_beside_nothing() -> None:
    assert pair_seconds(0.0, 5.0, (0.5, 0.5)) == (5.0, 0.0, 5.0)


@given(SECONDS, SECONDS, RATE, RATE)
def test_rates_come_back_from_the_pair_they_make(first: float, second: float, one: float, two: float) -> None:
    timing = timed(first, second, (one, two))
    again = measured_rates(timing)
    assert pair_seconds(first, second, again) == pytest.approx((timing.seconds, timing.first, timing.second), rel=1e-3)


@given(SECONDS, SECONDS, RATE, RATE)
def test_a_pair_is_no_better_than_overlap_and_no_worse_than_turns_if_rates_add_up(
    first: float, second: float, one: float, two: float
) -> None:
    seconds = pair_seconds(first, second, (one, two))[0]
    assert seconds >= max(first, second) * (1 - 1e-9)
    if one + two >= 1.0:
        assert seconds <= (first + second) * (1 + 1e-9)
        assert timed(first, second, (one, two)).oef >= -1e-6


@pytest.mark.parametrize(
    ("first", "second", "rates"),
    [
        (GEMM, GATHER, (H200.compute_rate, H200.communication_rate)),
        (GATHER, GEMM, (H200.communication_rate, H200.compute_rate)),
        (GEMM, collective("all-gather", 64, nodes=2), (H200.inter_compute_rate, H200.inter_communication_rate)),
        (GEMM, attention(8), (1.0, MIN_RATE)),
        (GATHER, collective("all-to-all", 64), (1.0, MIN_RATE)),
        (GATHER, collective("all-to-all", 64, nodes=2), (1.0, 1.0)),
    ],
)
def test_without_measured_pairs_the_hardware_answers(first: Key, second: Key, rates: tuple[float, float]) -> None:
    model = ContentionModel.fit(Section("default"), H200)
    assert model.rates(first, 1e-3, second, 1e-3) == rates
    assert not model.near(first, 1e-3, second, 1e-3) and not model.knows(first, second)


def one_pair(rates: tuple[float, float]) -> Section:
    return Section("default", pairs={PairKey(GEMM, GATHER): timed(4e-4, 3e-4, rates)})


@pytest.mark.parametrize("rates", [(0.8, 0.3), (0.95, 0.5), (1.0, MIN_RATE), (0.5, 0.9)])
def test_one_measured_pair_is_reproduced(rates: tuple[float, float]) -> None:
    section = one_pair(rates)
    model = ContentionModel.fit(section, H200)
    expected = section.pairs[PairKey(GEMM, GATHER)]
    assert model.pair(GEMM, 4e-4, GATHER, 3e-4)[0] == pytest.approx(expected.seconds, rel=0.03)


def test_typical_rates_are_those_of_collectives_that_start_first() -> None:
    far = collective("all-gather", 64, nodes=2)
    pairs = {
        PairKey(GATHER, GEMM): timed(3e-4, 4e-4, (0.6, 0.9)),
        PairKey(GATHER, attention(8)): timed(3e-4, 4e-4, (0.6, 0.9)),
        PairKey(far, GEMM): timed(3e-4, 4e-4, (1.0, 0.95)),
        PairKey(GEMM, GATHER): timed(4e-4, 3e-4, STARVED),
    }
    model = ContentionModel.fit(Section("default", pairs=pairs), H200)
    assert model.typical(between_nodes=False) == pytest.approx((0.9, 0.6), abs=0.05)
    assert model.typical(between_nodes=True) == pytest.approx((0.95, 1.0), abs=0.05)
    assert ContentionModel.fit(one_pair(STARVED), H200).typical(between_nodes=False) is None


def test_launch_order_is_not_mixed_up() -> None:
    model = ContentionModel.fit(one_pair((1.0, MIN_RATE)), H200)
    assert model.rates(GATHER, 3e-4, GEMM, 4e-4) == (H200.communication_rate, H200.compute_rate)


def test_like_pairs_are_near_and_unlike_ones_are_not() -> None:
    model = ContentionModel.fit(one_pair((0.8, 0.3)), H200)
    assert model.near(gemm(8192, 6144, 4096), 3.5e-4, GATHER, 3e-4)
    assert not model.near(fusion(8192 * 4096), 4e-4, GATHER, 3e-4)
    assert not model.near(gemm(8192, 7168, 64), 4e-6, GATHER, 3e-4)
    assert not model.near(gemm(8192, 7168, 4096, library="triton"), 4e-4, GATHER, 3e-4)
    assert not model.near(GEMM, 4e-4, replace(GATHER, implementation="symmetric"), 3e-4)


STARVED, FREE = (1.0, MIN_RATE), (1.0, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        fusion(8192 * 4096 * 8),
        attention(8),
        gemm(8192, 7168, 4096, library="triton"),
        gemm(8192, 7168, 4096, library="triton:loop-add-1f0c"),
    ],
)
def test_kinds_and_libraries_are_told_apart(other: Key) -> None:
    """The all-gather starves next to cuBLAS's GEMM, but not next to the other operator. The model keeps both apart."""
    pairs = {
        PairKey(GEMM, GATHER): timed(4e-4, 3e-4, STARVED),
        PairKey(other, GATHER): timed(4e-4, 3e-4, FREE),
    }
    model = ContentionModel.fit(Section("default", pairs=pairs), H200)
    assert model.pair(GEMM, 4e-4, GATHER, 3e-4)[0] > 6e-4
    assert model.pair(other, 4e-4, GATHER, 3e-4)[0] < 4.6e-4


def test_layouts_and_epilogues_of_one_library_are_alike() -> None:
    model = ContentionModel.fit(one_pair(STARVED), H200)
    assert model.near(gemm(8192, 7168, 4096, "tn", "cublaslt:bias"), 4e-4, GATHER, 3e-4)


def test_a_pair_is_judged_by_what_its_sides_took_alone_beside_it() -> None:
    """The GEMM is twice as fast in one executable as in the other, and undisturbed in both."""
    pairs = {
        PairKey(GEMM, GATHER): timed(4e-4, 3e-4, FREE),
        PairKey(GEMM, collective("reduce-scatter", 64)): timed(2e-4, 3e-4, FREE),
    }
    section = Section("default", {GEMM: Timing(9e-4)}, {GATHER: Timing(9e-4)}, pairs)
    assert min(ContentionModel.fit(section, H200).rates(GEMM, 3e-4, GATHER, 3e-4)) > 0.95


def test_a_pair_with_nothing_on_one_side_says_nothing() -> None:
    pairs = {PairKey(GEMM, GATHER): PairTiming(4e-4, 4e-4, 0.0, 4e-4, 0.0)}
    assert not ContentionModel.fit(Section("default", pairs=pairs), H200).knows(GEMM, GATHER)


def test_other_meshes_are_less_alike() -> None:
    """Two measured all-gathers take equally long. The one on the query's mesh counts more."""
    near, far = collective("all-gather", 64, gpus=4), collective("all-gather", 16, gpus=2, nodes=2)
    pairs = {PairKey(GEMM, near): timed(4e-4, 3e-4, FREE), PairKey(GEMM, far): timed(4e-4, 3e-4, STARVED)}
    model = ContentionModel.fit(Section("default", pairs=pairs), H200)
    assert model.rates(GEMM, 4e-4, CollectiveKey("all-gather", 80 << 20, 4), 3e-4)[1] > 0.9
    assert model.rates(GEMM, 4e-4, CollectiveKey("all-gather", 20 << 20, 2, nodes=2), 3e-4)[1] < 0.1


def test_order_of_the_data_does_not_matter() -> None:
    section = synthetic.section(operators=synthetic.OPERATORS[:6], collectives=synthetic.COLLECTIVES[:6])
    turned = replace(section, pairs=dict(reversed(list(section.pairs.items()))))
    query = gemm(8192, 3072, 4096), 3e-4, collective("all-gather", 40), 2e-4
    assert ContentionModel.fit(section, H200).rates(*query) == ContentionModel.fit(turned, H200).rates(*query)


def test_more_communication_is_never_shorter() -> None:
    section = synthetic.section()
    model = ContentionModel.fit(section, H200)
    seconds = [
        model.pair(GEMM, section.operators[GEMM].seconds, collective("all-gather", mib), mib * 2.5e-6 + 1e-5)[0]
        for mib in range(8, 449, 40)
    ]
    assert all(later > 0.99 * earlier for earlier, later in zip(seconds, seconds[1:], strict=False))
    assert seconds[-1] > 1.5 * seconds[0]
