"""Speed-up over the share of communication: points from results and from papers, the picture, the budget."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks import strand_sweep, strands
from dhelix.benchmarks.strand_results import Result, Run, groups
from dhelix.benchmarks.strand_sweep import Point, paper_points, points, save_png

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
    clock = iter(range(0, 10_000, 100))  # each look at the clock is 100 s later
    monkeypatch.setattr(strand_sweep.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(strands, "measure", lambda options: Path(f"{options.name}.json"))
    arguments = Namespace(
        preset="llama-8b", layers=2, vocab=64, tp="2,4", seq="4096", microbatches="4", channels="0,4",
        settings="default", variants="plain", budget_s=600.0, out=tmp_path,
    )  # fmt: skip
    files = strand_sweep.sweep(arguments)
    assert [file.name for file in files] == ["sweep_tp2_s4096_m4_c0.json", "sweep_tp2_s4096_m4_c4.json"]
    assert "dropped sweep_tp4_s4096_m4_c4" in capsys.readouterr().out
