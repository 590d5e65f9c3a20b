"""Measured effects of launch settings on whole steps, from `data/launching/effects.json`.

`benchmarks/pages/launch_effects.py` makes the file from the result files, so it always agrees with docs/results.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).parents[1] / "data" / "launching" / "effects.json"


@dataclass(frozen=True)
class Effect:
    """How much faster steps are under a launch setting than under the default one of the link, in the same run.

    Attributes:
      link, setting: of `hardware.LINKS` and `profile.SETTINGS`.
      program: "plain" or "interleaved" steps.
      runs: number of runs that compare both.
      least, median, most: ratio of the times; above 1 is faster.
      newest: date of the newest run.
    """

    link: str
    setting: str
    program: str
    runs: int
    least: float
    median: float
    most: float
    newest: str

    def __str__(self) -> str:
        span = "" if self.runs == 1 else f" ({self.least:.2f} to {self.most:.2f} in {self.runs} runs)"
        return f"{self.program} steps {self.median:.2f} x as fast{span}, newest run {self.newest}"


@functools.cache
def effects() -> tuple[Effect, ...]:
    """All effects."""
    return tuple(Effect(**row) for row in json.loads(_FILE.read_text()))


def of(link: str, setting: str) -> tuple[Effect, ...]:
    """The effects of one setting; empty if it was not measured with this link."""
    return tuple(effect for effect in effects() if (effect.link, effect.setting) == (link, setting))
