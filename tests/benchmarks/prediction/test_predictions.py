"""New predictions for measured steps: the predicted rows, their costs, and the table of errors."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.prediction import unseen
from dhelix.benchmarks.prediction.predictions import Step, steps_of, table, written
from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands.results import Result, Run
from dhelix.errors import DhelixError
from dhelix.profiles.files.storage import SEARCH_PATH

WORKLOAD = {"preset": "llama-8b", "layers": 8, "seq": 8192, "vocab": 32000, "tp": 2, "microbatches": 4, "channels": 0}


def run(workload: dict[str, Any], *results: Result) -> Run:
    return Run({}, workload, 1, 1.0, 2, 0.0, list(results))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Namespace]:
    """The options of each compilation on paper. Every step is predicted to take 110 ms."""
    calls: list[Namespace] = []

    def measure(options: Namespace, name: str = "", worker: object = None, show: Callable[..., str] = str) -> Path:
        options.where = os.environ.get(SEARCH_PATH)
        calls.append(options)
        results = [Result(options.settings[0], variant, predicted_ms=110.0) for variant in options.variants]
        run(WORKLOAD | {"stages": 2} if "stages" in options else WORKLOAD, *results).write(options.out / "part.json")
        return options.out / "part.json"

    monkeypatch.setenv(SEARCH_PATH, "before")
    monkeypatch.setattr(strands, "measure", measure)
    return calls


def test_one_workload_is_compiled_once_for_all_files(asked: list[Namespace], tmp_path: Path) -> None:
    first = run(WORKLOAD, Result("default", "plain", [100.0]), Result("default", "gone", [100.0]))
    second = run(WORKLOAD, Result("default", "plain", [120.0]), Result("default", "strands, dp", [90.0], span_ms=88.0))
    for name, some in (("a", first), ("b", second)):
        some.write(tmp_path / f"{name}.json")
    steps = steps_of([tmp_path / "a.json", tmp_path / "b.json"], tmp_path)
    assert [(s.file, s.variant, s.measured, s.traced) for s in steps] == [
        ("a", "plain", 100.0, 0.0),
        ("b", "plain", 120.0, 0.0),
        ("b", "strands, dp", 90.0, 88.0),
    ]
    assert steps[0].error == pytest.approx(0.1)
    (options,) = asked
    assert (options.on_paper, options.variants, options.where) == (True, ["plain", "strands, dp"], None)


def test_programs_are_those_of_the_mesh_and_sharding(asked: list[Namespace], tmp_path: Path) -> None:
    for name, workload in (("a", WORKLOAD), ("b", WORKLOAD | {"dp": 2, "sharding": "fsdp"})):
        run(workload, Result("default", "plain", [100.0])).write(tmp_path / f"{name}.json")
    steps_of([tmp_path / "a.json", tmp_path / "b.json"], tmp_path)
    assert [(o.dp, o.sharding) for o in asked] == [(1, "shard_map"), (2, "fsdp")]


def test_pipelines_have_their_own_program_and_stages(asked: list[Namespace], tmp_path: Path) -> None:
    workload = WORKLOAD | {"tp": 1, "stages": 2}
    run(workload, Result("default", "W, dp", [100.0]), Result("two_nodes", "W, dp", [1.0])).write(
        tmp_path / "pipeline_p.json"
    )
    assert [step.variant for step in steps_of([tmp_path / "pipeline_p.json"], tmp_path)] == ["W, dp"]
    assert (asked[0].stages, asked[0].tp) == (2, 2)


def test_what_ran_under_a_cap_needs_the_costs_of_it(
    asked: list[Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unseen, "_RESULTS", tmp_path)
    (tmp_path / "costs_h200x2_channels4").mkdir()
    for channels in (3, 4):
        capped = run(WORKLOAD | {"channels": channels}, Result("connections1", "plain", [100.0]))
        capped.write(tmp_path / f"{channels}.json")
    (step,) = steps_of([tmp_path / "3.json", tmp_path / "4.json"], tmp_path)
    assert (step.file, step.link) == ("4", "capped NVLink")
    assert asked[0].where == str(tmp_path / "costs_h200x2_channels4")


def test_a_limit_on_channels_is_a_link_of_so_many() -> None:
    """From what was measured under the other limits: about 15 GB/s for each channel."""
    assert unseen.capped_bandwidth(4) == pytest.approx(60e9, rel=0.1)
    assert unseen.capped_bandwidth(8) == pytest.approx(2 * unseen.capped_bandwidth(4), rel=0.1)


def test_the_table_says_how_far_each_run_is_off(tmp_path: Path) -> None:
    steps = [
        Step("a", "NVLink", "default", "plain", 100.0, 0.0, 101.0),
        Step("a", "NVLink", "default", "strands, dp", 100.0, 95.0, 96.0),
        Step("b", "no peer-to-peer", "no_p2p", "plain", 100.0, 0.0, 110.0),
    ]
    lines = table(steps).splitlines()
    assert lines[2] == "| `a`, NVLink | 2 | 2.5% | 1 | 2 | strands, dp (default) -4.0% | 1, 1.1% |"
    assert lines[3] == "| `b`, no peer-to-peer | 1 | 10.0% | 0 | 0 | plain (no_p2p) +10.0% |  |"
    assert lines[4].startswith("| **all** | 3 | 5.0% | 1 | 2 |")
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps([vars(step) for step in steps]))
    assert written([kept]) == steps
    kept.write_text("{}")
    assert written([kept]) == []
    kept.write_text('[{"file": 1}]')
    with pytest.raises(DhelixError, match=r"not all of these are results of benchmarks/prediction/predictions.py"):
        written([kept])
