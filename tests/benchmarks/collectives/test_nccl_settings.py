"""Collectives under NCCL's settings: the timed operations, the table, and a setting that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dhelix.benchmarks.collectives import nccl_settings


def test_everything_is_timed_on_any_devices() -> None:
    found = nccl_settings.measure(rows=64, width=32)
    assert len(found) == 7 and min(found.values()) > 0
    rows = nccl_settings.table({"small buffers": found}).splitlines()
    assert len(rows) == 3 and {row.count("|") for row in rows} == {9}


def test_a_setting_that_fails_costs_the_others_nothing(monkeypatch, capsys, tmp_path: Path) -> None:
    def run(command, env, **_):
        failed = env.get("NCCL_BUFFSIZE") == "262144"
        record = json.dumps({"on": {}, "us": {"all-gather": 7.0}})
        return subprocess.CompletedProcess(
            command, int(failed), "" if failed else f"noise\n{record}\n", "no such thing"
        )

    monkeypatch.setattr(nccl_settings.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["x", "--settings", "small buffers; as started", "--out", str(tmp_path)])
    nccl_settings.main()
    said = capsys.readouterr()
    assert "small buffers: no such thing" in said.err and "| as started | 7 |" in said.out
    assert json.loads((tmp_path / "nccl_settings.json").read_text())["us"] == {"as started": {"all-gather": 7.0}}


def test_an_unknown_setting(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--settings", "large buffers"])
    with pytest.raises(SystemExit, match="no setting 'large buffers'"):
        nccl_settings.main()
