"""The pair model: timelines and rates by hand, and what it learns from a made-up machine."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.profiles import contention
from dhelix.profiles.contention import MIN_RATE, ContentionModel, measured_rates, overlap_effectiveness, pair_seconds
from dhelix.profiles.hardware import H200
from dhelix.profiles.held_out import HeldOut, evaluate
from dhelix.profiles.keys import Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Section, Timing
from dhelix.tests.profiles import synthetic
from dhelix.tests.profiles.synthetic import attention, collective, fusion, gemm

GEMM, GATHER = gemm(8192, 7168, 4096), collective("all-gather", 64)
SECONDS = st.floats(1e-6, 1e-1)
RATE = st.floats(MIN_RATE, 1.0)


def test_two_phases() -> None:
    assert pair_seconds(400, 300, (0.8, 0.3)) == pytest.approx((650, 500, 650))
    assert pair_seconds(300, 400, (0.3, 0.8)) == pytest.approx((650, 650, 500))


def test_nothing_disturbed_takes_as_long_as_the_longer_side() -> None:
    assert pair_seconds(400, 300, (1.0, 1.0)) == (400, 400, 300)


def test_a_starved_second_side_runs_after_the_first() -> None:
    timing = PairTiming(seconds=700, first=400, second=700)
    assert measured_rates(400, 300, timing) == (1.0, MIN_RATE)
    assert pair_seconds(400, 300, (1.0, MIN_RATE))[0] == pytest.approx(700, rel=0.01)


def test_a_side_that_starts_even_later_has_the_least_rate() -> None:
    assert measured_rates(400, 300, PairTiming(720, 400, 720)) == (1.0, MIN_RATE)


def test_sides_that_end_together() -> None:
    assert measured_rates(400, 300, PairTiming(500, 500, 500)) == pytest.approx((0.8, 0.6))


def test_faster_than_alone_counts_as_undisturbed() -> None:
    assert measured_rates(400, 300, PairTiming(390, 390, 290)) == (1.0, 1.0)


def test_nothing_beside_nothing() -> None:
    assert pair_seconds(0.0, 5.0, (0.5, 0.5)) == (5.0, 0.0, 5.0)


@given(SECONDS, SECONDS, RATE, RATE)
def test_rates_come_back_from_the_pair_they_make(first: float, second: float, one: float, two: float) -> None:
    timing = PairTiming(*pair_seconds(first, second, (one, two)))
    again = measured_rates(first, second, timing)
    assert pair_seconds(first, second, again) == pytest.approx((timing.seconds, timing.first, timing.second), rel=1e-3)


@given(SECONDS, SECONDS, RATE, RATE)
def test_a_pair_is_no_better_than_overlap_and_no_worse_than_turns_if_rates_add_up(
    first: float, second: float, one: float, two: float
) -> None:
    seconds = pair_seconds(first, second, (one, two))[0]
    assert seconds >= max(first, second) * (1 - 1e-9)
    if one + two >= 1.0:
        assert seconds <= (first + second) * (1 + 1e-9)
        assert overlap_effectiveness(first, second, seconds) >= -1e-6


def test_overlap_effectiveness_is_the_papers() -> None:
    assert overlap_effectiveness(4, 3, 4) == 1.0
    assert overlap_effectiveness(4, 3, 7) == 0.0
    assert overlap_effectiveness(4, 3, 5.5) == 0.5
    assert overlap_effectiveness(4, 3, 8) < 0.0


@pytest.mark.parametrize(
    ("first", "second", "rates"),
    [
        (GEMM, GATHER, (H200.compute_rate, H200.communication_rate)),
        (GATHER, GEMM, (H200.communication_rate, H200.compute_rate)),
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
    timing = PairTiming(*pair_seconds(4e-4, 3e-4, rates))
    return Section("default", {GEMM: Timing(4e-4)}, {GATHER: Timing(3e-4)}, {PairKey(GEMM, GATHER): timing})


@pytest.mark.parametrize("rates", [(0.8, 0.3), (0.95, 0.5), (1.0, MIN_RATE), (0.5, 0.9)])
def test_one_measured_pair_is_reproduced(rates: tuple[float, float]) -> None:
    section = one_pair(rates)
    model = ContentionModel.fit(section, H200)
    expected = section.pairs[PairKey(GEMM, GATHER)]
    assert model.pair(GEMM, 4e-4, GATHER, 3e-4)[0] == pytest.approx(expected.seconds, rel=0.03)


def test_launch_order_is_not_mixed_up() -> None:
    model = ContentionModel.fit(one_pair((1.0, MIN_RATE)), H200)
    assert model.rates(GATHER, 3e-4, GEMM, 4e-4) == (H200.communication_rate, H200.compute_rate)


def test_like_pairs_are_near_and_unlike_ones_are_not() -> None:
    model = ContentionModel.fit(one_pair((0.8, 0.3)), H200)
    assert model.near(gemm(8192, 6144, 4096), 3.5e-4, GATHER, 3e-4)
    assert not model.near(fusion(8192 * 4096), 4e-4, GATHER, 3e-4)
    assert not model.near(gemm(8192, 7168, 64), 4e-6, GATHER, 3e-4)
    assert not model.near(GEMM, 4e-4, replace(GATHER, implementation="symmetric"), 3e-4)


def test_kinds_are_told_apart() -> None:
    """All-gathers starve beside GEMMs and not beside fusions; both measured, both remembered."""
    other = fusion(8192 * 4096 * 8)
    starved, free = PairTiming(*pair_seconds(4e-4, 3e-4, (1.0, MIN_RATE))), PairTiming(4e-4, 4e-4, 3e-4)
    section = Section(
        "default",
        {GEMM: Timing(4e-4), other: Timing(4e-4)},
        {GATHER: Timing(3e-4)},
        {PairKey(GEMM, GATHER): starved, PairKey(other, GATHER): free},
    )
    model = ContentionModel.fit(section, H200)
    assert model.pair(GEMM, 4e-4, GATHER, 3e-4)[0] > 5.5e-4
    assert model.pair(other, 4e-4, GATHER, 3e-4)[0] < 5e-4


def test_pairs_without_times_alone_are_left_out() -> None:
    section = replace(one_pair((0.8, 0.3)), collectives={})
    assert not ContentionModel.fit(section, H200).knows(GEMM, GATHER)
    assert ContentionModel.fit(section, H200, lambda key: 3e-4).knows(GEMM, GATHER)


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


def held_out(section: Section) -> dict[tuple[str, str], HeldOut]:
    def solo(key: Key) -> float | None:
        timing = section.solo(key)
        return timing.seconds if timing else None

    return {(result.left_out, result.roles): result for result in evaluate(section, H200, solo)}


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], HeldOut]:
    return held_out(synthetic.section(seed=1))


@pytest.mark.parametrize("roles", ["all", "compute + collective", "collective + compute"])
@pytest.mark.parametrize("left_out", ["operators", "collectives"])
def test_unseen_shapes_are_predicted_better_than_by_simple_rules(
    results: dict[tuple[str, str], HeldOut], left_out: str, roles: str
) -> None:
    result = results[left_out, roles]
    assert result.model_is_best
    assert result.seconds["model"] < 0.75 * min(result.seconds[m] for m in ("max", "sum", "constant"))
    assert result.relative["model"] < 0.05


def test_where_shapes_do_not_matter_the_model_is_as_good_as_a_constant(
    results: dict[tuple[str, str], HeldOut],
) -> None:
    result = results["operators", "compute + compute"]
    assert result.seconds["model"] < 1.1 * min(result.seconds.values())


def test_every_shape_and_size_is_left_out_once(results: dict[tuple[str, str], HeldOut]) -> None:
    assert results["operators", "all"].shapes == len({(k.kind, k.sizes) for k in synthetic.OPERATORS})
    assert results["collectives", "all"].shapes == len({k.bytes for k in synthetic.COLLECTIVES})
    assert results["operators", "all"].pairs > results["collectives", "all"].pairs


def test_a_left_out_shape_is_in_no_training_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    section = synthetic.section(operators=synthetic.OPERATORS[:4], collectives=synthetic.COLLECTIVES[:3])
    trained: list[Section] = []
    fit = ContentionModel.fit

    def watched(training: Section, *rest: object) -> ContentionModel:
        trained.append(training)
        return fit(training, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(contention.ContentionModel, "fit", watched)
    held_out(section)
    sizes = {key.sizes for key in section.operators}
    seen = [{k.sizes for p in t.pairs for k in (p.first, p.second) if isinstance(k, OperatorKey)} for t in trained]
    left = [sizes - known for known in seen]
    assert sorted(map(len, left)) == [0, 0, 0, 1, 1, 1, 1]


def test_perfect_overlap_and_its_opposite_are_recognised() -> None:
    section = synthetic.section(noise=0.0, operators=synthetic.OPERATORS[:5], collectives=synthetic.COLLECTIVES[:4])
    for rates, method in (((1.0, 1.0), "max"), ((1.0, 1e-9), "sum")):
        pairs = {}
        for key in section.pairs:
            first, second = section.solo(key.first), section.solo(key.second)
            assert first and second
            pairs[key] = PairTiming(*pair_seconds(first.seconds, second.seconds, rates))
        result = held_out(replace(section, pairs=pairs))["operators", "all"]
        assert result.seconds[method] == pytest.approx(0.0, abs=1e-9)
        assert result.relative["model"] < 0.03


def test_results_are_data_for_json(results: dict[tuple[str, str], HeldOut]) -> None:
    written = results["operators", "all"].to_json()
    assert written["model_is_best"] is True and set(written["seconds"]) == {"model", "constant", "max", "sum"}
    assert all(math.isfinite(v) for v in written["relative"].values())


def test_nothing_to_leave_out() -> None:
    assert evaluate(Section("default"), H200, lambda key: None) == ()
    assert held_out(one_pair((0.8, 0.3))) == {}
