"""Every example runs as examples/README.md says, and prints that its step became strands, or what `SAYS` names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dhelix.tests.quick import slow_but

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
QUICK = {"own_loop", "undecorated"}
SAYS = {"collective_matmuls": r"difference to one device: \d\.\de-0\d", "pipeline": "runs in the GPU compiler"}


def test_the_readme_lists_them_all() -> None:
    assert sorted(re.findall(r"^\| `(\w+)\.py`", (FOLDER / "README.md").read_text(), re.MULTILINE)) == EXAMPLES


@pytest.mark.parametrize("name", slow_but(QUICK, EXAMPLES))
def test_an_example(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "HOME": str(tmp_path)}
    before = ["-m", "dhelix", "run"] if name == "undecorated" else []
    command = [sys.executable, *before, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = done.stdout + (done.stderr if before else "")
    assert re.search(SAYS.get(name, "two strands over [48] layers, 4 micro-batches"), said)
    losses = [float(loss) for loss in re.findall(r"^loss (.*)", said, re.MULTILINE)]
    assert not losses or losses[-1] < losses[0]
