"""Times of collectives: from links, from measured tables, and what they say about where they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhelix.passes.sharding.collective_times import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    OPS,
    REDUCE_SCATTER,
    Basis,
    Links,
    LinkTimes,
    MeasuredTimes,
)
from dhelix.passes.sharding.factors import ONE, Factor
from dhelix.profiles.hardware import A800
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Timing

NODE, MESH = Factor(8), Factor(8, 16)
IDEAL = LinkTimes(Links(100e9, 50e9, 0.0, 0.0))


@pytest.mark.parametrize(
    "op, wire", [(ALL_GATHER, 7 / 8), (REDUCE_SCATTER, 7 / 8), (ALL_REDUCE, 7 / 4), (BROADCAST, 1)]
)
def test_a_ring_in_a_node(op: str, wire: float) -> None:
    assert IDEAL.seconds(op, 1e9, NODE, MESH) == pytest.approx(wire * 1e9 / 100e9)


def test_groups_over_nodes_share_the_network_with_their_siblings() -> None:
    group = Factor(1, 16)
    one = 2 * 1e9 * 15 / 16 / 50e9
    assert IDEAL.seconds(ALL_REDUCE, 1e9, group, MESH) == pytest.approx(8 * one)
    alone = LinkTimes(replace(IDEAL.links, siblings=False))
    assert alone.seconds(ALL_REDUCE, 1e9, group, MESH) == pytest.approx(one)
    assert IDEAL.seconds(ALL_REDUCE, 1e9, MESH, MESH) == alone.seconds(ALL_REDUCE, 1e9, MESH, MESH)  # no siblings


def test_latency_of_rings_and_trees() -> None:
    links = Links(1e30, 1e30, 1e-6, 10e-6)
    ring = 15 * 10e-6 + 112 * 1e-6
    assert LinkTimes(links).seconds(ALL_GATHER, 1.0, MESH, MESH) == pytest.approx(ring)
    assert LinkTimes(links).seconds(ALL_REDUCE, 1.0, MESH, MESH) == pytest.approx(2 * (4 * 10e-6 + 7 * 1e-6))
    assert LinkTimes(replace(links, tree=False)).seconds(ALL_REDUCE, 1.0, MESH, MESH) == pytest.approx(2 * ring)
    many = LinkTimes(links).seconds(BROADCAST, 1.0, MESH, MESH, together=128)
    assert many == pytest.approx(ring)  # one launch


@pytest.mark.parametrize("op", OPS)
def test_one_device_needs_no_time(op: str) -> None:
    assert IDEAL.seconds(op, 1e9, ONE, MESH) == 0
    assert MeasuredTimes({}, A800).of(op, 1e9, ONE, MESH).seconds == 0


def test_a_table_is_interpolated_scaled_or_replaced_by_a_guess() -> None:
    def key(size: int, gpus: int, nodes: int = 1) -> CollectiveKey:
        return CollectiveKey(ALL_GATHER, size, gpus, nodes, (MESH / Factor(gpus, nodes)).size)

    times = MeasuredTimes({key(1 << 20, 8): Timing(1e-4), key(1 << 24, 8): Timing(16e-4)}, A800)
    between = times.of(ALL_GATHER, 1 << 22, NODE, MESH)
    assert between.seconds == pytest.approx(4e-4) and between.basis is Basis.MEASURED
    assert times.of(ALL_GATHER, 1 << 22, Factor(4), MESH).basis is Basis.SCALED
    assert times.of(ALL_GATHER, 1 << 30, NODE, MESH).basis is Basis.SCALED
    assert times.of(ALL_GATHER, 1 << 22, MESH, MESH).basis is Basis.GUESSED
    assert times.of(ALL_GATHER, 1 << 22, NODE, MESH, together=3).seconds == pytest.approx(12e-4)


def test_bandwidths_are_above_zero() -> None:
    with pytest.raises(Exception, match="above 0"):
        Links(0.0, 1.0)
