"""Tables of the results of `strands/run.py`. `python -m dhelix.benchmarks.pages.write` puts them into docs/results/.

    python benchmarks/strands/tables.py FILE.json FILE.json ...    # prints them

Files of one workload on one machine make one set of tables, even if they come from several calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dhelix.benchmarks.strands.results import Group, Result, Run, causes, groups, largest_difference, read
from dhelix.benchmarks.strands.variants import BOUND, SETTINGS, XLA, either
from dhelix.errors import DhelixError

# Goals for TP over 4 GPUs: link -> (must, aim) of the speed-up over XLA's best.
GOALS = {"nvlink": (1.12, 1.18), "no-p2p": (1.27, 1.32), "two-nodes": (1.05, 1.10)}

BF16 = 2.0**-8
"""Allowed relative difference of losses and gradient norms: the largest that rounding one number to bf16 makes."""
_MANY = 10  # a comparison of at least so many steps gets its own table


def tables(runs: Sequence[Run]) -> str:
    """All tables of some runs, in Markdown."""
    parts = [_of_group(group) for group in groups(runs)]
    parts += [_on_paper(run) for run in runs if not any(r.steps_ms for r in run.results)]
    parts += [_checked(run) for run in runs]
    parts = [part for part in parts if part]
    dropped = [line for run in runs for line in run.dropped]
    dropped += [f"{r.setting} / {r.variant}: {r.failed}" for run in runs for r in run.results if r.failed]
    if dropped:
        parts.append("Not run:\n\n" + "\n".join(f"- {line}" for line in dict.fromkeys(dropped)))
    return "\n\n".join(parts) + "\n"


def _of_group(group: Group) -> str:
    parts = [
        _head(group.run, f"{group.link}, {_timed(group)}"),
        _sentence(group),
        _steps(group),
        _where(group),
        _causes(group),
    ]
    return "\n\n".join(part for part in parts if part)


def _timed(group: Group) -> str:
    """The number of steps that a median is taken over."""
    counts = sorted({len(r.steps_ms) for r in group.results})
    return f"{' or '.join(map(str, counts))} timed steps per row"


def _head(run: Run, link: str) -> str:
    w, on = run.workload, run.on
    channels = f", at most {w['channels']} channels" if w.get("channels") else ""
    shards = f" with the shards of TP {w['shards']}" if w.get("shards") else ""
    shards += f", DP {w['dp']}" if w.get("dp", 1) > 1 else ""
    shards += f", sharding {w['sharding']}" if w.get("sharding") else ""
    shards += f", states {w['states']}" if w.get("states") else ""
    shards += f", EP {w['ep']}, capacity factor {w['capacity']:g}" if w.get("ep") else ""
    shards += f", CP {w['cp']} ({w['context']})" if w.get("cp") else ""
    return (
        f"**{w.get('preset')} shapes, {w.get('layers')} layers{', unrolled' * bool(w.get('unrolled'))}, "
        f"S {w.get('seq')}, M {w.get('microbatches')}, TP {w.get('tp')}{shards}, vocabulary {w.get('vocab')}; "
        f"{link}{channels}** ({on.get('gpus', '')}, machine {on.get('machine')}, jax {on.get('jax')}, {on.get('date')})"
    )


def _on_paper(run: Run) -> str:
    """The evaluator's times for programs that were compiled but not run."""
    rows = []
    known = [r for r in run.results if r.predicted_ms is not None]
    for r in known:
        xla = [o.predicted_ms or 0.0 for o in known if o.kind == XLA and _link(o) == _link(r)]
        speed_up = min(xla) / r.predicted_ms if xla and r.predicted_ms else None
        cells = (f"{r.predicted_ms:.1f}", _number(speed_up, ".3f"), f"{r.peak_gib:.2f}", f"{r.passes_s:.1f}")
        rows.append((r.setting, r.variant, *cells))
    heads = "setting | program | predicted ms | speed-up over XLA's best | peak GiB | passes s"
    return _head(run, "on paper") + "\n\n" + _table(heads, rows) if rows else ""


def _checked(run: Run) -> str:
    """Compares losses and gradient norms with the plain program's of the same setting; "" for less than _MANY steps."""
    plain = {r.setting: r for r in run.results if r.variant in either("plain")}
    rows = []
    for r in run.results:
        if r.kind != BOUND and r.setting in plain and len(r.losses) >= _MANY:
            loss = largest_difference(plain[r.setting].losses, r.losses)
            norm = largest_difference(plain[r.setting].grad_norms, r.grad_norms)
            right = all(found is not None and found <= BF16 for found in (loss, norm))
            course = f"{r.losses[0]:.4f} to {r.losses[-1]:.4f}"
            cells = course, _number(loss, ".0e"), _number(norm, ".0e"), "yes" if right else "**no**"
            rows.append((r.setting, r.variant, str(len(r.losses)), *cells))
    heads = "setting | program | steps | loss | differs by | norm of gradients differs by | within bf16"
    return _head(run, "results beside the plain program's") + "\n\n" + _table(heads, rows) if rows else ""


def _link(result: Result) -> str:
    return SETTINGS[result.setting].link


def _sentence(group: Group) -> str:
    best, xla, cost = group.best("ours"), group.xla, group.communication_cost
    if best is None or xla is None:
        return ""
    text = (
        f"XLA's best: {xla.variant} ({xla.setting}), {xla.median_ms:.1f} ms. Ours: {best.variant} ({best.setting}), "
        f"{best.median_ms:.1f} ms, {xla.median_ms / best.median_ms:.3f} times as fast"
    )
    if group.link in GOALS and group.run.workload.get("tp", 4) == 4:
        text += " (must be {}, should be {})".format(*GOALS[group.link])
    if cost is not None and group.bound is not None:
        text += (
            f". Communication costs XLA's best {cost:.1f} ms, {cost / xla.median_ms:.0%} of its step, so "
            f"{xla.median_ms / group.bound.median_ms:.3f} is the bound; net hidden {_percent(group.net_hidden(best))}"
        )
    return text + "."


def _steps(group: Group) -> str:
    rows = []
    for r in group.results:
        plain = group.plain(r)
        memory = f"{r.peak_gib:.2f}" + (f" ({r.peak_gib / plain.peak_gib:.3f})" if plain and plain.peak_gib else "")
        rows.append((
            r.setting, _bold(group, r), _spread(r), _number(group.speed_up(r), ".3f"), _percent(group.net_hidden(r)),
            f"{group.tokens_per_second(r):,.0f}{_dropped(r)}", _percent(group.mfu(r)), memory, _predicted(r),
            _number(group.loss_difference(r), ".0e"), _power(r),
        ))  # fmt: skip
    heads = (
        "setting | program | step ms (fastest-slowest) | speed-up over XLA's best | net hidden | tokens/s | MFU "
        "| peak GiB (x plain) | predicted ms (error) | loss differs by | SM clock, power, energy of a step"
    )
    return _table(heads, rows)


def _where(group: Group) -> str:
    rows = []
    for r in group.results:
        if r.span_ms is None:
            continue
        off = r.predicted_ms / r.span_ms - 1 if r.predicted_ms is not None else None
        rows.append((
            r.setting, _bold(group, r), f"{r.span_ms:.1f}", _number(off, "+.1%"), f"{r.compute_ms:.0f}",
            f"{r.communication_ms:.0f}", f"{r.copies_ms:.0f}", f"{r.idle_ms:.0f}", _percent(r.under_compute),
            _percent(group.traced_hidden(r)), _percent(group.slow_down(r)), _percent(group.launch_interval(r)),
        ))  # fmt: skip
    heads = (
        "setting | program | traced step ms | predicted | compute ms | collectives ms | local copies ms "
        "| nothing computes ms | collectives under compute | net hidden | slow-down | launch interval"
    )
    return _table(heads, rows) if rows else ""


def _causes(group: Group) -> str:
    cost = group.communication_cost
    rows = [
        (c.name, c.before, c.after, f"{c.saved_ms:+.1f}", _percent(c.saved_ms / cost if cost else None))
        for c in causes(group)
    ]
    return _table("cause | before | after | saves ms | of what communication costs", rows) if rows else ""


def _bold(group: Group, result: Result) -> str:
    return f"**{result.variant}**" if result is group.best("ours") else result.variant


def _spread(result: Result) -> str:
    return f"{result.median_ms:.1f} ({min(result.steps_ms):.1f}-{max(result.steps_ms):.1f})"


def _dropped(result: Result) -> str:
    """With experts, the share of the tokens' choices that count in tokens/s and MFU, but were dropped."""
    return f" ({statistics.mean(result.dropped):.1%} of choices dropped)" if result.dropped else ""


def _predicted(result: Result) -> str:
    if result.predicted_ms is None:
        return ""
    return f"{result.predicted_ms:.1f} ({result.predicted_ms / result.median_ms - 1:+.1%})"


def _power(result: Result) -> str:
    if not result.mhz:
        return ""
    energy = f", {statistics.median(result.joules):.0f} J" if result.joules else ""
    return f"{statistics.median(result.mhz):.0f} MHz, {statistics.median(result.watts):.0f} W{energy}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def command_line[R](description: str | None, read: Callable[[Path], R], tables: Callable[[Sequence[R]], str]) -> None:
    """The command line of a script that prints tables of result files.

    Args:
      description: help text of the script.
      read: reads a result file.
      tables: turns results into Markdown.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    try:
        print(tables([read(path) for path in arguments.files]))
    except (DhelixError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    command_line(__doc__, read, tables)
