"""Placement of a plan whose groups of parameters have factors of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhelix.launch.shard.placed import placed_by
from dhelix.passes.sharding.collective_times import ALL_GATHER
from dhelix.passes.sharding.factors import ONE, Factor
from dhelix.passes.sharding.step_times import Sent
from dhelix.tests.passes.sharding.models import factors

DUMPS = Path(__file__).parents[2] / "testdata" / "topologies"


def leaves(tmp_path: Path, names: str) -> str:
    """A topology file of nodes under the leaf switches of these names."""
    file = tmp_path / "leaves.json"
    file.write_text(json.dumps({"nodes": [{"name": f"n{n}", "leaf": leaf} for n, leaf in enumerate(names)]}))
    return str(file)


def test_one_order_serves_all_groups_and_their_bytes_add_up(tmp_path: Path) -> None:
    files = [leaves(tmp_path, "ABABABAB"), str(DUMPS / "pcie-8.xml")]
    wide, narrow = factors((8, 8), (1, 1), (1, 1), (8, 4)), factors((8, 8), (4, 1), (4, 1), (8, 2))
    of_wide = Sent(ALL_GATHER, 1e9, Factor(8, 4), ONE, 2)
    of_narrow = [Sent(ALL_GATHER, 4e8, Factor(8, 2), ONE, 1), Sent(ALL_GATHER, 1e8, Factor(4), ONE, 8)]
    found = placed_by(files, [wide, narrow], [of_wide, *of_narrow])
    assert found.order == ("n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7"), "fours that consist of pairs"
    assert found.shares == ((4, 1.0, 0.0), (2, 1.0, 0.0)) and found.gpu_order == (0, 1, 4, 5, 2, 3, 6, 7)
    over_spine, *inside = found.traffic
    assert over_spine.placed == 0.0 and all(traffic.placed < traffic.listed for traffic in inside)
    apart = [placed_by(files, [wide, narrow], sent).traffic for sent in ([of_wide], of_narrow)]
    for both, one, other in zip(found.traffic, *apart, strict=True):
        assert both.listed == pytest.approx(one.listed + other.listed)
        assert both.placed == pytest.approx(one.placed + other.placed)


def test_rings_over_all_nodes_have_an_order_too(tmp_path: Path) -> None:
    whole = factors((8, 4), (1, 1), (1, 1), (8, 4))
    sent = [Sent(ALL_GATHER, 1e9, Factor(8, 4), ONE, 1)]
    found = placed_by([leaves(tmp_path, "ABAB")], [whole], sent)
    assert found.traffic[0].listed == pytest.approx(2 * found.traffic[0].placed) and not found.notes
    assert "the order of the file is as good" in placed_by([leaves(tmp_path, "AABB")], [whole], sent).notes[0]
