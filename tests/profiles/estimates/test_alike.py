"""Times of a GPU, derived from the profile of a similar GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dhelix.passes.evaluation.costs import CostModel
from dhelix.profiles import hardware
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import Form, Site, SiteTimes, Times
from dhelix.profiles.estimates import alike
from dhelix.profiles.estimates.estimator import Estimator, Source
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import ALIKE, PairTiming, Profile, Section, Timing

GEMM = OperatorKey("gemm", "bf16,bf16->bf16:nn:cublaslt", (8192, 4096, 4096), 2.7e11, 170_000_000)
COPY = OperatorKey("copy", "contiguous", (1 << 30,), 0.0, 2 << 30)
GATHER = CollectiveKey("all-gather", 64 << 20, 4)
BANDWIDTHS = hardware.H200.memory_bandwidth / hardware.H100.memory_bandwidth


def h200(setting: str = "default") -> Profile:
    pairs = {
        PairKey(GEMM, GATHER): PairTiming(700e-6, 500e-6, 700e-6, 450e-6, 300e-6),
        PairKey(COPY, GATHER): PairTiming(800e-6, 600e-6, 800e-6, 500e-6, 300e-6),
    }
    alone = {GEMM: Timing(450e-6), COPY: Timing(500e-6, 5e-6)}
    section = Section(setting, alone, {GATHER: Timing(300e-6)}, pairs, 2e-6, {"a key": "why"})
    return Profile("H200", "nvlink").with_section(section)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which profiles are found."""
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    monkeypatch.setattr(storage, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(collective_matmul_times, "_SHIPPED", tmp_path / "none")
    return tmp_path


def test_what_memory_decides_takes_longer_and_all_else_as_long() -> None:
    section = alike.as_on(h200(), "H100").section("default")
    assert section.operators[GEMM] == Timing(450e-6, source=ALIKE)
    assert section.collectives[GATHER].seconds == 300e-6
    assert section.operators[COPY].seconds == pytest.approx(BANDWIDTHS * 500e-6, rel=0.01)
    assert section.gap_seconds == 2e-6 and not section.failures


def test_pairs_keep_their_rates() -> None:
    pairs = alike.as_on(h200(), "H100").section("default").pairs
    same, stretched = pairs[PairKey(GEMM, GATHER)], pairs[PairKey(COPY, GATHER)]
    assert (same.seconds, same.first, same.source) == (700e-6, 500e-6, ALIKE)
    assert stretched.first_alone == pytest.approx(BANDWIDTHS * 500e-6, rel=0.01)
    assert stretched.first / stretched.first_alone == pytest.approx(600 / 500, rel=0.1)


def test_a_gpu_that_nobody_profiled_has_the_times_of_its_like(folder: Path) -> None:
    storage.save(h200("connections1"), folder / "h200-nvlink.json")
    found = storage.find("H100", "nvlink")
    assert found is not None and (found.hardware, found.alike) == ("H100", "H200")
    estimator = Estimator(found, hardware.H100, "connections1")
    assert estimator.solo(GEMM).source is Source.INTERPOLATED and estimator.solo(GEMM).seconds == 450e-6
    assert estimator.pair(GEMM, GATHER).source is Source.INTERPOLATED
    assert "H200" in (alike.told(found, ["connections1"]) or "")
    assert CostModel.find("H100", "nvlink", "connections1").hardware is hardware.H100


def test_what_was_measured_here_counts_more_under_every_setting(folder: Path) -> None:
    storage.save(h200("connections1"), folder / "h200-nvlink.json")
    own = Section(
        "default", {GEMM: Timing(480e-6)}, pairs={PairKey(GEMM, GATHER): PairTiming(7e-4, 5e-4, 7e-4, 4e-4, 3e-4)}
    )
    storage.save(Profile("H100", "nvlink").with_section(own), folder / "h100-nvlink.json")
    found = storage.find("H100", "nvlink")
    assert found is not None
    for setting in ("default", "connections1"):
        assert Estimator(found, hardware.H100, setting).solo(GEMM).seconds == 480e-6
    assert alike.told(found, ["default"]) is None and alike.told(found, ["default", "connections1"]) is not None


def test_operators_of_other_links_of_this_gpu_count_more_than_those_of_its_like(folder: Path) -> None:
    storage.save(replace(h200(), link="no-p2p"), folder / "h200-no-p2p.json")
    own = Profile("H100", "nvlink").with_section(Section("default", {GEMM: Timing(480e-6)}))
    storage.save(own, folder / "h100-nvlink.json")
    found = storage.find("H100", "no-p2p")
    assert found is not None
    assert Estimator(found, hardware.H100_NO_P2P, "default").solo(GEMM).seconds == 480e-6


@pytest.mark.parametrize("gpu", ["H100-PCIe", "A100", "B200"])
def test_other_gpus_have_no_times_but_their_own(folder: Path, gpu: str) -> None:
    storage.save(h200(), folder / "h200-nvlink.json")
    assert storage.find(gpu, "nvlink") is None and not hardware.describe(gpu).like


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-MIG"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_cards_with_other_cores_or_links_have_other_names(kind: str, name: str) -> None:
    assert hardware.gpu_name(kind) == name


def test_collective_matmuls_too(folder: Path) -> None:
    site = Site("all_gather_matmul", 8192, 4096, 1536, "bfloat16", 4)
    forms = {Form("monolithic"): Timing(3e-4), Form("ring"): Timing(2e-4)}
    times = Times("H200", "nvlink", "default", (), {site: SiteTimes(Timing(1e-4), Timing(2e-4), forms)})
    collective_matmul_times.save(times, folder / "collective_matmul" / "h200-nvlink.json")
    found = collective_matmul_times.find("H100", "nvlink")
    assert found is not None and found.hardware == "H100"
    assert found.sites[site].forms[Form("ring")] == Timing(2e-4, source=ALIKE)
    assert collective_matmul_times.find("A100", "nvlink") is None


def test_no_file_holds_such_times(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(storage.ProfileFileError, match="enum value 'alike'"):
        storage.save(alike.as_on(h200(), "H100"), folder / "h100-nvlink.json")
