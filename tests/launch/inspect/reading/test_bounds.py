"""Modules that would take endless time or memory if anything unfolded them, or that no machine could run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect import picture
from dhelix.launch.inspect.command import inspect_dump
from dhelix.launch.inspect.inspection import Inspection
from dhelix.tests.machine import slowness

HEADER = "HloModule m, is_scheduled=true\n"
STATE = "(s32[], f32[1024]{0})"
ADD = "p = f32[1024]{0} parameter(0)\n  ROOT a = f32[1024]{0} add(p, p)"
SECONDS = 3.0


def calls(depth: int, width: int) -> str:
    """Computations that call the one before them `width` times each."""
    text = f"{HEADER}fn0 {{\n  {ADD}\n}}\n"
    for level in range(1, depth + 1):
        lines = [
            f"c{n} = f32[1024]{{0}} call({f'c{n - 1}' if n else 'p'}), to_apply=fn{level - 1}" for n in range(width)
        ]
        body = "\n  ".join(["p = f32[1024]{0} parameter(0)", *lines[:-1], f"ROOT {lines[-1]}"])
        text += f"{f'fn{level}' if level < depth else 'ENTRY main'} {{\n  {body}\n}}\n"
    return text


def loops(*trips: int) -> str:
    """Loops inside of each other, the innermost first."""
    text = HEADER
    for level, count in enumerate(trips):
        text += f"""until{level} {{
  s = {STATE} parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant({count})
  ROOT l = pred[] compare(i, n), direction=LT
}}
"""
        inner = f"""z = s32[] constant(0)
  t = {STATE} tuple(z, x)
  w = {STATE} while(t), condition=until{level - 1}, body=body{level - 1}
  y = f32[1024]{{0}} get-tuple-element(w), index=1"""
        text += f"""body{level} {{
  s = {STATE} parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  j = s32[] add(i, one)
  x = f32[1024]{{0}} get-tuple-element(s), index=1
  {inner if level else "y = f32[1024]{0} add(x, x)"}
  ROOT r = {STATE} tuple(j, y)
}}
"""
    last = len(trips) - 1
    return f"""{text}ENTRY main {{
  p = f32[1024]{{0}} parameter(0)
  z = s32[] constant(0)
  t = {STATE} tuple(z, p)
  ROOT w = {STATE} while(t), condition=until{last}, body=body{last}
}}
"""


def one(shape: str) -> str:
    return f"{HEADER}ENTRY main {{\n  ROOT p = {shape} parameter(0)\n}}\n"


def inspected(text: str, folder: Path) -> Inspection:
    (folder / "step.txt").write_text(text)
    start = time.monotonic()
    try:
        return inspect_dump(folder / "step.txt")
    finally:
        assert time.monotonic() - start < SECONDS * slowness()


@pytest.mark.parametrize(
    ("text", "runs"),
    [(calls(30, 2), 2**30), (calls(99, 1), 1), (loops(2 * 10**9), 2 * 10**9), (loops(10**5, 10**6), 10**11)],
)
def test_nests_are_folded(text: str, runs: int, tmp_path: Path) -> None:
    found, alone = inspected(text, tmp_path), inspected(calls(1, 1), tmp_path)
    assert found.compute_ms >= 0.999 * runs * alone.compute_ms > 0
    assert 0 < len(picture.of(found).bars) <= 200_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (calls(60, 2), "fn.* would run .* times in a step, more than any step does"),
        (calls(300, 1), "more than 100 deep"),
        (loops(10**6, 10**6, 10**6), "would run 1.0e[+]18 times"),
        (one("f32[1000000,1000000,1000000]"), "p has 4.0e[+]18 bytes, more than any machine holds"),
        (one("f32[9000000000000000000,9000000000000000000]"), "more than any machine holds"),
        (one("(" * 5000 + "f32[]" + ")" * 5000), "cannot read|rejects"),
    ],
)
def test_what_no_machine_runs_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match=reason):
        inspected(text, tmp_path)
