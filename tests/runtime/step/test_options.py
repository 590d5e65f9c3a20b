"""A type checker knows the options of `strand_interleave` exactly, and steps keep their types."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dhelix
from dhelix.errors import DhelixError
from dhelix.passes.plans.plan import Plan
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.step.options import JitOptions, StepOptions
from dhelix.runtime.step.strand_interleave import strand_interleave

PLAN = Plan("a step")
JIT = dataclasses.fields(JitOptions)
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


def test_options_are_those_of_the_step_and_of_jit() -> None:
    shown = inspect.signature(strand_interleave).parameters
    ours = {field.name: field.default for field in dataclasses.fields(StepOptions)}
    assert {name: p.default for name, p in list(shown.items())[1:]} == ours
    jits = list(inspect.signature(jax.jit).parameters)[1:]
    assert sorted(field.name for field in dataclasses.fields(JitOptions)) == sorted(jits)


def test_help_says_what_each_option_means() -> None:
    said = strand_interleave.__doc__ or ""
    assert all(f"      {field.name}: " in said for field in dataclasses.fields(StepOptions)[len(JIT) :])


def test_memory_may_be_said_with_a_unit() -> None:
    assert StepOptions(memory_limit="1.5 GiB").most_bytes == StepOptions(memory_limit=3 << 29).most_bytes == 3 << 29


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "fast"}, "schedule='fast' is unknown; use one of dp, list"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": "60"}, "memory_limit='60': give bytes as a number, or with a unit"),
        ({"plan": "no-such-file.json"}, "cannot be read"),
        ({"profile": "no-such-file.json"}, "no such file"),
        ({"shedule": "dp"}, "strand_interleave or jax.jit: did you mean .schedule"),
        ({"schedule": "1f1b"}, "is a pipeline.s: give it to pipeline="),
        ({"passes": 3}, "passes=3: give a list of passes"),
        ({"passes": ["strand-pairing"]}, "give a list of passes"),
        ({"disable": 3}, "disable=3: give names of passes"),
        ({"disable": [object]}, "give names of passes"),
        ({"plan": PLAN, "passes": []}, "leave out plan= or passes="),
        ({"passes": [], "memory_limit": 5}, "give it to a pass"),
        ({"schedule": "xla", "memory_limit": 5}, "use another schedule"),
        ({"max_in_flight": 0}, "max_in_flight=0: give a whole number of collectives"),
        ({"schedule": "xla", "max_in_flight": 1}, "use another schedule"),
        ({"passes": [], "max_in_flight": 1}, "give it to a pass"),
        ({"plan": PLAN, "max_in_flight": 1}, "plan with --max_in_flight"),
        ({"skew": -1}, "skew=-1: give a whole number of layers"),
        ({"schedule": "intra_batch", "skew": 1}, "has no skew"),
        ({"passes": [], "skew": 1}, "add StrandSkew and StrandEnds"),
        ({"plan": PLAN, "skew": 1}, "plan with --skew"),
        ({"pipeline": Fold(2, 4), "microbatches": 4, "skew": 1}, "by its own schedule"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DhelixError, match=said):
        strand_interleave(lambda x: x, **options)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "off"),
        ({"schedule": "intra_batch"}, "auto"),
        ({"schedule": "intra_batch", "collective_matmul": "off"}, "off"),
        ({"schedule": "intra_batch", "collective_matmul": "ring"}, "ring"),
        ({"collective_matmul": "auto"}, "auto"),
        ({"schedule": "intra_batch", "plan": PLAN}, "off"),
        ({"schedule": "intra_batch", "passes": ()}, "off"),
    ],
    ids=str,
)
def test_intra_batch_comes_with_collective_matmuls(options: dict[str, Any], form: str) -> None:
    """Unless the user says otherwise, or a plan or passes replace the schedule."""
    assert StepOptions(**options).matmuls == form


def test_numpy_integers_are_whole_numbers_and_flags_are_bools() -> None:
    assert type(StepOptions(microbatches=np.int64(4)).microbatches) is int  # type: ignore[arg-type]
    for wrong in ({"microbatches": 4.0}, {"strict": 1}, {"verify": "yes"}):
        (name,) = wrong
        with pytest.raises(DhelixError, match=f"{name}=.*: give "):
            StepOptions(**wrong)  # type: ignore[arg-type]
