"""Output of `dhelix profile`: tables or JSON, pictures, files for XLA, and comparisons with another profile.

    show(job, chosen, here, console)              # the step's tables, or everything as JSON
    compare_files(path, "other.json", console)    # nothing but the comparison of two profiles

Tables show the most important rows. JSON holds all rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dhelix.errors import DhelixError
from dhelix.launch.profile import tables as profile_tables
from dhelix.launch.profile.job import Job
from dhelix.launch.shown import heat_map, units
from dhelix.launch.shown.progress import say
from dhelix.profiles.files import storage
from dhelix.profiles.files.comparison import WORST, Agreement, compare
from dhelix.profiles.profile import Profile, Provenance
from dhelix.runtime.profiling.session import pair_key

HEAT_MAP_ROWS = 40  # number of operators in a heat map: the ones that take the most time in the step


def warn(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(f"warning: {line}", style="yellow", soft_wrap=True, markup=False)


def show(job: Job, chosen: dict[str, Any], here: Provenance, console: Console) -> None:
    """Prints tables or JSON, and writes the files that the flags ask for.

    Args:
      chosen: values of the flags.
      here: the GPU and the versions of this process. Differences from the profile's provenance give warnings.
    """
    warnings = storage.differences(job.known(), here)
    views = {setting: job.view(setting, dict(job.missing(setting).refused)) for setting in job.steps}
    agreements: tuple[Agreement, ...] | None = None
    if chosen["compare"]:
        agreements, strange = _compared(job.in_file(), storage.load(chosen["compare"]))
        warnings += strange
    warn(warnings, console)
    if chosen["json"]:
        print(json.dumps(_to_json(job, views, warnings, agreements), indent=1))
    else:
        _print(job, views, chosen, console)
        if agreements is not None:
            print_agreements(agreements, str(job.path), chosen["compare"], console)
    written = _write(job, chosen, views)
    if written:
        say(console, f"Wrote {', '.join(written)}.")


def compare_files(path: Path, other: str, console: Console, as_json: bool = False) -> None:
    """Prints how well the profile in `path` agrees with the profile in `other`.

    Raises:
      DhelixError: one of the files cannot be read.
    """
    theirs = storage.load(other)
    agreements, warnings = _compared(storage.load(path), theirs)
    warn(warnings, console)
    if as_json:
        found = [agreement.to_json() for agreement in agreements]
        print(json.dumps({"file": str(path), "compared_with": other, "agreement": found}, indent=1))
    else:
        print_agreements(agreements, str(path), other, console)


def print_agreements(agreements: Sequence[Agreement], ours: str, theirs: str, console: Console) -> None:
    """Prints a table with a row for each setting and kind of entry, and a table of the largest differences."""
    say(console, f"\nAgreement of {ours} with {theirs}: |time / other time - 1| of entries of 20 µs or more.")
    if not any(agreement.common for agreement in agreements):
        say(console, "They have no entry in common.")
        return
    table = Table()
    for column in ("setting", "entries", "in common", "compared", "median", "90 %", "median with sign"):
        table.add_column(column, justify="left" if column in ("setting", "entries") else "right")
    for a in agreements:
        if a.median is None or a.p90 is None or a.bias is None:
            table.add_row(a.setting, a.what, f"{a.common:,}", "0", "-", "-", "-")
        else:
            numbers = f"{a.compared:,}", f"{a.median:.1%}", f"{a.p90:.1%}", f"{a.bias:+.1%}"
            table.add_row(a.setting, a.what, f"{a.common:,}", *numbers)
    console.print(table)
    worst = [(abs(d.relative), a.setting, d) for a in agreements for d in a.worst]
    table = Table(title="Largest differences", title_justify="left", title_style="bold")
    for column in ("setting", "what", "this", "other", "difference"):
        table.add_column(column, overflow="fold", justify="left" if column in ("setting", "what") else "right")
    for _, setting, d in sorted(worst, key=lambda found: (-found[0], found[1], found[2].key))[:WORST]:
        times = units.time_text(d.seconds), units.time_text(d.other)
        table.add_row(setting, Text(d.key), *times, f"{d.relative:+.1%}")
    if worst:
        console.print(table)


def _compared(profile: Profile, other: Profile) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """How well two profiles agree, and a warning if they are for different hardware."""
    ours, theirs = (f"{p.hardware} with link {p.link}" for p in (profile, other))
    strange = f"the compared profiles are for different hardware: {ours}, and {theirs}"
    return compare(profile, other), () if ours == theirs else (strange,)


def _print(job: Job, views: dict[str, profile_tables.StepView], chosen: dict[str, Any], console: Console) -> None:
    """Prints the tables of all settings.

    Operators are listed once, because the time of an operator that runs alone hardly depends on the setting.
    """
    for number, (setting, step) in enumerate(job.steps.items()):
        known = f"profile {job.path}" if job.path.exists() else "shipped profiles; none of your own yet"
        where = f"{profile_tables.setup(job.gpu, job.link, job.gpus)}; {known}"
        say(console, "" if number else f"\n{step.name}; {where}")
        profile_tables.print_view(views[setting], console, chosen["top"], operators=number == 0)
    if chosen["collectives"]:
        for setting in job.settings:
            profile_tables.print_collectives(job.known().section(setting), console)


def _to_json(
    job: Job,
    views: dict[str, profile_tables.StepView],
    warnings: Sequence[str],
    agreements: Sequence[Agreement] | None,
) -> dict[str, Any]:
    profile = job.known()
    settings: dict[str, Any] = {}
    for setting in job.settings:
        section = profile.section(setting)
        tables = {"collective_table": {str(k): t.seconds for k, t in sorted(section.collectives.items())}}
        if setting in views:
            wanted = job.missing(setting)
            alone, pairs = [str(item.first.key) for item in wanted.alone], [str(pair_key(p)) for p in wanted.pairs]
            tables = {"missing": {"alone": alone, "pairs": pairs}, **views[setting].to_json(), **tables}
        settings[setting] = tables
    measured_on = [dataclasses.asdict(p) for p in profile.measured_on]
    top = {"file": str(job.path), "hardware": job.gpu, "link": job.link, "gpus": job.gpus, "measured_on": measured_on}
    step = next((step.name for step in job.steps.values()), None)
    result = {**top, "step": step, "warnings": list(warnings), "settings": settings}
    return result if agreements is None else {**result, "agreement": [a.to_json() for a in agreements]}


def _write(job: Job, chosen: dict[str, Any], views: dict[str, profile_tables.StepView]) -> list[str]:
    """Writes the pictures and the files for XLA that the flags ask for, and returns the paths of these files."""
    first, written = job.settings[0], []
    if chosen["heat_map"]:
        for setting, view in views.items():
            path = Path(chosen["heat_map"])
            path = path.with_stem(f"{path.stem}-{setting}") if len(job.settings) > 1 else path
            keys = {row.key for row in (*view.operators[:HEAT_MAP_ROWS], *view.collectives)}
            heat_map.save_png(heat_map.heat_map(job.known(), setting, keys.__contains__), path)
            written.append(str(path))
    if chosen["pgle"] and first in job.steps:
        written.append(_write_text(chosen["pgle"], job.cost_text(first)))
    if chosen["perf_table"]:
        written.append(_write_text(chosen["perf_table"], job.performance_table(first)))
    return written


def _write_text(path: str, text: str) -> str:
    try:
        Path(path).write_text(text)
        return path
    except OSError as error:
        raise DhelixError(f"cannot write {path} ({error.strerror}); give a file in a folder that exists") from None
