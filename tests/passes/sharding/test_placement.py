"""Placement: nodes of a group under one leaf switch, counted by bytes over the spine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.passes.sharding.collective_times import ALL_GATHER
from dhelix.passes.sharding.factors import Factor, ShardingError
from dhelix.passes.sharding.placement import Topology, group_sizes, place, spine_bytes, spine_share
from dhelix.tests.passes.sharding.models import factors


def topology(*leaves: str) -> Topology:
    return Topology.of({"nodes": [{"name": f"n{n}", "leaf": leaf} for n, leaf in enumerate(leaves)]})


ALTERNATING = topology(*"ABABAB")


def test_groups_stay_under_a_leaf() -> None:
    order = place(ALTERNATING, [2])
    assert order == ("n0", "n2", "n1", "n3", "n4", "n5")
    assert spine_share(ALTERNATING, order, 2) == 1 / 3
    assert spine_share(ALTERNATING, tuple(ALTERNATING.leaves), 2) == 1


@given(
    st.lists(st.sampled_from("ABCDE"), min_size=12, max_size=12), st.sampled_from([[2], [3], [4, 2], [6, 3], [6, 2]])
)
def test_as_many_groups_as_possible_are_whole(leaves: list[str], sizes: list[int]) -> None:
    found = topology(*leaves)
    order = place(found, sizes)
    assert sorted(order) == sorted(found.leaves)
    largest = max(sizes)
    whole = sum(leaves.count(leaf) // largest for leaf in set(leaves))
    assert 1 - spine_share(found, order, largest) == pytest.approx(whole * largest / 12)
    mesh, group = Factor(8, 12), Factor(8, largest)
    sent = [spine_bytes(found, o, group, ALL_GATHER, 1e9, mesh) for o in (order, tuple(found.leaves))]
    assert sent[0] <= sent[1]


def test_bytes_over_the_spine() -> None:
    order = ("n0", "n1", "n2", "n3")
    wire = 1e9 * 3 / 4
    sent = spine_bytes(topology(*"AABB"), order, Factor(2, 2), ALL_GATHER, 1e9, Factor(4, 4))
    assert sent == 0  # both groups have one leaf
    sent = spine_bytes(topology(*"ABAB"), order, Factor(2, 2), ALL_GATHER, 1e9, Factor(4, 4))
    assert sent == 2 * 2 * 2 * wire  # groups in a row of nodes, siblings in a node, there and back


def test_sizes_of_groups_that_span_some_nodes() -> None:
    assert group_sizes(factors((8, 16), (8, 2), (8, 2), (8, 4))) == [4, 2]
    assert group_sizes(factors((8, 16), (8, 1), (8, 1), (8, 16))) == []


def test_bad_topologies(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match="node 'n9' is not in the topology"):
        place(ALTERNATING, [2], ["n0", "n9"])
    with pytest.raises(ShardingError, match="groups of 4 nodes do not divide 6"):
        place(ALTERNATING, [4])
    for data, words in (
        ([], "expected"),
        ({"nodes": [{"name": "a"}]}, "node 0 needs a name and a leaf"),
        ({"nodes": [{"name": "a", "leaf": "x"}] * 2}, "'a' occurs twice"),
    ):
        path = tmp_path / "topology.json"
        path.write_text(json.dumps(data))
        with pytest.raises(ShardingError, match=words):
            Topology.load(path)
    with pytest.raises(ShardingError, match="cannot be read"):
        Topology.load(tmp_path / "none.json")
    path.write_text("{")
    with pytest.raises(ShardingError, match="no JSON"):
        Topology.load(path)
