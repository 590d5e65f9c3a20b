from dataclasses import replace

import pytest

from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import SETTINGS, PairTiming, Profile, Provenance, Section, Timing

GEMM = OperatorKey("gemm", "nt", (8, 8, 8))
OTHER = OperatorKey("gemm", "nt", (16, 8, 8))
GATHER = CollectiveKey("all-gather", 1 << 20, 4)
PAIR = PairKey(GEMM, GATHER)


def test_a_timing_is_the_median_and_the_distance_of_the_quartiles() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0], "trace")
    assert timing == Timing(3.0, spread=2.0, samples=5, source="trace")
    assert Timing.of([7.0]) == Timing(7.0)


def test_outliers_do_not_move_a_timing() -> None:
    assert Timing.of([1.0] * 9 + [1000.0]) == Timing(1.0, 0.0, 10)


def test_a_pair_has_medians_of_the_whole_and_of_each_side() -> None:
    timing = PairTiming.of([(3.0, 1.0, 3.0), (5.0, 5.0, 2.0), (4.0, 2.0, 4.0)], 1.5, 2.5)
    assert timing == PairTiming(4.0, first=2.0, second=3.0, first_alone=1.5, second_alone=2.5, spread=1.0, samples=3)


def test_no_sample_is_no_timing() -> None:
    with pytest.raises(ValueError):
        Timing.of([])
    with pytest.raises(ValueError):
        PairTiming.of([], 1.0, 1.0)


@pytest.mark.parametrize(("seconds", "oef"), [(4.0, 1.0), (7.0, 0.0), (5.5, 0.5), (8.0, -1 / 3), (3.7, 1.1)])
def test_overlap_effectiveness_is_the_papers(seconds: float, oef: float) -> None:
    """OEF = (T_i + T_j - P) / min(T_i, T_j), here with T_i = 4 and T_j = 3. It exceeds 1 if P is less than 4."""
    assert PairTiming(seconds, seconds, 3.0, 4.0, 3.0).oef == pytest.approx(oef)
    assert PairTiming(seconds, 3.0, seconds, 3.0, 4.0).oef == pytest.approx(oef)


def test_beside_nothing_there_is_nothing_to_hide() -> None:
    assert PairTiming(5.0, 0.0, 5.0, 0.0, 5.0).oef == 0.0


def test_later_times_count_and_nothing_else_is_lost() -> None:
    earlier = Section("default", {GEMM: Timing(1.0), OTHER: Timing(2.0)}, gap_seconds=1e-6)
    later = Section("default", {GEMM: Timing(3.0)}, {GATHER: Timing(4.0)}, {PAIR: PairTiming(5.0, 3.0, 5.0, 3.0, 4.0)})
    merged = earlier.merged(later)
    assert merged.operators == {GEMM: Timing(3.0), OTHER: Timing(2.0)}
    assert merged.collectives == later.collectives and merged.pairs == later.pairs
    assert merged.gap_seconds == 1e-6
    assert merged.solo(GATHER) == Timing(4.0) and merged.solo(GEMM) == Timing(3.0)
    assert merged.solo(CollectiveKey("all-reduce", 1, 4)) is None


def test_a_time_counts_more_than_an_earlier_failure() -> None:
    earlier = Section("default", failures={str(GEMM): "out of memory", str(PAIR): "out of memory"})
    merged = earlier.merged(Section("default", {GEMM: Timing(1.0)}, failures={str(OTHER): "no kernel"}))
    assert merged.failures == {str(PAIR): "out of memory", str(OTHER): "no kernel"}


def test_profiles_merge_setting_by_setting() -> None:
    here, there = Provenance("H200", 4, machine="a"), Provenance("H200", 4, machine="b")
    one = Profile("H200", "nvlink", (here,)).with_section(Section("default", {GEMM: Timing(1.0)}))
    two = Profile("H200", "nvlink", (here, there), {"connections1": Section("connections1", {GEMM: Timing(2.0)})})
    merged = one.merged(two)
    assert merged.measured_on == (here, there)
    assert merged.section("default").operators == {GEMM: Timing(1.0)}
    assert merged.section("connections1").operators == {GEMM: Timing(2.0)}
    assert merged.section("copy-engine") == Section("copy-engine")
    assert one.section("connections1") == Section("connections1"), "merging changed what was merged"


def test_settings_carry_their_own_name_and_a_summary() -> None:
    assert all(setting.name == name and setting.summary for name, setting in SETTINGS.items())
    assert all(flag.startswith("--xla_") for setting in SETTINGS.values() for flag in setting.xla_flags)


def test_more_than_the_shorter_side_hidden_is_noise_until_a_second_measurement_says_so() -> None:
    """The pair takes 3.7, less than its longer side alone (4).

    This counts as true only if the other launch order and the times alone confirm it.
    """
    other = PairKey(PAIR.second, PAIR.first)
    quick, slow = PairTiming(3.7, 3.0, 3.7, 3.0, 4.0), PairTiming(4.1, 4.1, 3.0, 4.0, 3.0)
    alone = {GEMM: Timing(3.0)}, {GATHER: Timing(4.0)}
    assert not Section("default", *alone, {PAIR: quick, other: replace(quick, seconds=3.8)}).noisy(PAIR)
    assert not Section("default", *alone, {PAIR: slow}).noisy(PAIR)  # the OEF is below 1
    assert Section("default", *alone, {PAIR: quick}).noisy(PAIR)
    assert Section("default", *alone, {PAIR: quick, other: slow}).noisy(PAIR)
    assert Section("default", *alone, {PAIR: replace(quick, spread=0.4), other: quick}).noisy(PAIR)
    shorter = {GEMM: Timing(3.0)}, {GATHER: Timing(3.6)}
    assert Section("default", *shorter, {PAIR: quick, other: quick}).noisy(PAIR)
