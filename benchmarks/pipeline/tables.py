"""Tables of results of `run.py`, measured or predicted. `python -m dhelix.benchmarks.pages.write` puts them into docs/.

    python benchmarks/pipeline/tables.py FILE.json FILE.json ...    # prints them

Files of one workload on one machine make one set of tables, with one table for each link. *Speed-up* is over the best
pipeline baseline: the fastest pipeline without dhelix, under any setting of the link. A sentence above the table also
gives the speed-up over the fastest step without a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pipeline.variants import VARIANTS, Variant
from dhelix.benchmarks.strands.results import Result, Run, largest_difference
from dhelix.benchmarks.strands.tables import BF16, command_line
from dhelix.benchmarks.strands.variants import SETTINGS, XLA
from dhelix.errors import DhelixError

# Goals for PP 2 x TP 2: link -> (must, aim) of the speed-up over the best pipeline baseline.
GOALS = {"no-p2p": (1.05, 1.12)}


def read(path: Path) -> Run:
    """Reads a results file. Raises DhelixError if `run.py` did not write it."""
    try:
        record = json.loads(path.read_text())
        run = Run(**{**record, "results": [Result(**result) for result in record["results"]]})
        assert "stages" in run.workload and all(r.setting in SETTINGS for r in run.results)
    except (OSError, ValueError, TypeError, KeyError, AssertionError):
        raise DhelixError(f"{path} holds no results of benchmarks/pipeline/run.py; leave it out") from None
    return run


@dataclass(frozen=True)
class Group:
    """Comparable results: one workload on one machine over one link, measured or only predicted."""

    run: Run
    link: str
    results: tuple[Result, ...]

    @property
    def measured(self) -> bool:
        return any(r.steps_ms for r in self.results)

    def time(self, result: Result) -> float:
        """The step time in milliseconds: measured if the group has measured results, else predicted."""
        return result.median_ms if self.measured else result.predicted_ms or 0.0

    @property
    def pipeline(self) -> Result | None:
        """The best pipeline baseline: the fastest pipeline without dhelix."""
        return self._fastest(lambda variant: variant.pipelined and variant.kind == XLA)

    @property
    def plain(self) -> Result | None:
        """The fastest step without a pipeline and without dhelix."""
        return self._fastest(lambda variant: not variant.pipelined and variant.kind == XLA)

    @property
    def fold(self) -> Result | None:
        """The fastest of W and interleaved SI."""
        return self._fastest(lambda variant: variant.lockstep)

    def _fastest(self, wanted: Callable[[Variant], bool]) -> Result | None:
        """The fastest program of the measured ones; if nothing was measured, of the predicted ones."""
        known = [r for r in self.results if r.variant in VARIANTS and (r.steps_ms or not self.measured)]
        return min((r for r in known if wanted(VARIANTS[r.variant])), key=self.time, default=None)

    def loss_difference(self, result: Result) -> float | None:
        """The largest relative difference from the losses of the first program that has losses."""
        first = next((r for r in self.results if r.losses), None)
        return None if first is None or not result.losses else largest_difference(first.losses, result.losses)


def groups(runs: Iterable[Run]) -> list[Group]:
    """Comparable results, in the order of the files. If several files hold a program, the last one counts."""
    found: dict[tuple[Any, ...], tuple[Run, dict[tuple[str, str], Result]]] = {}
    for run in runs:
        for result in run.results:
            if result.failed or (not result.steps_ms and result.predicted_ms is None):
                continue
            link = SETTINGS[result.setting].link
            key = (tuple(sorted(run.workload.items())), run.on.get("machine", ""), run.on.get("gpus", ""), link)
            found.setdefault(key, (run, {}))[1][result.setting, result.variant] = result
    return [Group(run, key[-1], tuple(results.values())) for key, (run, results) in found.items()]


def tables(runs: Sequence[Run]) -> str:
    """All tables of `runs`, in Markdown."""
    parts = ["\n\n".join(filter(None, (_head(g), _sentence(g), _steps(g), _checks(g)))) for g in groups(runs)]
    dropped = [line for run in runs for line in run.dropped]
    dropped += [f"{r.setting} / {r.variant}: {r.failed}" for run in runs for r in run.results if r.failed]
    if dropped:
        parts.append("Not run:\n\n" + "\n".join(f"- {line}" for line in dict.fromkeys(dropped)))
    return "\n\n".join(parts) + "\n"


def _head(group: Group) -> str:
    w, on = group.run.workload, group.run.on
    counts = sorted({len(r.steps_ms) for r in group.results if r.steps_ms})
    how = f"{' or '.join(map(str, counts))} timed steps per row" if counts else "predicted"
    return (
        f"**{w['preset']} shapes, {w['layers']} layers, S {w['seq']}, M {w['microbatches']}, vocabulary {w['vocab']}, "
        f"PP {w['stages']} x TP {w['tp']}; {group.link}; {how}** "
        f"({on.get('gpus', '')}, machine {on.get('machine')}, jax {on.get('jax')}, {on.get('date')})"
    )


def _sentence(group: Group) -> str:
    ours, pipeline, plain = group.fold, group.pipeline, group.plain
    if ours is None or pipeline is None:
        return ""
    text = (
        f"Best pipeline baseline: {_named(group, pipeline)}. Strands: {_named(group, ours)}, "
        f"{group.time(pipeline) / group.time(ours):.3f} times as fast"
    )
    w = group.run.workload
    if (w["stages"], w["tp"]) == (2, 2) and group.link in GOALS:
        text += " (must be {}, should be {})".format(*GOALS[group.link])
    if plain is not None:
        text += f". Best without a pipeline: {_named(group, plain)}, {group.time(plain) / group.time(ours):.3f}"
    return text + "."


def _named(group: Group, result: Result) -> str:
    return f"{result.variant} ({result.setting}), {group.time(result):.1f} ms"


def _steps(group: Group) -> str:
    baseline, best = group.pipeline, group.fold
    heads = (
        "setting | program | step ms (fastest-slowest) | speed-up over the best pipeline baseline "
        "| predicted ms (error) | peak GiB | compile s"
    )
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    for r in group.results:
        name = f"**{r.variant}**" if r is best else r.variant
        step = f"{r.median_ms:.1f} ({min(r.steps_ms):.1f}-{max(r.steps_ms):.1f})" if r.steps_ms else ""
        known = baseline is not None and (r.steps_ms or not group.measured)
        speed_up = f"{group.time(baseline) / group.time(r):.3f}" if baseline is not None and known else ""
        predicted = f"{r.predicted_ms:.1f}" if r.predicted_ms is not None else ""
        if r.predicted_ms is not None and r.steps_ms:
            predicted += f" ({r.predicted_ms / r.median_ms - 1:+.1%})"
        compiled = (f"{r.peak_gib:.2f}", f"{r.compile_s:.0f}") if r.peak_gib else ("", "")
        lines.append("| " + " | ".join((r.setting, name, step, speed_up, predicted, *compiled)) + " |")
    return "\n".join(lines)


def _checks(group: Group) -> str:
    """Says whether the losses of the first steps agree within bf16's rounding."""
    found = {f"{r.variant} ({r.setting})": group.loss_difference(r) for r in group.results}
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return ""
    worst = max(known, key=lambda name: known[name])
    wrong = [name for name, value in known.items() if value > BF16]
    verdict = f"more than bf16 rounds: {', '.join(wrong)}" if wrong else "within bf16's rounding (2^-8)"
    return f"Losses of the first steps differ by {known[worst]:.0e} at most ({worst}), {verdict}."


if __name__ == "__main__":
    command_line(__doc__, read, tables)
