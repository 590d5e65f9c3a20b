"""Placement: nodes of a group under one leaf switch, counted by bytes over the spine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.passes.sharding.collective_times import ALL_GATHER
from dhelix.passes.sharding.factors import ONE, Factor, ShardingError
from dhelix.passes.sharding.nccl_topology import NodeTopology
from dhelix.passes.sharding.placement import (
    Topology,
    gpu_group_sizes,
    group_sizes,
    node_bytes,
    place,
    spine_bytes,
    spine_share,
)
from dhelix.passes.sharding.step_times import Sent
from dhelix.tests.passes.sharding.models import factors


def topology(*leaves: str) -> Topology:
    return Topology.of({"nodes": [{"name": f"n{n}", "leaf": leaf} for n, leaf in enumerate(leaves)]})


ALTERNATING = topology(*"ABABAB")


def test_groups_stay_under_a_leaf() -> None:
    order = place(ALTERNATING.domains, [2])
    assert order == ("n0", "n2", "n1", "n3", "n4", "n5")
    assert spine_share(ALTERNATING, order, 2) == 1 / 3
    assert spine_share(ALTERNATING, tuple(ALTERNATING.leaves), 2) == 1


@given(
    st.lists(st.sampled_from("ABCDE"), min_size=12, max_size=12), st.sampled_from([[2], [3], [4, 2], [6, 3], [6, 2]])
)
def test_as_many_groups_as_possible_are_whole(leaves: list[str], sizes: list[int]) -> None:
    found = topology(*leaves)
    order = place(found.domains, sizes)
    assert sorted(order) == sorted(found.leaves)
    largest = max(sizes)
    whole = sum(leaves.count(leaf) // largest for leaf in set(leaves))
    assert 1 - spine_share(found, order, largest) == pytest.approx(whole * largest / 12)
    mesh, group = Factor(8, 12), Factor(8, largest)
    one = Sent(ALL_GATHER, 1e9, group, ONE, 1)
    sent = [spine_bytes(found, o, [one], mesh) for o in (order, tuple(found.leaves))]
    assert sent[0] <= sent[1]


def test_bytes_over_the_spine() -> None:
    order, mesh = ("n0", "n1", "n2", "n3"), Factor(4, 4)
    pairs = Sent(ALL_GATHER, 1e9, Factor(2, 2), ONE, 1)
    wire = 1e9 * 3 / 4
    assert spine_bytes(topology(*"AABB"), order, [pairs], mesh) == 0  # both groups have one leaf
    # Groups in a row of nodes, siblings in a node, there and back:
    assert spine_bytes(topology(*"ABAB"), order, [pairs], mesh) == 2 * 2 * 2 * wire
    copies = Sent(ALL_GATHER, 1e9, Factor(1, 2), Factor(4, 2), 3)  # of n0 and n2, and of n1 and n3
    assert spine_bytes(topology(*"ABAB"), order, [copies], mesh) == 0
    assert spine_bytes(topology(*"AABB"), order, [copies], mesh) == 3 * 2 * 4 * 2 * 1e9 / 2


TWO_CPUS = """<system version="1">
  <cpu numaid="0"><pci busid="1"><gpu dev="0"/></pci><pci busid="2"><gpu dev="2"/></pci></cpu>
  <cpu numaid="1"><pci busid="3"><gpu dev="1"/></pci><pci busid="4"><gpu dev="3"/></pci></cpu>
</system>"""


def test_bytes_over_slow_links_of_a_node() -> None:
    node = NodeTopology.of(TWO_CPUS)
    assert place(node.domains, [2]) == (0, 2, 1, 3)
    pairs = Sent(ALL_GATHER, 1e9, Factor(2), ONE, 5)
    assert node_bytes(node, (0, 1, 2, 3), [pairs]) == {"between CPUs": 5 * 2 * 2 * 1e9 / 2}  # two pairs, there and back
    assert node_bytes(node, (0, 2, 1, 3), [pairs]) == {"between CPUs": 0}
    copies = Sent(ALL_GATHER, 1e9, Factor(2), Factor(2), 1)
    assert node_bytes(node, (0, 1, 2, 3), [copies]) == {"between CPUs": 0}
    every = Sent(ALL_GATHER, 1e9, Factor(4, 2), ONE, 1)  # a ring over two nodes passes each of them once
    assert node_bytes(node, (0, 1, 2, 3), [every]) == {"between CPUs": 1e9 * 7 / 8}


def test_inner_domains_are_kept_together_too() -> None:
    names = {n: (f"cpu{n % 2}", f"switch{n % 4}") for n in range(8)}
    assert place(names, [4, 2]) == (0, 4, 2, 6, 1, 5, 3, 7)


def test_sizes_of_groups_that_span_some_nodes() -> None:
    assert group_sizes(factors((8, 16), (8, 2), (8, 2), (8, 4))) == [4, 2]
    assert group_sizes(factors((8, 16), (8, 1), (8, 1), (8, 16))) == []
    assert gpu_group_sizes(factors((8, 16), (2, 1), (4, 1), (8, 2))) == [4, 2]
    each = factors((8, 16), (1, 1), (8, 2), (8, 2)), factors((8, 16), (4, 1), (4, 1), (8, 8))
    assert group_sizes(*each) == [8, 2] and gpu_group_sizes(*each) == [4], "groups of parameters together"


def test_bad_topologies(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match="node 'n9' is not in the topology"):
        place(ALTERNATING.domains, [2], ["n0", "n9"])
    with pytest.raises(ShardingError, match="groups of 4 do not divide 6"):
        place(ALTERNATING.domains, [4])
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
