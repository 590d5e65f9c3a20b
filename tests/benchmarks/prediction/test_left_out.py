"""Predictions of left-out shapes on a made-up machine."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dhelix.benchmarks.prediction.left_out import HeldOut, evaluate
from dhelix.profiles.estimates.contention import ContentionModel, pair_seconds
from dhelix.profiles.hardware import H200, Hardware
from dhelix.profiles.keys import OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Section
from dhelix.tests.profiles import synthetic
from dhelix.tests.profiles.synthetic import attention, collective, fusion, gemm

type Results = Mapping[tuple[str, str], HeldOut]


def held_out(section: Section) -> Results:
    return {(result.left_out, result.roles): result for result in evaluate(section, H200)}


@pytest.fixture(scope="module")
def results() -> Results:
    return held_out(synthetic.section(seed=1))


@pytest.mark.parametrize("roles", ["all", "compute + collective", "collective + compute"])
@pytest.mark.parametrize("left_out", ["operators", "collectives"])
def test_unseen_shapes_are_predicted_better_than_by_simple_rules(results: Results, left_out: str, roles: str) -> None:
    result = results[left_out, roles]
    assert result.verdict == "best"
    assert result.seconds["model"] < 0.75 * min(result.seconds[m] for m in ("max", "sum", "constant"))
    assert result.relative["model"] < 0.05


def test_where_shapes_do_not_matter_the_model_is_about_as_good_as_a_constant(results: Results) -> None:
    result = results["operators", "compute + compute"]
    assert result.seconds["model"] < 1.2 * min(result.seconds.values())


def test_every_shape_and_size_is_left_out_once(results: Results) -> None:
    assert results["operators", "all"].shapes == len({(k.kind, k.sizes) for k in synthetic.OPERATORS})
    assert results["collectives", "all"].shapes == len({k.bytes for k in synthetic.COLLECTIVES})
    assert results["operators", "all"].pairs > results["collectives", "all"].pairs


def watch_training(section: Section, monkeypatch: pytest.MonkeyPatch) -> list[Section]:
    """The sections that models are fitted on when `section` is evaluated."""
    trained: list[Section] = []
    fit = ContentionModel.fit

    def watched(training: Section, hardware: Hardware) -> ContentionModel:
        trained.append(training)
        return fit(training, hardware)

    monkeypatch.setattr(ContentionModel, "fit", watched)
    evaluate(section, H200)
    return trained


def test_a_left_out_shape_is_in_no_training_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    section = synthetic.section(operators=synthetic.OPERATORS[:4], collectives=synthetic.COLLECTIVES[:3])
    sizes = {key.sizes for key in section.operators}
    trained = watch_training(section, monkeypatch)
    seen = [{k.sizes for p in t.pairs for k in (p.first, p.second) if isinstance(k, OperatorKey)} for t in trained]
    assert sorted(len(sizes - known) for known in seen) == [0, 0, 0, 1, 1, 1, 1]


SMALL, LARGE = collective("all-gather", 64), collective("all-gather", 128)
SHARED = fusion(1 << 24)
SMALL_ONLY, LARGE_ONLY = (gemm(8192, 4096, 1024), attention(8)), (gemm(8192, 8192, 2048), attention(16))


def two_models() -> Section:
    """Two train steps with all-gathers of different sizes. One fusion belongs to both."""
    small = synthetic.section(operators=(*SMALL_ONLY, SHARED), collectives=[SMALL, collective("all-to-all", 64)])
    return small.merged(synthetic.section(operators=(*LARGE_ONLY, SHARED), collectives=[LARGE]))


def test_a_model_is_left_out_with_all_that_its_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    section = two_models()
    trained = watch_training(section, monkeypatch)[-2:]
    operators = [{k for p in t.pairs for k in (p.first, p.second) if isinstance(k, OperatorKey)} for t in trained]
    assert operators == [set(SMALL_ONLY), set(LARGE_ONLY)], "what both run would tell the one of the other"


def test_what_two_models_share_is_predicted_in_both() -> None:
    section, result = two_models(), held_out(two_models())["models", "all"]
    assert result.shapes == 2
    shared = sum(SHARED in (pair.first, pair.second) for pair in section.pairs)
    assert result.pairs == len(section.pairs) + shared


def test_a_collective_of_several_groups_that_every_operator_met_tells_no_model() -> None:
    base = collective("all-gather", 64, gpus=2, groups=2)
    section = two_models().merged(synthetic.section(operators=LARGE_ONLY, collectives=[base]))
    assert held_out(section)["models", "all"].shapes == 2


def test_one_model_alone_cannot_be_left_out(results: Results) -> None:
    one = synthetic.section(operators=SMALL_ONLY, collectives=[SMALL])
    assert not any(left_out == "models" for left_out, _ in held_out(one))


def test_perfect_overlap_and_its_opposite_are_recognised() -> None:
    section = synthetic.section(noise=0.0, operators=synthetic.OPERATORS[:5], collectives=synthetic.COLLECTIVES[:4])
    for rates, method in (((1.0, 1.0), "max"), ((1.0, 1e-9), "sum")):
        pairs = {}
        for key, timing in section.pairs.items():
            alone = timing.first_alone, timing.second_alone
            pairs[key] = PairTiming(*pair_seconds(*alone, rates), *alone)
        result = held_out(replace(section, pairs=pairs))["operators", "all"]
        assert result.seconds[method] == pytest.approx(0.0, abs=1e-9)
        assert result.relative["model"] < 0.03


def result(gain: float, gain_error: float | None) -> HeldOut:
    return HeldOut("default", "operators", "all", 9, 90, 1e-4, {}, {}, gain, gain_error)


@pytest.mark.parametrize(
    ("gain", "gain_error", "verdict"),
    [(3e-6, 1e-6, "best"), (-3e-6, 1e-6, "worse"), (1e-6, 1e-6, "even"), (-1e-6, 1e-6, "even"), (1.0, None, "even")],
)
def test_a_verdict_needs_two_standard_errors(gain: float, gain_error: float | None, verdict: str) -> None:
    assert result(gain, gain_error).verdict == verdict


def test_a_few_operators_are_no_verdict() -> None:
    few = synthetic.section(operators=synthetic.OPERATORS[:4], collectives=synthetic.COLLECTIVES)
    assert {r.verdict for r in evaluate(few, H200)} == {"even"}


def test_results_are_data_for_json(results: Results) -> None:
    written = json.loads(json.dumps(results["operators", "all"].to_json(), allow_nan=False))
    assert written["verdict"] == "best" and set(written["seconds"]) == {"model", "constant", "max", "sum"}
    assert written["gain"] > 2 * written["gain_error"] > 0.0


def test_nothing_to_leave_out() -> None:
    assert evaluate(Section("default"), H200) == ()
    timing = PairTiming(*pair_seconds(4e-4, 3e-4, (0.8, 0.3)), first_alone=4e-4, second_alone=3e-4)
    assert evaluate(Section("default", pairs={PairKey(gemm(8192, 7168, 4096), SMALL): timing}), H200) == ()
