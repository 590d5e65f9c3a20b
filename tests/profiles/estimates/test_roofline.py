"""The roofline's arithmetic, on hardware with round numbers, and its fit to measured steps."""

import dataclasses

import pytest

from dhelix.profiles import hardware
from dhelix.profiles.estimates import roofline
from dhelix.profiles.hardware import Hardware

ROUND = Hardware(
    name="round",
    peak_flops=1e12,
    memory_bandwidth=1e9,
    memory_bytes=1e9,
    intra_bandwidth=1e8,
    inter_bandwidth=1e7,
    gpus_per_node=4,
    gemm_efficiency=0.5,
    attention_efficiency=0.25,
    memory_efficiency=0.5,
    kernel_seconds=0.0,
    intra_latency=0.0,
    inter_latency=0.0,
)


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    assert roofline.memory_seconds(1e9, ROUND) == 2.0
    assert roofline.gemm_seconds(1e12, 1e6, ROUND) == 2.0
    assert roofline.gemm_seconds(1e9, 1e9, ROUND) == 2.0
    assert roofline.attention_seconds(1e12, 1e6, ROUND) == 4.0
    assert (roofline.executed(128), roofline.executed(64), roofline.executed(0)) == (1.0, 1.0, 1.0)
    assert (roofline.executed(80), roofline.executed(128, skips=False)) == (1.6, 2.0)
    assert roofline.attention_seconds(1e12, 1e6, ROUND, 1.6) == 1.6 * 4.0


@pytest.mark.parametrize(("bits", "seconds"), [(8, 1.0), (16, 2.0), (32, 4.0)])
def test_narrow_types_are_faster(bits: int, seconds: float) -> None:
    assert roofline.gemm_seconds(1e12, 0.0, ROUND, bits) == seconds


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
        ("all-reduce", 1.5),
        ("collective-permute", 1.0),
    ],
)
def test_bytes_on_the_wire(kind: str, share: float) -> None:
    assert roofline.wire_bytes(kind, 100.0, 4) == 100 * share


def test_a_group_of_one_sends_nothing() -> None:
    assert roofline.wire_bytes("all-reduce", 100.0, 1) == 0.0


def test_across_nodes_the_network_limits_and_every_gpu_brings_a_card() -> None:
    inside = roofline.collective_seconds("all-gather", 1e8, 4, 1, ROUND)
    one_each = roofline.collective_seconds("all-gather", 1e8, 4, 4, ROUND)
    two_each = roofline.collective_seconds("all-gather", 1e8, 4, 2, ROUND)
    assert inside == pytest.approx(0.75, rel=1e-4)
    assert one_each == pytest.approx(7.5, rel=1e-4)
    assert two_each == pytest.approx(3.75, rel=1e-4)


def test_latency_grows_with_the_ring() -> None:
    slow = dataclasses.replace(ROUND, intra_latency=1e-3)
    small = roofline.collective_seconds("all-gather", 0.0, 2, 1, slow)
    assert 1e-3 < small < roofline.collective_seconds("all-gather", 0.0, 8, 1, slow)


@pytest.mark.parametrize("one", hardware.ALL.values(), ids=lambda h: h.name)
def test_descriptions_are_sane(one: Hardware) -> None:
    assert hardware.ALL[one.name] is one
    assert max(one.inter_bandwidth, one.intra_bandwidth) < one.memory_bandwidth
    assert 0.0 < one.compute_rate <= 1.0 < one.compute_rate + one.communication_rate
