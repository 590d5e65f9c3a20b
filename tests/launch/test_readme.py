"""The examples of README.md and docs/guide/your_step.md run as they are printed, and do what they should show."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_example_runs_and_is_interleaved() -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]  # the first one is a sketch
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    report = names["train_step"].report(names["params"], names["opt_state"], names["batch"])
    assert report["strand-duplication"].changed and report["activation-sharing"].changed


@pytest.mark.slow
@pytest.mark.deviceless
def test_twenty_lines_predict_a_step_without_a_gpu(tmp_path: Path) -> None:
    """The example runs in its own process, with its own home folder."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "your_step.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 24
    small = example.replace("4096", "256").replace("16384", "512")
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", small], env=environment, capture_output=True, text=True, check=True)
    first, times, why, left, memory, sure, to_try, *_ = done.stdout.splitlines()
    assert "where the time goes: " in left and "kernels" in left and "to try: launch setting " in to_try
    assert first == "jit_train_step: two strands over 8 layers, 4 micro-batches"
    assert " x as fast), compared with the same micro-batched step" in times and " ms" in why
    assert "peak memory" in memory and "profile of H200 with link nvlink" in sure
