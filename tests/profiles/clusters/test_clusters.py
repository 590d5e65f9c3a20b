"""Clusters: files, names, constants, and errors that say what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from dhelix.profiles.clusters import cluster_file, known
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.clusters.constants import CONSTANTS, ClusterError
from dhelix.profiles.estimates import roofline
from dhelix.profiles.hardware import H100, describe

MINIMAL: dict[str, Any] = {"gpu": "H100", "nodes": 4}


def test_a_file_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    constants = {"between_gb_per_second": {"value": 38, "source": "nccl-tests"}, "gemm_efficiency": 0.5}
    file.write_text(json.dumps({**MINIMAL, "gpus_per_node": 4, "constants": constants}))
    cluster = known.find(str(file))
    assert (cluster.name, cluster.gpus, cluster.link) == ("ours", 16, "nvlink")
    assert (cluster.hardware.inter_bandwidth, cluster.hardware.gemm_efficiency) == (38e9, 0.5)
    assert cluster.hardware.peak_flops == H100.peak_flops
    sources = {origin.name: origin.source for origin in cluster.origins() if origin.given}
    assert sources == {"between_gb_per_second": "nccl-tests", "gemm_efficiency": str(file)}


@pytest.mark.parametrize("name", known.names())
def test_named_clusters_say_where_every_constant_comes_from(name: str) -> None:
    cluster = known.find(name)
    origins = list(cluster.origins())
    assert {origin.name for origin in origins} == set(CONSTANTS)
    assert all(origin.source for origin in origins) and cluster.gpu in cluster.words()
    for origin in origins:
        assert CONSTANTS[origin.name].least <= origin.value <= CONSTANTS[origin.name].most


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "is not a JSON object"),
        ({"gpu": "H100"}, "does not say 'nodes'"),
        ({**MINIMAL, "nodse": 4}, "'nodse' is unknown; did you mean 'nodes'"),
        ({**MINIMAL, "gpu": "H1000"}, "the GPU .H1000. is unknown; use one of A100"),
        ({**MINIMAL, "nodes": 0}, "nodes is 0; give a whole number"),
        ({**MINIMAL, "nodes": True}, "nodes is True; give a whole number"),
        ({**MINIMAL, "nodes": 10**9}, "check the number of nodes"),
        ({**MINIMAL, "name": 3}, "name is 3; give a text"),
        ({**MINIMAL, "link": "pcie"}, "link 'pcie' is unknown"),
        ({"gpu": "A40", "nodes": 1, "link": "nvlink"}, "nothing was measured on A40 with link nvlink"),
        ({**MINIMAL, "oversubscription": 2}, "also give nodes_per_leaf"),
        ({**MINIMAL, "nodes_per_leaf": 8, "oversubscription": 0.5}, "oversubscription is 0.5"),
        ({**MINIMAL, "constants": {"bandwidth": 3}}, "there is no constant 'bandwidth'; use one of peak_tflops"),
        ({**MINIMAL, "constants": {"between_gb_per_second": 45e9}}, "is between 0.01 and 250; check the unit"),
        ({**MINIMAL, "constants": {"between_gb_per_second": "45"}}, "'45'; give a number"),
        ({**MINIMAL, "constants": {"between_gb_per_second": {"value": 4}}}, 'is a number, or {"value"'),
        ({**MINIMAL, "notes": "none"}, "notes is a list of texts"),
    ],
)
def test_nonsense_is_one_clear_error(content: Any, words: str) -> None:
    with pytest.raises(ClusterError, match=f"^ours.json.*{words}|^cluster.*{words}"):
        cluster_file.of_json(content, "ours.json")


def test_files_that_are_no_json(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    with pytest.raises(ClusterError, match="cannot read .*broken.json: No such file"):
        known.find(str(file))
    file.write_text('{"gpu": ')
    with pytest.raises(ClusterError, match="is not JSON .line 1"):
        known.find(str(file))
    with pytest.raises(ClusterError, match="cluster 'h100' is unknown; give a JSON file, or one of a100-infiniband"):
        known.find("h100")


def test_own_links_are_not_taken_for_measured_ones() -> None:
    pcie = {**MINIMAL, "constants": {"inside_gb_per_second": 20}}
    assert cluster_file.of_json(MINIMAL, "a").link == "nvlink"
    assert cluster_file.of_json(pcie, "a").link == ""
    assert cluster_file.of_json({**MINIMAL, "link": "none"}, "a").link == ""


def test_nodes_without_peer_to_peer_have_its_links() -> None:
    cluster = cluster_file.of_json({"gpu": "H200", "nodes": 1, "gpus_per_node": 2, "link": "no-p2p"}, "a file")
    here = describe("H200", "no-p2p")
    assert (cluster.link, cluster.gpus_per_node) == ("no-p2p", 2)
    assert cluster.hardware.intra_bandwidth == here.intra_bandwidth < describe("H200").intra_bandwidth
    assert cluster.hardware.rates(False) == here.rates(False)


def test_oversubscribed_spines_slow_all_to_alls_over_several_leaves() -> None:
    leaves: Cluster = cluster_file.of_json({**MINIMAL, "nodes": 64, "nodes_per_leaf": 16, "oversubscription": 4}, "a")
    flat = known.find("h100-infiniband").with_nodes(64)

    def seconds(kind: str, nodes: int, cluster: Cluster) -> float:
        return roofline.collective_seconds(kind, 2.0**34, 8 * nodes, nodes, cluster.hardware)

    assert seconds("all-to-all", 64, leaves) > 2.5 * seconds("all-to-all", 64, flat)
    assert seconds("all-to-all", 16, leaves) == seconds("all-to-all", 16, flat)
    assert seconds("all-reduce", 64, leaves) == seconds("all-reduce", 64, flat)


def test_constants_by_flag() -> None:
    cluster = known.find("h100-infiniband").with_constants({"between_gb_per_second": 25}, "--constants")
    assert cluster.hardware.inter_bandwidth == 25e9
    with pytest.raises(ClusterError, match="--constants: gemm_efficiency is 70, but"):
        cluster.with_constants({"gemm_efficiency": 70}, "--constants")


def test_slower_links_have_rates_of_their_own() -> None:
    cluster = known.find("h100-infiniband")
    usual = cluster.hardware

    def rates(**constants: float) -> tuple[float, float]:
        made = cluster.with_constants(constants, "here").hardware
        return made.compute_rate, made.communication_rate

    assert rates(inside_gb_per_second=20) == rates(inside_gb_per_second=120) == pytest.approx((0.9, 0.8))
    assert 200 * rates(inside_gb_per_second=200)[1] == pytest.approx(330 * usual.communication_rate)
    assert usual.compute_rate < rates(inside_gb_per_second=200)[0] < 0.9
    assert rates(inside_gb_per_second=330) == (usual.compute_rate, usual.communication_rate)
    assert rates(inside_gb_per_second=20, communication_rate=0.5) == pytest.approx((0.9, 0.5))
    origins = {one.name: one.source for one in cluster.with_constants({"inside_gb_per_second": 20}, "here").origins()}
    assert origins["inside_gb_per_second"] == "here" and "slower links" in origins["compute_rate"]
