"""Speed-up by share of communication: points from results and papers, the picture, and the budget."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands import sweep as strand_sweep
from dhelix.benchmarks.strands.results import Result, Run, groups
from dhelix.benchmarks.strands.sweep import Point, paper_points, points, save_png
from dhelix.errors import DhelixError
from dhelix.profiles.files.storage import SEARCH_PATH

WORKLOAD = {"preset": "llama-8b", "tp": 4, "seq": 8192, "microbatches": 16, "channels": 0}


def measured(**steps: float) -> Run:
    results = [Result("default", name.replace("_", ", "), [ms]) for name, ms in steps.items()]
    return Run({}, WORKLOAD, 1, 1.0, 4, 0.0, results)


def test_a_point_needs_a_plain_step_one_of_ours_and_one_without_communication() -> None:
    whole = measured(plain=100.0, strands_dp=90.0, **{"plain_no communication": 80.0})
    share: Any = pytest.approx(0.2)
    assert points(groups([whole])) == [Point("Llama-8B, TP 4, S 8192, M 16, default", share, 100 / 90)]
    assert points(groups([measured(plain=100.0, strands_dp=90.0)])) == []


def test_the_papers_points_are_those_that_it_publishes() -> None:
    assert [(round(p.share, 3), p.speed_up) for p in paper_points()] == [(0.55, 1.39), (0.343, 1.258), (0.1, 1.07)]


def test_the_picture(tmp_path: Path) -> None:
    save_png([*paper_points(), Point("here", 0.2, 1.1)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_workloads_beyond_the_budget_are_dropped(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    clock = iter(range(0, 10_000, 100))  # each reading of the clock is 100 s later
    monkeypatch.setattr(strand_sweep.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(strands, "measure", lambda options: Path(f"{options.name}.json"))
    arguments = Namespace(
        preset="llama-8b", layers=2, vocab=64, tp="2,4", shards="0", seq="4096", microbatches="4", channels="0,4",
        settings="default", variants="plain", rounds=1, steps=1, profile=False, budget_s=600.0, out=tmp_path,
    )  # fmt: skip
    files = strand_sweep.sweep(arguments)
    assert [file.name for file in files] == ["sweep_tp2_s4096_m4_c0.json", "sweep_tp4_s4096_m4_c0.json"]
    assert "dropped sweep_tp4_s4096_m4_c4" in capsys.readouterr().out


def test_costs_are_measured_under_the_cap_that_steps_run_under(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str]) -> Namespace:
        ran.append((command, env))
        return Namespace(returncode=len(ran) - 1)

    monkeypatch.setenv(SEARCH_PATH, "elsewhere")
    monkeypatch.setattr(strand_sweep.subprocess, "run", run)
    options = Namespace(preset="llama-8b", layers=8, seq=8192, tp=2, microbatches=4, channels=4, out=tmp_path)
    options.settings = ["default", "no_p2p", "copy_engine1"]
    strand_sweep.profile(options)
    command, environment = ran[0]
    assert {"profile", "--interleave", "--mesh=tp=2", "--settings=copy-engine1,default"} <= set(command)
    assert environment["XLA_FLAGS"].endswith("--xla_gpu_nccl_collective_max_nchannels=4")
    assert environment[SEARCH_PATH] == os.environ[SEARCH_PATH] == str(tmp_path / "costs_tp2_c4")
    with pytest.raises(DhelixError, match="its costs were not measured"):
        strand_sweep.profile(options)
