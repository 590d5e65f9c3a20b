"""`dhelix fold` on the paper's example: JSON, tables and the picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.launch import cli
from dhelix.launch.fold import chart as fold_chart
from dhelix.launch.fold.chart import ALPHA, BETA, NEITHER, FoldChart
from dhelix.launch.fold.times import cell_times
from dhelix.passes.pipeline_fold import PipelineCosts, evaluate, layout_of, make_schedule

Fold = Callable[..., tuple[int, str, str]]

EXAMPLE = ("--layers=32", "--stages=4", "--microbatches=12")
COSTS = PipelineCosts(1, 2, 2.4)
NAMES = ("w", "interleaved_si", "1f1b", "interleaved", "dualpipev")


@pytest.fixture
def fold(capsys: pytest.CaptureFixture[str]) -> Fold:
    """Runs `dhelix fold`; returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["fold", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


def drawn(name: str, stages: int = 4, microbatches: int = 12) -> FoldChart:
    schedule = make_schedule(name, layout_of(name, 8 * stages, stages), microbatches)
    return fold_chart.chart(schedule, cell_times(schedule, COSTS))


def test_a_preset_gives_the_layers(fold: Fold) -> None:
    _, text, _ = fold("--preset=phi-moe-16b", "--stages=3", "--json")
    assert json.loads(text)["layout"] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    status, _, error = fold("--preset=phi-moe-42b", "--stages=3")
    assert status != 0 and "32 layers with experts do not divide into 6 chunks" in error


def test_json_of_the_example(fold: Fold) -> None:
    status, text, _ = fold(*EXAMPLE, "--json")
    found = json.loads(text)
    assert status == 0
    assert found["layout"] == [
        [0, 1, 2, 3, 28, 29, 30, 31],
        [4, 5, 6, 7, 24, 25, 26, 27],
        [8, 9, 10, 11, 20, 21, 22, 23],
        [12, 13, 14, 15, 16, 17, 18, 19],
    ]
    assert found["bubble_fraction"] == 3 / 12
    assert found["peak_residual_slots"] == 8
    assert found["peak_residual_slots_by_stage"] == [8, 8, 8, 8]
    assert found["parameter_layers_by_stage"] == [8, 8, 8, 8]
    assert found["step_time"] == 30 * 4 * 3
    for stage, ticks in enumerate(found["ticks"]):
        assert [cell["tick"] for cell in ticks] == list(range(38))
        for m in range(12):
            for chunk in (stage, 7 - stage):
                assert ticks[2 * m + chunk]["forward"] == [m, chunk]
                assert ticks[2 * m + 15 - chunk]["backward"] == [m, chunk]
        assert sum(cell["forward"] is not None for cell in ticks) == 24
        assert sum(cell["backward"] is not None for cell in ticks) == 24


def test_json_says_what_the_other_schedules_cost(fold: Fold) -> None:
    found = json.loads(fold(*EXAMPLE, "--si_gain=0.2", "--json")[1])
    compared = {each["schedule"]: each for each in found["compared"]}
    assert list(compared) == [*NAMES, "zbv", "bidirectional"]
    assert found["costs"]["co_executed"] == pytest.approx(2.4)
    assert compared["w"] == {name: found[name] for name in compared["w"]}
    assert compared["1f1b"]["bubble_fraction"] == 3 / 12
    assert compared["1f1b"]["co_executed_share"] == 0
    assert compared["1f1b"]["step_time"] > compared["w"]["step_time"]
    assert compared["bidirectional"]["parameter_layers_by_stage"] == [16] * 4


def test_padding_is_shown(fold: Fold) -> None:
    chunks = json.loads(fold("--layers=30", "--stages=4", "--json")[1])["chunks"]
    assert sum(len(chunk["layers"]) for chunk in chunks) == 30
    assert {len(chunk["layers"]) + chunk["padding"] for chunk in chunks} == {4}
    assert [layer for chunk in chunks for layer in chunk["layers"]] == list(range(30))
    assert "identity" in fold("--layers=30", "--stages=4")[1]


def test_json_goes_where_it_is_told(fold: Fold, tmp_path: Path) -> None:
    text = fold(*EXAMPLE, "--json")[1]
    assert fold(*EXAMPLE, "--json", "-")[1] == text
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert f"wrote {first}" in fold(*EXAMPLE, f"--json={first}")[1]
    assert "Schedules" in fold(*EXAMPLE, "--json", second)[1]
    assert first.read_text() == second.read_text() == text


def test_tables(fold: Fold) -> None:
    status, text, _ = fold(*EXAMPLE)
    assert status == 0
    for words in ("W schedule: 32 layers on 4 stages", "28-31 (7)", "stage 3  F", "do not fit", "zero-bubble V"):
        assert words in text
    (row,) = (line.split() for line in text.splitlines() if line.strip().startswith("W schedule  "))
    assert row == ["W", "schedule", "25.0%", "20.0%", "42.1%", "360", "32", "8"]
    assert "do not fit" not in fold("--layers=4", "--stages=2", "--microbatches=2")[1]


@pytest.mark.parametrize("name", NAMES)
def test_times_are_those_of_the_evaluation(name: str) -> None:
    schedule = make_schedule(name, layout_of(name, 31, 4), 7)
    for costs in (COSTS, PipelineCosts(1, 2, send=0.5)):
        times = cell_times(schedule, costs)
        worked = [
            end
            for cells, row in zip(schedule.ticks, times, strict=True)
            for cell, (_, end) in zip(cells, row, strict=True)
            if cell.forward or cell.backward
        ]
        assert max(worked) == pytest.approx(float(evaluate(schedule, costs).step_time))


def test_the_picture_of_the_w_schedule() -> None:
    chart = drawn("w")
    assert [name for name, *_ in chart.phases] == ["warm-up", "steady", "cool-down"]
    assert [end - start for _, start, end in chart.phases] == pytest.approx([8 * 4, 22 * 9.6, 8 * 8])
    assert chart.followed == (0, 4)
    assert chart.rows[0] == "stage 0\nlayers 0-3, 28-31"
    for strand, groups in ((ALPHA, {0, 2}), (BETA, {1})):
        assert {block.microbatch // 4 for block in chart.blocks if block.strand == strand} == groups
    cells: dict[tuple[int, float], list[Any]] = {}
    for block in chart.blocks:
        cells.setdefault((block.stage, block.start), []).append(block)
    pairs = [blocks for blocks in cells.values() if len(blocks) == 2]
    assert len(pairs) == 4 * 16
    for forward, backward in pairs:  # forward above backward, in different strands
        assert (forward.bottom, forward.top, backward.bottom, backward.top) == (0.5, 1.0, 0.0, 0.5)
        assert not forward.backward and backward.backward and {forward.strand, backward.strand} == {ALPHA, BETA}


def test_schedules_without_si_blocks_have_no_strands() -> None:
    for chart in (drawn("1f1b"), drawn("interleaved"), drawn("w", microbatches=1)):
        assert {block.strand for block in chart.blocks} == {NEITHER}
        assert chart.followed == (0,)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_schedule_gives_the_same_picture(fold: Fold, tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / f"{name}.{kind}" for name in ("first", "second")]
    for path in paths:
        assert f"wrote {path}" in fold(*EXAMPLE, f"--out={path}")[1]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert b"<dc:date>" not in first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--layers=30", "--stages=16"),
            "30 layers do not fill 32 chunks on 16 stages: take at most 15 stages, fewer chunks",
        ),
        (("--stages=0",), "--stages"),
        (("--microbatches=0",), "--microbatches"),
        (("--layers=many",), "'many' is not a whole number"),
        (("--si_gain=1.5",), "--si_gain"),
        (("--forward=0",), "forward, backward and co_executed must be above zero"),
        (("--forward=nan",), "--forward nan: give a finite number"),
        (("--backward=inf",), "--backward inf: give a finite number"),
        (("--schedule=zbv",), "should be one of"),
        (("--out=chart.pdf",), "give such a name"),
        (("--out=/nowhere/chart.png",), "chart.png (No such file or directory); give a file in a folder that exists"),
        (("--json=/nowhere/fold.json",), "a folder that exists"),
        (("pipeline",), "'pipeline' is not a flag"),
    ],
)
def test_bad_input_is_one_line(fold: Fold, arguments: tuple[str, ...], words: str) -> None:
    status, _, error = fold(*arguments)
    assert status in (1, 2)
    assert words in error and error.startswith("dhelix fold: ") and error.count("\n") == 1


def test_a_schedule_that_does_not_fit_leaves_the_others(fold: Fold) -> None:
    status, text, _ = fold("--schedule=1f1b", "--layers=6", "--stages=4")
    assert status == 0
    assert "DualPipeV: 6 layers do not fill 8 chunks" in text


def test_what_does_not_fit_is_a_dhelix_error() -> None:
    with pytest.raises(DhelixError, match="take at most 4 stages"):
        layout_of("w", 8, 5)
