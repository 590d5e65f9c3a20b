"""Estimated times alone for unmeasured sizes, on hardware with round numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.profiles.estimates.interpolation import CollectiveCurves, Interpolation, OperatorFamilies, roofline_seconds
from dhelix.profiles.hardware import H200, Hardware
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import Timing
from dhelix.tests.profiles.synthetic import collective, fusion, gemm

ROUND = Hardware("round", 1e12, 1e9, 1e9, 1e8, 1e7, gemm_efficiency=1.0, memory_efficiency=1.0, kernel_seconds=0.0)


def curves(*points: tuple[CollectiveKey, float], hardware: Hardware = H200) -> CollectiveCurves:
    return CollectiveCurves({key: Timing(seconds, 0.1 * seconds) for key, seconds in points}, hardware)


def at(found: CollectiveCurves, key: CollectiveKey) -> Interpolation:
    result = found.at(key)
    assert result is not None
    return result


def test_between_two_sizes_bandwidth_is_straight_on_log_axes() -> None:
    found = curves((collective("all-gather", 64), 1.0), (collective("all-gather", 256), 2.0))
    middle = at(found, collective("all-gather", 128))
    assert middle.seconds == pytest.approx(math.sqrt(2.0)) and middle.near
    assert middle.spread == pytest.approx(0.1 * middle.seconds)


def test_a_measured_size_gives_its_own_time() -> None:
    found = curves((collective("all-gather", 64), 1.0), (collective("all-gather", 256), 2.0))
    assert at(found, collective("all-gather", 256)).seconds == pytest.approx(2.0)


def test_above_the_largest_size_bandwidth_is_constant() -> None:
    found = curves((collective("all-gather", 512), 1e-2))
    assert at(found, collective("all-gather", 1024)).seconds == pytest.approx(2e-2, rel=0.02)


def test_below_the_smallest_size_latency_is_constant() -> None:
    small = CollectiveKey("all-gather", 1 << 16, 4)
    found = curves((small, 2e-5))
    assert at(found, replace(small, bytes=1 << 10)).seconds == pytest.approx(2e-5, rel=0.05)


@pytest.mark.parametrize(("mib", "near"), [(16, True), (15, False), (1024, True), (1025, False)])
def test_extrapolation_over_more_than_a_factor_four_is_a_guess(mib: int, near: bool) -> None:
    found = curves((collective("all-gather", 64), 1e-3), (collective("all-gather", 256), 4e-3))
    assert at(found, collective("all-gather", mib)).near is near


def test_a_gap_in_the_middle_is_a_guess_too() -> None:
    found = curves((collective("all-gather", 1), 1e-4), (collective("all-gather", 1024), 1e-2))
    assert not at(found, collective("all-gather", 32)).near


def test_other_kinds_meshes_and_implementations_calibrate_a_guess() -> None:
    known = collective("all-gather", 64)
    found = curves((known, 3 * roofline_seconds(known, H200)))
    for key in (
        collective("reduce-scatter", 64),
        collective("all-gather", 64, gpus=2),
        replace(known, implementation="symmetric"),
    ):
        result = at(found, key)
        assert result.seconds == pytest.approx(3 * roofline_seconds(key, H200)) and not result.near


def test_the_own_implementation_counts_more_than_the_own_kind() -> None:
    known = collective("all-gather", 64)
    other = replace(collective("reduce-scatter", 64), implementation="symmetric")
    found = curves((known, 1.0), (other, 2.0))
    assert at(found, replace(known, implementation="symmetric")).seconds == pytest.approx(2.0)


def test_configured_collectives_have_curves_of_their_own() -> None:
    plain = collective("all-gather", 64)
    slim = replace(plain, configuration=NcclSetting("ring", "simple", 2))
    found = curves((plain, 1e-3), (slim, 3e-3))
    assert at(found, plain).seconds == pytest.approx(1e-3) and at(found, slim).seconds == pytest.approx(3e-3)
    unknown = at(found, replace(plain, configuration=NcclSetting(channels=8)))
    assert unknown.seconds == pytest.approx(1e-3) and not unknown.near


def test_links_inside_a_node_say_nothing_of_links_across() -> None:
    found = curves((collective("all-gather", 64), 1.0))
    assert found.at(collective("all-gather", 64, gpus=2, nodes=2)) is None


def test_the_nearest_number_of_groups_stands_for_others() -> None:
    inside = [(collective("all-gather", 64, gpus=2, groups=g), s) for g, s in ((1, 1.0), (8, 2.0))]
    two = at(curves(*inside), collective("all-gather", 64, gpus=2, groups=2))
    assert two.seconds == pytest.approx(1.0) and two.near
    across = curves((collective("all-gather", 64, nodes=2, groups=1), 1.0))
    assert not at(across, collective("all-gather", 64, nodes=2, groups=4)).near, "groups share the network"


def families(*members: tuple[OperatorKey, float], hardware: Hardware = ROUND) -> OperatorFamilies:
    """Families of members whose times are the given multiples of the roofline's."""
    times = {key: Timing(slowness * roofline_seconds(key, hardware)) for key, slowness in members}
    return OperatorFamilies(times, hardware)


def slowness(found: OperatorFamilies, key: OperatorKey) -> float:
    result = found.at(key)
    assert result is not None
    return result.seconds / roofline_seconds(key, found.hardware)


def test_a_size_between_two_members_is_as_efficient_as_they_are() -> None:
    found = families((gemm(1024, 1024, 4096), 1.0), (gemm(4096, 1024, 4096), 2.0))
    assert slowness(found, gemm(2048, 1024, 4096)) == pytest.approx(math.sqrt(2.0))


def test_the_nearest_member_counts_most_and_a_measured_one_alone() -> None:
    found = families((gemm(1024, 1024, 4096), 1.0), (gemm(8192, 1024, 4096), 2.0))
    assert 1.0 < slowness(found, gemm(1200, 1024, 4096)) < 1.05
    assert slowness(found, gemm(8192, 1024, 4096)) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.8, 3.0)), min_size=1, max_size=12), st.integers(1, 64))
def test_interpolation_stays_within_what_members_show(members: list[tuple[int, float]], m: int) -> None:
    sizes = dict(members)
    found = families(*((gemm(128 * size, 1024, 4096), s) for size, s in sizes.items()))
    assert min(sizes.values()) * 0.999 <= slowness(found, gemm(128 * m, 1024, 4096)) <= max(sizes.values()) * 1.001


@pytest.mark.parametrize(("key", "near"), [(gemm(4096, 1024, 4096), True), (gemm(8192, 1024, 4096), False)])
def test_members_reach_a_factor_of_four(key: OperatorKey, near: bool) -> None:
    result = families((gemm(1024, 1024, 4096), 1.0)).at(key)
    assert result is not None and result.near is near


def test_another_family_calibrates_a_guess_and_another_kind_does_not() -> None:
    found = families((gemm(1024, 1024, 4096, "nt"), 1.5))
    result = found.at(gemm(1024, 1024, 4096, "tn"))
    assert result is not None and not result.near
    assert result.seconds == pytest.approx(1.5 * roofline_seconds(gemm(1024, 1024, 4096), ROUND))
    assert found.at(fusion(1024)) is None


def test_members_that_disagree_spread_more() -> None:
    agree = families((gemm(1024, 1024, 4096), 1.0), (gemm(4096, 1024, 4096), 1.0)).at(gemm(2048, 1024, 4096))
    differ = families((gemm(1024, 1024, 4096), 1.0), (gemm(4096, 1024, 4096), 2.0)).at(gemm(2048, 1024, 4096))
    assert agree is not None and differ is not None
    assert agree.spread == pytest.approx(0.0) and differ.spread > 0.3 * differ.seconds


def test_widths_of_inputs_count() -> None:
    wide = gemm(8192, 8192, 8192)
    narrow = replace(wide, family="f8e4m3fn,f8e4m3fn->bf16:nt:cublaslt")
    assert roofline_seconds(wide, H200) == pytest.approx(2 * roofline_seconds(narrow, H200), rel=0.02)
