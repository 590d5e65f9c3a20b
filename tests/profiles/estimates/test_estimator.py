"""The sources of estimates, and the estimates that each source gives."""

from dataclasses import replace

import pytest

from dhelix.errors import DhelixError
from dhelix.profiles.estimates.contention import MIN_RATE, pair_seconds
from dhelix.profiles.estimates.estimator import Estimator, PairEstimate, Source, hardware_of
from dhelix.profiles.estimates.interpolation import roofline_seconds
from dhelix.profiles.hardware import H200, H200_NO_P2P
from dhelix.profiles.keys import Key, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section, Timing
from dhelix.tests.profiles import synthetic
from dhelix.tests.profiles.synthetic import collective, fusion, gemm

GEMM, GATHER = gemm(8192, 7168, 4096), collective("all-gather", 64)
PAIR = PairTiming(*pair_seconds(4e-4, 3e-4, (0.7, 0.4)), first_alone=4e-4, second_alone=3e-4)
DEFAULT = Section("default", {GEMM: Timing(4e-4, 1e-5)}, {GATHER: Timing(3e-4)}, {PairKey(GEMM, GATHER): PAIR})


def estimator(*sections: Section, setting: str = "default") -> Estimator:
    return Estimator(Profile("H200", "nvlink", sections={s.setting: s for s in sections}), H200, setting)


def test_what_was_measured_is_given_back() -> None:
    found = estimator(DEFAULT)
    assert found.operator(GEMM).seconds == 4e-4 and found.operator(GEMM).spread == 1e-5
    assert found.collective(GATHER).seconds == 3e-4
    assert {found.solo(GEMM).source, found.solo(GATHER).source} == {Source.MEASURED}
    assert found.pair(GEMM, GATHER) == PairEstimate(PAIR.seconds, PAIR.first, PAIR.second, Source.MEASURED)
    assert found.rates(GEMM, GATHER) == pytest.approx((0.7, 0.4))


@pytest.mark.parametrize("key", [gemm(8192, 6144, 4096), collective("all-gather", 100)])
def test_near_relatives_make_an_interpolation(key: Key) -> None:
    assert estimator(DEFAULT).solo(key).source is Source.INTERPOLATED


@pytest.mark.parametrize("key", [GEMM, GATHER])
def test_another_setting_is_as_good_as_an_interpolation(key: Key) -> None:
    other = estimator(DEFAULT, setting="connections1").solo(key)
    assert (other.seconds, other.source) == (estimator(DEFAULT).solo(key).seconds, Source.INTERPOLATED)


def test_an_operator_over_another_link_comes_after_this_links_settings_and_before_relatives() -> None:
    near = gemm(8192, 6144, 4096)
    profile = Profile(
        "H200", "no-p2p", sections={"default": DEFAULT}, elsewhere={GEMM: Timing(9e-4), near: Timing(7e-4)}
    )
    found = Estimator(profile, H200_NO_P2P, "connections1")
    assert found.solo(GEMM).seconds == 4e-4
    assert (found.solo(near).seconds, found.solo(near).source) == (7e-4, Source.INTERPOLATED)


def test_the_own_setting_comes_before_default_and_default_before_others() -> None:
    sections = [
        Section(name, {GEMM: Timing(t)}) for name, t in (("zz", 1e-4), ("default", 2e-4), ("connections1", 3e-4))
    ]
    assert estimator(*sections, setting="connections1").solo(GEMM).seconds == 3e-4
    assert estimator(*sections, setting="command-buffers").solo(GEMM).seconds == 2e-4


def test_farther_relatives_calibrate_a_guess() -> None:
    slow = Section("default", {GEMM: Timing(3 * roofline_seconds(GEMM, H200))})
    other = gemm(512, 512, 512, "tn")
    guess = estimator(slow).solo(other)
    assert guess.source is Source.GUESS and guess.spread == guess.seconds
    assert guess.seconds == pytest.approx(3 * roofline_seconds(other, H200))


@pytest.mark.parametrize("key", [GEMM, GATHER, fusion(1 << 24)])
def test_without_a_profile_the_roofline_answers(key: Key) -> None:
    guess = Estimator(None, H200).solo(key)
    assert (guess.seconds, guess.source) == (roofline_seconds(key, H200), Source.GUESS)


def test_without_a_profile_pairs_run_at_the_hardwares_rates() -> None:
    found = Estimator(None, H200)
    expected = pair_seconds(found.solo(GEMM).seconds, found.solo(GATHER).seconds, (0.8, 0.3))
    assert found.pair(GEMM, GATHER) == PairEstimate(*expected, Source.GUESS)


def test_like_pairs_make_an_interpolation_and_the_worst_source_counts() -> None:
    found = estimator(DEFAULT)
    assert found.pair(gemm(8192, 6144, 4096), GATHER).source is Source.INTERPOLATED
    assert found.rates(gemm(8192, 6144, 4096), GATHER) == pytest.approx((0.7, 0.4), abs=0.05)
    assert found.pair(fusion(1 << 24), GATHER).source is Source.GUESS
    assert found.pair(GATHER, GEMM).source is Source.GUESS, "no pair in this order"


def test_pairs_of_another_setting_are_a_guess() -> None:
    found = estimator(DEFAULT, Section("connections1"), setting="connections1")
    assert found.pair(GEMM, GATHER).source is Source.GUESS
    assert found.rates(GEMM, GATHER) == pytest.approx((0.7, 0.4), abs=0.05)


def test_a_measured_pair_needs_no_times_alone_elsewhere() -> None:
    """A measured pair has its own times alone. The section's may be missing, or may differ, as those of a trace do."""
    only_pairs = Section("default", pairs=DEFAULT.pairs)
    slower = replace(DEFAULT, operators={GEMM: Timing(5e-4)})
    for section in (only_pairs, slower):
        found = estimator(section)
        assert found.pair(GEMM, GATHER) == PairEstimate(PAIR.seconds, PAIR.first, PAIR.second, Source.MEASURED)
        assert found.rates(GEMM, GATHER) == pytest.approx((0.7, 0.4))


def test_measured_rates_meet_the_times_alone_of_the_query() -> None:
    slower = replace(DEFAULT, collectives={GATHER: Timing(3.6e-4)})
    other = gemm(8192, 6144, 4096)
    found = estimator(slower)
    seconds = found.solo(other).seconds
    assert found.rates(other, GATHER) == pytest.approx((0.7, 0.4), abs=0.05)
    expected = pair_seconds(seconds, 3.6e-4, found.rates(other, GATHER))
    assert found.pair(other, GATHER) == PairEstimate(*expected, Source.INTERPOLATED)


def test_coverage_is_a_share_of_time() -> None:
    found = estimator(DEFAULT)
    guessed = fusion(1 << 24)
    times = found.solo(GEMM).seconds * 3, found.solo(guessed).seconds * 5, PAIR.seconds
    shares = found.coverage([(GEMM, 3), (guessed, 5), (PairKey(GEMM, GATHER), 1)])
    assert shares[Source.GUESS] == pytest.approx(times[1] / sum(times))
    assert shares[Source.MEASURED] == pytest.approx((times[0] + times[2]) / sum(times))
    assert shares[Source.INTERPOLATED] == 0.0


def test_coverage_of_nothing() -> None:
    assert set(estimator().coverage([]).values()) == {0.0}


def test_rates_are_never_zero() -> None:
    starved = replace(DEFAULT, pairs={PairKey(GEMM, GATHER): PairTiming(8e-4, 4e-4, 8e-4, 4e-4, 3e-4)})
    assert estimator(starved).rates(GEMM, GATHER) == (1.0, MIN_RATE)


def test_an_unseen_size_is_close_to_its_truth() -> None:
    whole = synthetic.section(noise=0.0)
    pairs = {k: t for k, t in whole.pairs.items() if GEMM not in (k.first, k.second)}
    found = estimator(replace(whole, operators={k: t for k, t in whole.operators.items() if k != GEMM}, pairs=pairs))
    estimate = found.solo(GEMM)
    assert estimate.source is Source.INTERPOLATED
    assert estimate.seconds == pytest.approx(whole.operators[GEMM].seconds, rel=0.15)
    assert found.pair(GEMM, GATHER).seconds == pytest.approx(whole.pairs[PairKey(GEMM, GATHER)].seconds, rel=0.15)


def test_hardware_follows_from_hardware_and_link() -> None:
    assert hardware_of(Profile("H200", "nvlink")) == H200
    assert hardware_of(Profile("H200", "no-p2p")) == H200_NO_P2P
    with pytest.raises(DhelixError, match="use one of"):
        hardware_of(Profile("abacus", "nvlink"))


def test_an_estimate_does_not_depend_on_what_was_asked_before() -> None:
    """Equal keys may differ by a few bytes, such as those of an index. Orders on all hosts follow from estimates."""
    small = fusion(2**20)
    large = replace(small, bytes=small.bytes + 2**18)
    assert small == large
    one, other = estimator(), estimator()
    first = one.solo(small), one.solo(large), one.pair(small, GATHER), one.pair(large, GATHER)
    last = other.pair(large, GATHER), other.pair(small, GATHER), other.solo(large), other.solo(small)
    assert first == (last[3], last[2], last[1], last[0])
    assert first[0] != first[1]
