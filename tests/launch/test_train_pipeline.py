"""`dhelix train --pp`: a run without stages can resume its checkpoints, and bad options are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli

SMALL = ("--layers=4", "--seq=16", "--microbatches=2", "--batch=4", "--steps=4", f"--data={__file__}")


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *SMALL, *arguments])
    return stopped.value.code or 0  # type: ignore[return-value]


@pytest.mark.slow
def test_a_run_goes_on_without_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(*arguments: str) -> tuple[list[Any], list[str]]:
        assert status("--json", *arguments) == 0
        captured = capsys.readouterr()
        results = json.loads(captured.out)
        return [(s["number"], s["loss"], s["grad_norm"]) for s in results["steps"]], captured.err.splitlines()

    whole, lines = train("--pp=2", "--mesh=dp=2,tp=2", f"--checkpoint_dir={tmp_path / 'run'}", "--save_every=2")
    assert "2 micro-batches, schedule w, passes on; pp 2 x dp 2 x tp 2" in lines[0]
    shutil.rmtree(tmp_path / "run" / "4")  # as if it had been stopped after step 2
    rest, lines = train("--mesh=dp=2,tp=2", "--plain", f"--checkpoint_dir={tmp_path / 'run'}", "--resume")
    assert any(line.startswith("resumed from step 2") for line in lines)
    assert not any(line.startswith("note: ") for line in lines)
    for step, expected in zip(rest, whole[2:], strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pp=3"], "--pp 3 does not divide the 8 devices"),
        (["--pp=2", "--mesh=dp=4,tp=4"], "a mesh of pp 2 x dp 4 x tp 4 needs 32 devices, but there are 8"),
        (["--pp=4", "--mesh=dp=1,tp=2"], "4 layers do not fill 8 chunks on 4 stages"),
        (["--pp=2", "--mesh=dp=1,tp=4", "--seq=20"], "is not divisible by tp x pp 8; use a sequence length that is"),
        (["--pp=2", "--verify"], "compare losses with a run without --pp"),
        (["--pipeline=1f1b"], "--pipeline needs --pp"),
        (["--sends_beside"], "--sends_beside needs --pp"),
        (["--pp=2", "--mesh=dp=4", "--pipeline=1f1b", "--sends_beside"], '"interleaved_si", not to "1f1b"'),
        (["--chunks_per_stage=4"], "--chunks_per_stage needs --pp"),
        (["--pp=2", "--mesh=dp=4", "--chunks_per_stage=4"], '"interleaved", not to "w": leave it out'),
        (["--mesh=pp=2"], "the number of pipeline stages is --pp"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dhelix train: ") and says in captured.err and captured.err.count("\n") == 1
