"""What a type checker knows of `strand_interleave`: its options are those that it takes, and steps keep their types."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import jax
import pytest

import dhelix
from dhelix.runtime.step import option_types
from dhelix.runtime.step.strand_interleave import strand_interleave

PROGRAM = """
from dhelix import strand_interleave

@strand_interleave(microbatches=4, donate_argnums=0)
def step(state: float, batch: int) -> str: ...

def plain(state: float) -> str: ...

good: str = step(1.0, 2)
also: str = strand_interleave(plain, schedule="list")(1.0)
"""
WRONG = (
    'strand_interleave(plain, shedule="dp")',
    'strand_interleave(schedule="dpp")',
    "step(1.0)",
    "n: int = step(1.0, 2)",
)


def test_options_are_those_of_the_function_and_of_jit() -> None:
    ours = [p.name for p in inspect.signature(strand_interleave).parameters.values() if p.kind is p.KEYWORD_ONLY]
    jits = list(inspect.signature(jax.jit).parameters)[1:]
    assert sorted(option_types.JitOptions.__annotations__) == sorted(jits)
    assert sorted(option_types.Options.__annotations__) == sorted([*ours, *jits])
    assert typing.get_args(option_types.Schedule) == option_types.SCHEDULES


@pytest.mark.slow
def test_a_strict_checker_refuses_what_is_no_option(tmp_path: Path) -> None:
    root = Path(dhelix.__file__).parent
    (tmp_path / "dhelix").symlink_to(root)
    (tmp_path / "step.py").write_text(PROGRAM + "\n".join(WRONG) + "\n")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "include": ["step.py"]}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    first = PROGRAM.count("\n") + 1
    errors = {int(line.split(":")[1]) for line in said.splitlines() if "step.py:" in line and " - error: " in line}
    assert errors == set(range(first, first + len(WRONG))), said
