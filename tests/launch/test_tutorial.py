"""docs/guide/tutorial.md, step by step: each of its commands runs in an empty folder, with an empty home folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "tutorial.md"
BLOCK = re.compile(r'```(?P<kind>python|bash)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)```', re.DOTALL)
SRUN = """#!{python}
# Starts a command twice, with the variables that Slurm gives to the two tasks of a job on one host.
import os, subprocess, sys
shared = dict(os.environ, SLURM_JOB_ID="{port}", SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2",
              SLURM_STEP_TASKS_PER_NODE="2")
tasks = [subprocess.Popen(sys.argv[1:], env=dict(shared, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))) for n in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a new user, who has `dhelix`, `python` and `srun`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, text in {
        "dhelix": '#!/bin/sh\nexec "$PYTHON" -m dhelix "$@"\n',
        "python": '#!/bin/sh\nexec "$PYTHON" "$@"\n',
        "srun": SRUN.format(python=sys.executable, port=port),
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONPYCACHEPREFIX", "LANG") if name in os.environ}
    path = f"{programs}:/usr/bin:/bin"
    return {**kept, "HOME": str(tmp_path / "home"), "PATH": path, "PYTHON": sys.executable, "TERM": "dumb"}


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_tutorial_runs_as_it_stands(tmp_path: Path, shell: dict[str, str]) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    said = ""
    for block in BLOCK.finditer(PAGE.read_text()):
        name, text = block["file"], block["text"]
        if name:
            (folder / name).write_text(text)
        if block["kind"] == "bash":
            command = ["bash", name] if name else ["bash", "-e", "-o", "pipefail", "-c", text]
            done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            said += done.stdout
    assert {"my_step.py", "on_paper.py", "shard.py", "job.sh", "plan.json", "page.html"} <= set(os.listdir(folder))
    assert "strands takes" in said and "two strands over 8 layers" in said  # 4
    assert "is hidden and" in said  # 5
    assert "parameters 1x1" in said or "zero" in said  # 7
    assert len(re.findall(r"step 9: loss", said)) >= 2  # 8: the job of two processes, and that of Slurm
    assert len(set(re.findall(r"step 9: loss (.*)", said))) == 1
