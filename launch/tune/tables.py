"""What `dhelix tune` prints: the time of a step by who chose the settings, and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dhelix.launch.shown.progress import say
from dhelix.launch.tune.process_search import FASTER
from dhelix.passes.framework.units import milliseconds
from dhelix.runtime.tuning.step_search import ALONE, DEFAULTS, TUNED, UNIFORM

CHOICES = (DEFAULTS, UNIFORM, ALONE, TUNED)


@dataclass(frozen=True)
class Row:
    """A process in which the step was tuned or measured.

    Attributes:
      setting: the launch setting.
      environment: variables that the search over processes added.
      result: what the worker found (`tuned.as_json`).
      plan: the plan file that the worker wrote.
      implementation: the step's `collective_matmul`; "": collectives by NCCL, or as the flags say.
      searched: whether the process has searched. It may be slower then (docs/results/tuning.md), so its times compare
        with one another, but not with those of other processes.
    """

    setting: str
    environment: Mapping[str, str]
    result: Mapping[str, Any]
    plan: Path | None = None
    implementation: str = ""
    searched: bool = False

    @property
    def seconds(self) -> Mapping[str, float]:
        return self.result["seconds"]

    @property
    def place(self) -> tuple[str, str, Mapping[str, str]]:
        return self.setting, self.implementation, self.environment

    @property
    def name(self) -> str:
        matmuls = [f"collective matmul {self.implementation}"] if self.implementation else []
        return " ".join([self.setting, *matmuls, *(f"{name}={value}" for name, value in self.environment.items())])


def gains(rows: Sequence[Row]) -> tuple[float, float]:
    """The gain of settings of the whole process, and that of each collective's own settings beyond it.

    Both are ratios of a step's time. The base is NCCL's defaults under the first launch setting. One setting for all
    collectives counts as one of the process; its gain is that in the process that has searched.
    """
    base, best = rows[0].seconds[DEFAULTS], fastest(rows)
    searched = next((row.seconds for row in rows if row.searched and row.place == best.place), {})
    process = best.seconds[DEFAULTS]
    if UNIFORM in searched and TUNED in best.seconds:
        process *= min(searched[UNIFORM] / searched[DEFAULTS], 1.0)
    least = min(best.seconds.values())
    process = max(process, least)
    return base / process, process / least


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints the headline, the table of times, and the settings of the fastest row."""
    best = fastest(rows)
    base = rows[0].seconds[DEFAULTS]
    process, own = gains(rows)
    least = min(best.seconds.values())
    say(
        console,
        f"A step takes {milliseconds(least)} instead of {milliseconds(base)}: {base / least:.3f} x, of which "
        f"{process:.3f} x by settings of the whole process and {own:.3f} x by settings of each collective.",
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("process")
    for name in CHOICES:
        table.add_column(name, justify="right")
    table.add_column("measurements", justify="right")
    table.add_column("time", justify="right")
    for row in rows:
        cells = [_cell(row.seconds.get(name), base) for name in CHOICES]
        name = f"{row.name}, while searching" if row.searched else row.name
        table.add_row(name, *cells, str(row.result["measured"]), f"{row.result['spent']:.0f} s")
    console.print(table)
    for line in best.result["iterations"]:
        say(console, line[0].upper() + line[1:] + ".")
    _settings(best, console)
    for note in dict.fromkeys(note for row in rows for note in row.result["notes"]):
        say(console, note + ".")


def fastest(rows: Sequence[Row]) -> Row:
    """The row with the least time of a step. Of rows that are as fast but for chance, the one with the
    fewest variables, and without collective matmuls.

    If the step was measured twice in one place, the later row counts: it has settings of collectives, too.
    """
    rows = [row for row in rows if not row.searched]
    rows = [row for n, row in enumerate(rows) if row.place not in [later.place for later in rows[n + 1 :]]]
    least = min(min(row.seconds.values()) for row in rows)
    near = [row for row in rows if min(row.seconds.values()) * (1.0 - FASTER) <= least]
    return min(near, key=lambda row: (len(row.environment), bool(row.implementation), min(row.seconds.values())))


def drawn(rows: Sequence[Row]) -> Row:
    """The row whose times are drawn: the fastest one; if nothing was tried there, the fastest one where something was.

    The first search measures many processes with NCCL's defaults alone, so only some rows have times to draw.
    """
    tried = [row for row in rows if any(body["map"] for body in row.result["bodies"])]
    return tried[-1] if tried else fastest(rows)


def _cell(seconds: float | None, base: float) -> str:
    return "" if seconds is None else f"{milliseconds(seconds)} ({base / seconds:.3f})"


def _settings(row: Row, console: Console) -> None:
    found = row.result["tuning"]["collectives"]
    if not found:
        say(console, "Each collective runs as NCCL has it: no settings of its own are faster.")
        return
    names = {body["body"]: body["name"] for body in row.result["bodies"]}
    table = Table(show_edge=False, pad_edge=False, title="Collectives with settings of their own", title_justify="left")
    for column in ("computation", "collective", "number", "algorithm", "protocol", "channels", "chunk"):
        table.add_column(column, justify="right" if column in ("number", "channels", "chunk") else "left")
    for one in found:
        channels, chunk = (f"{value:,}" if value else "" for value in (one["channels"], one["chunk"]))
        place = names.get(one["body"], one["body"])
        kind = one["algorithm"], one["protocol"]
        table.add_row(place, one["key"], str(one["occurrence"]), *kind, channels, chunk)
    console.print(table)
