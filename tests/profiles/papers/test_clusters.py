"""The descriptions of the papers' clusters are complete and agree with what can be computed from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.profiles import hardware
from dhelix.profiles.estimates import roofline
from dhelix.profiles.papers import clusters
from dhelix.profiles.papers.clusters import Cluster
from dhelix.profiles.papers.published import Published

each_cluster = pytest.mark.parametrize("cluster", clusters.ALL.values(), ids=lambda c: c.name)


def number(cluster: str, system: str, quantity: str, workload: str = "") -> Published:
    """The only number of `system` whose quantity and workload contain these texts."""
    found = [
        n
        for n in clusters.get(cluster).numbers
        if n.system == system and quantity in n.quantity and workload in n.workload
    ]
    assert len(found) == 1, found
    return found[0]


def test_sizes_of_the_papers() -> None:
    sizes = {name: (c.nodes, c.gpus_per_node) for name, c in clusters.ALL.items()}
    assert sizes == {
        "dhelix-a40": (8, 8),
        "dhelix-a800": (8, 8),
        "dhelix-a100": (1, 8),
        "dhelix-h100": (4, 8),
        "dhelix-h100-16384": (2048, 8),
        "distfuse-a100": (1, 4),
        "amsp-a800": (128, 8),
        "lagom-a40-nvlink": (2, 8),
        "lagom-a40-pcie": (2, 8),
    }


@each_cluster
def test_what_collectives_reach_lies_below_what_links_carry(cluster: Cluster) -> None:
    gpu = cluster.hardware
    assert 0.3 * cluster.link_bandwidth < gpu.intra_bandwidth < cluster.link_bandwidth
    if cluster.nodes > 1:
        assert 0.8 * cluster.network_bandwidth_per_gpu < gpu.inter_bandwidth < cluster.network_bandwidth_per_gpu
        assert cluster.network
    else:
        assert cluster.network_bandwidth == 0 and not cluster.network


@each_cluster
def test_every_number_says_what_it_is(cluster: Cluster) -> None:
    assert hardware.ALL[cluster.hardware.name] is cluster.hardware
    assert cluster.source and cluster.link and (cluster.numbers or cluster.notes)
    for n in cluster.numbers:
        assert n.system and n.workload and n.quantity and n.where, n
        assert n.upper is None or n.upper > n.value, n
        assert "figure" not in n.where or n.chart or "section" in n.where or "caption" in n.where, n
        if n.unit.startswith("%"):
            assert 0 <= n.value <= 100, n
    keys = [dataclasses.replace(n, value=0.0) for n in cluster.numbers]
    assert len(set(keys)) == len(keys), "two numbers for one thing"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        DhelixError, match="cluster 'a40' is unknown; use one of amsp-a800, dhelix-a100, .*lagom-a40-pcie$"
    ):
        clusters.get("a40")


@pytest.mark.parametrize("workload", ["S 16384", "S 32768"])
def test_utilisation_follows_from_throughput_and_peak(workload: str) -> None:
    reached = number("dhelix-a800", "Megatron-LM", "throughput", workload).value
    utilisation = number("dhelix-a800", "Megatron-LM", "MFU", workload).value
    assert 1e14 * reached / clusters.get("dhelix-a800").hardware.peak_flops == pytest.approx(utilisation, abs=0.5)


@pytest.mark.parametrize("system", ["Wavelet+", "DHelix"])
def test_misprinted_gains_are_corrected(system: str) -> None:
    plain = number("dhelix-a40", "Megatron-LM", "throughput", "Phi-31B").value
    gain = number("dhelix-a40", system, "speed-up over Megatron-LM", "Phi-31B")
    assert number("dhelix-a40", system, "throughput", "Phi-31B").value / plain == pytest.approx(gain.value, abs=1e-3)
    assert "%" in gain.printed


@pytest.mark.parametrize("workload", ["8192 GPUs", "DP 128", "CP 16"])
def test_table_1_is_what_its_bandwidths_give(workload: str) -> None:
    cluster = clusters.get("dhelix-h100-16384")
    rows = {(n.quantity, n.unit): n.value for n in cluster.numbers if workload in n.workload}
    local, across = (rows[f"{where} communication", "s"] for where in ("local", "cross-node"))
    assert local == pytest.approx(1e9 * rows["local communication", "GB"] / cluster.link_bandwidth, abs=5e-3)
    assert across == pytest.approx(
        1e9 * rows["cross-node communication", "GB"] / cluster.network_bandwidth_per_gpu, abs=5e-3
    )
    assert rows["cross-node share", "%"] == pytest.approx(100 * across / (local + across), abs=0.1)


@pytest.mark.parametrize(("workload", "k"), [("K 8192", 8192), ("K 28672", 28672)])
def test_distfuse_times_fit_the_description(workload: str, k: int) -> None:
    gpu = clusters.get("distfuse-a100").hardware
    gemm = roofline.gemm_seconds(2 * 1024 * 8192 * k / 4, 0.0, gpu)
    reduced = roofline.collective_seconds("all-reduce", 2 * 1024 * 8192, 4, 1, gpu)
    measured = {
        n.quantity: n.value
        for n in clusters.get("distfuse-a100").numbers
        if n.system == "PyTorch" and f"{workload}]" in n.workload
    }
    assert 1e6 * gemm == pytest.approx(measured["GEMM"], rel=0.1)
    assert 1e6 * reduced == pytest.approx(measured["all-reduce"], rel=0.1)


def test_distfuse_gain_over_both_rows() -> None:
    rows = clusters.get("distfuse-a100").numbers
    plain = sum(n.value for n in rows if (n.system, n.quantity) == ("PyTorch", "GEMM, then all-reduce"))
    fused = sum(n.value for n in rows if n.quantity == "GEMM and all-reduce, overlapped")
    assert plain / fused == pytest.approx(number("distfuse-a100", "DistFuse", "speed-up", "both").value, abs=1e-3)


def test_amsp_table_5_stands_whole() -> None:
    rows = [n for n in clusters.get("amsp-a800").numbers if n.where == "table V"]
    assert len(rows) == 3 * 4 * 4 * 2
    best = number(
        "amsp-a800", "AMSP, overlapping nothing", "throughput", "LLaMA-30B, 64 GPUs, S 4096, micro-batch 1, 8"
    )
    assert best.value == 719


@each_cluster
def test_the_documentation_lists_it(cluster: Cluster) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "design" / "clusters.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{cluster.name}` "))
    across = f"{cluster.network_bandwidth_per_gpu / 1e9:.4g} GB/s" if cluster.network else "-"
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == [
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.hardware.name}",
        cluster.link,
        f"{cluster.link_bandwidth / 1e9:.4g} GB/s",
        cluster.network or "-",
        across,
        cluster.source,
    ]
