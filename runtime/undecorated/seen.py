"""What `dhelix run` did with each program: the text at the end of a process, and the file of `--report`.

dhelix run: 1 of 12 programs runs as two strands
  jit_train_step: two strands over 8 layers, 4 micro-batches
    ...
  jit_eval_step: left alone: it takes no gradients
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHANGED, LEFT_ALONE, FAILED = "interleaved", "left alone", "failed"


@dataclass(frozen=True)
class Seen:
    """One program.

    Attributes:
      name: name of the program, such as jit_train_step.
      devices: number of devices that it runs on.
      outcome: CHANGED, LEFT_ALONE or FAILED.
      why: for a changed program, the lines of its headline; else the reason.
      seconds: what dhelix took, without the compilation that runs in any case.
    """

    name: str
    devices: int
    outcome: str
    why: tuple[str, ...]
    seconds: float = 0.0


def text(seen: Sequence[Seen], others: int) -> str:
    """The report for people.

    Args:
      others: number of programs that are not in `seen`, because they run on one device or take no gradients.
    """
    if not seen and not others:
        return "dhelix run: the program compiled nothing"
    changed = [one for one in seen if one.outcome == CHANGED]
    runs = "runs" if len(changed) == 1 else "run"
    lines = [f"dhelix run: {len(changed)} of {len(seen) + others} programs {runs} as two strands"]
    programs = Counter(one.why[:1] for one in changed)  # a step is compiled anew for other shapes and shardings
    for (first,), count in programs.items():
        rest = next(one.why[1:] for one in changed if one.why[0] == first)
        lines += [f"  {first}{_times(count)}", *(f"    {line}" for line in rest)]
    left = Counter((one.name, one.outcome, one.why[:1]) for one in seen if one.outcome != CHANGED)
    for (name, outcome, why), count in left.items():
        lines.append(f"  {name}{_times(count)}: {outcome}: {' '.join(why)}")
    if others:
        lines.append(f"  {others} others: on one device, or without gradients")
    return "\n".join(lines)


def _times(count: int) -> str:
    return f" ({count} x)" if count > 1 else ""


def write(seen: Sequence[Seen], others: int, path: Path) -> None:
    """Writes the report as JSON."""
    path.write_text(json.dumps({"programs": [asdict(one) for one in seen], "others": others}, indent=1) + "\n")
