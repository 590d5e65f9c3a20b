"""Results of `run.py` as data and files, and tables that compare them with DistFuse's numbers.

    python benchmarks/inference/results.py FILE.json ...    # prints the tables

A file holds the results of one call on one machine, and makes one set of tables. Times of different machines are not
compared. `python -m dhelix.benchmarks.pages.write` puts the tables into docs/results/inference.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strands.tables import command_line
from dhelix.errors import DhelixError
from dhelix.profiles.profile import Provenance, Timing

XLA, TILE_WISE, BOUND = "xla", "tile_all_reduce", "no communication"
"""The variants other than the forms of `matmul_all_reduce`, see `programs.py`."""

PAPER = ("8.43 to 25.05 %", "", "5.2 to 11.1 %", "44.3 %")
"""DistFuse's numbers (section 3.3) as a row of the table: communication's share of the latency; no name; vLLM's gain by
the tile-wise all-reduce alone; hidden fraction of the all-reduce's latency, over both layers of table 1."""


@dataclass
class CaseResult:
    """The results of one case. Each dict has the variants as keys.

    Attributes:
      calls: number of calls in a turn, enqueued one after the other.
      ms: milliseconds of one call, in each round. With a whole model, a call is a prompt or a token.
      mhz, watts: clock of the SMs and power of GPU 0 in each round; empty without samples.
      differs: largest difference from XLA's result, divided by the result's largest number.
      compile_s: seconds of compilation.
      failed: why there are no times.
    """

    calls: int = 0
    ms: dict[str, list[float]] = field(default_factory=dict)
    mhz: dict[str, list[float]] = field(default_factory=dict)
    watts: dict[str, list[float]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, Timing]:
        """Median seconds and quartile distance, by variant."""
        return {variant: Timing.of(ms / 1e3 for ms in values) for variant, values in self.ms.items() if values}

    @property
    def cost(self) -> float | None:
        """Seconds that communication costs XLA's program; None if unknown or not positive."""
        times = self.times
        if XLA not in times or BOUND not in times or times[BOUND].seconds >= times[XLA].seconds:
            return None
        return times[XLA].seconds - times[BOUND].seconds

    @property
    def best(self) -> str | None:
        """The fastest variant other than XLA's and the bound."""
        ours = {variant: timing.seconds for variant, timing in self.times.items() if variant not in (XLA, BOUND)}
        return min(ours, key=lambda variant: ours[variant], default=None)

    def saved(self, variant: str) -> float | None:
        """Fraction of XLA's latency that the variant saves."""
        times = self.times
        return 1 - times[variant].seconds / times[XLA].seconds if XLA in times and variant in times else None

    def net_hidden(self, variant: str) -> float | None:
        """(XLA - variant) / (XLA - no communication): the fraction of the communication cost that is removed."""
        if self.cost is None or variant == BOUND or variant not in self.times:
            return None
        return (self.times[XLA].seconds - self.times[variant].seconds) / self.cost


@dataclass
class Run:
    """One call of `run.py`.

    Attributes:
      workload: preset, layers, dtype, tp, the model's sizes, and whether the whole model was timed or only layers.
      tolerance: the largest `differs` that is allowed.
      dropped: cases that the budget had no time for.
    """

    on: Provenance
    link: str
    workload: dict[str, Any]
    tolerance: float
    cases: dict[str, CaseResult] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        unfinished.replace(path)


def read(path: Path) -> Run:
    """Reads a results file. Raises DhelixError if `run.py` did not write it."""
    try:
        record = json.loads(path.read_text())
        cases = {name: CaseResult(**values) for name, values in record.pop("cases").items()}
        return Run(**{**record, "on": Provenance(**record["on"]), "cases": cases})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise DhelixError(f"{path} holds no results of benchmarks/inference/run.py; leave it out") from None


def tables(runs: Sequence[Run]) -> str:
    """All tables, in Markdown."""
    return "\n\n".join(part for run in runs for part in _of_run(run) if part) + "\n"


def _of_run(run: Run) -> list[str]:
    timed = {name: case for name, case in run.cases.items() if case.times}
    return [_head(run), _beside_the_paper(timed), _variants(timed, _whole(run)), _checked(run), _missing(run)]


def _whole(run: Run) -> bool:
    return run.workload.get("whole", False)  # older files are of layers only


def _head(run: Run) -> str:
    w, on = run.workload, run.on
    rounds = sorted({len(ms) for case in run.cases.values() for ms in case.ms.values()})
    layers = f"{'whole model with ' if _whole(run) else ''}{w['layers']} layers"
    return (
        f"**{w['preset']} shapes, {layers}, TP {w['tp']}, {w['dtype']}; {on.gpu}, {run.link}; medians of"
        f" {' or '.join(map(str, rounds)) or 'no'} rounds** (machine {on.machine or 'unknown'}, driver"
        f" {on.driver or 'unknown'}, jax {on.jax}, NCCL {on.nccl or 'unknown'}, {on.date})"
    )


def _beside_the_paper(cases: dict[str, CaseResult]) -> str:
    """The share of communication in each case, the best variant's gain, and DistFuse's numbers."""
    head = "sequences x tokens", "communication's share of latency", "best", "latency lower by", "net hidden"
    rows: list[tuple[str, ...]] = [head]
    for name, case in cases.items():
        share = case.cost / case.times[XLA].seconds if case.cost is not None else None
        best = case.best
        gains = (case.saved(best), case.net_hidden(best)) if best else (None, None)
        rows.append((name, _percent(share), best or "", *map(_percent, gains)))
    return _markdown([*rows, ("DistFuse, 4 x A100-40GB", *PAPER)])


def _variants(cases: dict[str, CaseResult], whole: bool) -> str:
    ms = "ms per prompt or token" if whole else "ms"
    head = "sequences x tokens", "variant", ms, "spread", "latency lower by", "net hidden", "differs", "MHz", "W"
    rows: list[tuple[str, ...]] = [head]
    for name, case in cases.items():
        for variant, timing in case.times.items():
            saved = None if variant == XLA else case.saved(variant)
            hidden = None if variant == XLA else case.net_hidden(variant)
            differs = f"{case.differs[variant]:.4f}" if variant in case.differs else ""
            clocks = (_median(of.get(variant, [])) for of in (case.mhz, case.watts))
            times = f"{1e3 * timing.seconds:.3f}", f"{1e3 * timing.spread:.3f}"
            rows.append((name, variant, *times, _percent(saved), _percent(hidden), differs, *clocks))
    return _markdown(rows) if len(rows) > 1 else ""


def _checked(run: Run) -> str:
    found = [d for case in run.cases.values() for variant, d in case.differs.items() if variant in case.ms]
    if not found:
        return ""
    return (
        f"All results differ from XLA's by at most {max(found):.4f} of the largest number; allowed are"
        f" {run.tolerance:.4f}."
    )


def _missing(run: Run) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, case in run.cases.items():
        for variant, why in case.failed.items():
            reasons.setdefault((variant, why), []).append(name)
    lines = [f"- {variant} ({'; '.join(names)}): {why}" for (variant, why), names in reasons.items()]
    lines += [f"- {name}: no time left" for name in run.dropped]
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _median(values: Sequence[float]) -> str:
    return f"{Timing.of(values).seconds:.0f}" if values else ""


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


if __name__ == "__main__":
    command_line(__doc__, read, tables)
