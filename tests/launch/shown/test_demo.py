"""The demo at small sizes: equal losses, both GPU programs, and its message if it cannot compile for GPUs."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dhelix.launch.shown import demo
from dhelix.models import preset
from dhelix.passes.framework.report import Report
from dhelix.runtime.compiler import deviceless

OPTIONS = dataclasses.replace(demo.TRAINING, layers=2, seq=16, batch=8, steps=3, data=__file__)


def demonstrate(folder: Path) -> tuple[dict[str, Any], str]:
    """Runs the demo. Returns the report that it writes and the text that it shows."""
    text = io.StringIO()
    config = preset("llama-8b", layers=2, seq=1024, vocab=1024, attention="xla")
    report = demo.demonstrate(OPTIONS, config, 2, folder / "out", Console(file=text, width=120))
    assert json.loads((folder / "out" / "report.json").read_text()) == report
    return report, text.getvalue()


@pytest.mark.slow
def test_without_the_gpu_compiler_the_first_part_runs_and_the_second_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise deviceless.DevicelessError("needs the plugin: pip install 'dhelix[compile]'")

    monkeypatch.setattr(deviceless, "mesh", missing)
    report, text = demonstrate(tmp_path)
    assert [entry["step"] for entry in report["losses"]] == [1, 2, 3]
    assert all(entry["plain"] == entry["interleaved"] for entry in report["losses"])
    assert report["largest_difference"] == 0
    assert "Largest difference of 3 losses: 0." in text
    assert "two strands over" in text and "gain not predicted: a prediction needs a compilation for GPUs" in text
    assert "Left out: needs the plugin: pip install 'dhelix[compile]'" in text
    assert "programs" not in report


@pytest.mark.slow
@pytest.mark.deviceless
def test_both_gpu_programs_are_written_compared_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: ([demo.Losses(1, 2.0, 2.0)], Report("jit_step", "")))
    report, text = demonstrate(tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "interleaved.hlo.pb", "plain.hlo.pb", "report.json", "timeline.png",
    }  # fmt: skip
    before, after = report["programs"]["before"], report["programs"]["after"]
    assert before["hidden_ms"] < after["hidden_ms"]
    assert before["memory"]["peak"] > 0 and after["memory"]["peak"] > 0
    for row in ("communication exposed", "communication hidden", "memory, temporaries", "memory, peak"):
        assert row in text
    assert f"Look at {tmp_path}/out/timeline.png" in text
