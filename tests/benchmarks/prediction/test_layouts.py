"""Layouts of two GPUs: what is listed, and the table of predicted and measured steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.prediction.layout_programs import PROGRAMS, SETTINGS, chosen, costs_of
from dhelix.benchmarks.prediction.layout_tables import correlation, tables
from dhelix.launch.profile.step import gpus_of_mesh
from dhelix.profiles.hardware import describe


def test_each_program_is_listed_once_and_fills_two_gpus_with_one_batch() -> None:
    assert len({tuple(one.row.values()) for one in PROGRAMS}) == len(PROGRAMS)
    for program in PROGRAMS:
        options = program.options()
        assert options.pp * gpus_of_mesh(options.mesh) == 2
        assert options.batch == program.options(tiny=True).batch == 8
    assert len(chosen("phi-2, TP 2")) == 2


@pytest.mark.parametrize("link", SETTINGS)
def test_costs_are_measured_ones_of_the_link(link: str) -> None:
    cluster, model = costs_of(link)
    described = describe("H200", link)
    assert (cluster.gpus, model.profile.link, model.profile.hardware) == (2, link, "H200")
    assert model.hardware.intra_bandwidth == described.intra_bandwidth
    assert model.hardware.communication_rate == described.communication_rate
    assert model.setting in model.profile.sections


def _row(layout: str, **values: Any) -> dict[str, Any]:
    return {"link": "nvlink", "model": "llama-8b", "layout": layout, "system": "xla", **values}


@pytest.fixture
def predicted(tmp_path: Path) -> Path:
    shares = {"memory_gib": 16.0, "guessed": 0.1, "guessed_overlap": 0.0}
    rows = [_row(name, predicted_ms=ms, **shares) for name, ms in (("TP 2", 110.0), ("DP 2", 100.0), ("CP 2", 130.0))]
    shapes = {"layers": 4, "seq": 8192, "batch": 8}
    path = tmp_path / "predicted.json"
    on = {"settings": {"nvlink": "default"}}
    path.write_text(json.dumps({"on": on, "models": {"llama-8b": shapes}, "clusters": {}, "rows": rows}))
    return path


def test_without_measured_steps_their_columns_are_empty(predicted: Path) -> None:
    text = tables([predicted])
    assert "| DP 2 | xla | 100.0 |  |  | 1 |  | 16.0 |  | 10% | 0% |" in text
    assert "Spearman" not in text


def test_measured_steps_are_ranked_beside_predicted_ones(predicted: Path, tmp_path: Path) -> None:
    of_steps = {"min_ms": 99.0, "max_ms": 130.0, "memory_gib": 16.2}
    rows = [_row("TP 2", median_ms=100.0, **of_steps), _row("DP 2", median_ms=125.0, **of_steps)]
    rows.append(_row("CP 2", failed="did not run: OOM"))
    on = {"nvlink": {"gpu": "NVIDIA H200", "gpus": 2, "driver": "580", "jax": "0.11.2", "date": "2026-11-30"}}
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"on": on, "rows": rows}))
    text = tables([measured, predicted])
    assert "| TP 2 | xla | 110.0 | 100.0 (99.0-130.0) | +10.0% | 2 | 1 | 16.0 | 16.2 |" in text
    assert "The predicted fastest, DP 2, xla, takes 25.0% longer than TP 2, xla, the fastest." in text
    assert "Failed: CP 2, xla (did not run: OOM)." in text
    assert "2 x NVIDIA H200, driver 580" in text


def test_correlation_is_that_of_the_ranks() -> None:
    assert correlation("abcd", "abcd") == 1.0
    assert correlation("abcd", "dcba") == -1.0
