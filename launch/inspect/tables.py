"""The tables of `dhelix inspect` for one dump, or for two side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from dhelix.launch.inspect.answers import tables as answers
from dhelix.launch.inspect.flags import SHOWN, TABLES
from dhelix.launch.inspect.inspection import CollectiveReport, Inspection, Under, unknown_text
from dhelix.launch.inspect.times import ROOFLINE
from dhelix.launch.shown.units import Unit, size_unit, time_unit
from dhelix.passes.framework.gain import Gain

Side = tuple[tuple[str, int, int], tuple[float, float, float]]
"""A collective's kind, devices and bytes, and its executions, time and exposed time."""


def print_tables(
    found: Sequence[Inspection],
    top: int = 12,
    console: Console | None = None,
    show: Sequence[str] = SHOWN,
) -> None:
    """Prints a table of totals, with one column for each inspection, and then the other tables of each.

    Args:
      top: largest number of rows in a table.
      show: which tables, of `flags.TABLES`.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 144, highlight=False, markup=False)
    for inspection in found:
        console.print(_name(inspection), style="bold")
        for note in notes_on(inspection):
            console.print(f"  {note}", style="yellow")
    for line, style in headlines(found):
        console.print(line, style=style)
    for shown in all_tables(found, top, show):
        console.print(shown, style="yellow" if isinstance(shown, str) and shown.startswith("  *") else None)


def _name(inspection: Inspection) -> str:
    return f"{inspection.source}: {inspection.module}, {inspection.instructions:,} instructions"


def notes_on(inspection: Inspection) -> list[str]:
    unknown = inspection.unknown_kernels
    return [*inspection.notes, *([f"{unknown_text(inspection)}: {_unknown(inspection)}"] if unknown else [])]


def headlines(found: Sequence[Inspection]) -> Iterator[tuple[str, str]]:
    """Where the times come from and what was gained, each with the style of its line."""
    if len(found) == 1:
        (one,) = found
        yield outcome("A step takes", "predicted", one.step_ms, one.communication_ms, one.hidden_ms), "bold"
    yield estimate(found), ""
    if len(found) == 2:
        gain = Gain(*(inspection.parts for inspection in found))
        yield f"{gain.time()}, compared with the first dump", "bold"
        yield f"  {gain.why()}", ""
        if warning := gain.unequal():
            yield f"  Not a fair comparison: {warning}", "yellow"


def outcome(begin: str, how: str, step_ms: float, communication_ms: float, hidden_ms: float) -> str:
    """How long a step takes, and how much of its communication is hidden; `how` says how this is known."""
    unit = time_unit([step_ms])
    words = f"{begin} {unit.text(step_ms)}, {how}."
    if communication_ms:
        words += f" Of {unit.text(communication_ms)} communication, {hidden_ms / communication_ms:.0%} is hidden and "
        words += f"{unit.text(communication_ms - hidden_ms)} exposed."
    return words


def all_tables(found: Sequence[Inspection], top: int, show: Sequence[str] = TABLES) -> Iterator[Table | str]:
    """The tables, and sentences in place of empty ones and on single rows; arguments as for `print_tables`."""
    if "step" in show:
        yield _totals(found)
    if len(found) == 2 and "collectives" in show:
        yield _collectives_of_both(found, top)
    for inspection in found:
        name = f" of {inspection.title}" if len(found) > 1 else ""
        told = inspection.answers
        if "time" in show:
            rest = _rest(inspection)
            yield answers.time_by_category(told.operations, rest, inspection.step_ms, told.utilization, name)
        if "operations" in show:
            yield answers.operations(told.operations, inspection.step_ms, top, name)
        if "path" in show:
            yield answers.on_critical_path(told.critical_path, told.words, top, name)
        if "collectives" in show:
            yield _collectives(inspection, name, top) if inspection.collectives else f"No collectives{name}."
            for report in inspection.collectives[:top]:
                yield from (f"  * {report.instruction}: {note}" for note in report.notes)
        if "memory" in show:
            yield answers.memory_at_peak(told.memory, top, name)
        if "copies" in show:
            yield _copies(inspection, name, top) if inspection.copies else f"No large copies in loops{name}."


def _rest(inspection: Inspection) -> dict[str, float]:
    """The parts of the step's time beside the operators' own, in milliseconds."""
    return {
        "slow-down by the power limit": 1e3 * inspection.parts.clock,
        "slow-down by overlapping collectives": inspection.slow_down_ms,
        "exposed communication": inspection.exposed_ms,
        "pauses between kernels": inspection.idle_ms,
    }


def estimate(found: Sequence[Inspection]) -> str:
    names = dict.fromkeys(
        f"{i.cost_model} cost model for {i.hardware}" if i.cost_model == ROOFLINE else i.cost_model for i in found
    )
    assumed = dict.fromkeys(f" Assumed: {i.parts.assumed}." for i in found if i.parts.assumed)
    return f"Times are estimates from the {', and from the '.join(names)}.{''.join(assumed)}"


def _time_unit(found: Sequence[Inspection]) -> Unit:
    """The unit for all times of a table. One unit makes the times easy to compare."""
    return time_unit([i.step_ms for i in found])


def _totals(found: Sequence[Inspection]) -> Table:
    table = Table(title="One step", title_justify="left", title_style="bold")
    table.add_column("")
    for inspection in found:
        table.add_column(inspection.title, justify="right")
    two = len(found) == 2
    if two:
        table.add_column("after / before", justify="right")
    times: list[tuple[str, list[float | None]]] = [
        ("step", [i.step_ms for i in found]),
        ("compute", [i.compute_ms for i in found]),
        ("  slow-down by overlapping collectives", [i.slow_down_ms for i in found]),
        ("pauses between kernels", [i.idle_ms for i in found]),
        ("communication, alone", [i.communication_alone_ms for i in found]),
        ("communication, as it runs", [i.communication_ms for i in found]),
        ("  hidden under compute", [i.hidden_ms for i in found]),
        ("  exposed", [i.exposed_ms for i in found]),
        ("  with the host's memory", [i.host_ms or None for i in found]),
        ("large copies in loops", [sum(c.total_ms for c in i.copies) for i in found]),
    ]
    of_step = _time_unit(found)
    rows = [(*row, of_step) for row in times] + [(*row, size_unit(row[1])) for row in _memory(found)]
    for name, numbers, unit in rows:
        shown = ["-" if n is None else unit.text(n) for n in numbers]
        if two:
            before, after = numbers
            if before is None or after is None or shown[0] == unit.text(0.0):
                shown.append("")
            else:
                shown.append(f"{after / before:.2f} x")
        table.add_row(name, *shown, style="bold" if name in ("step", "  exposed", "memory: peak") else "")
    if not all(i.memory for i in found):
        table.caption = "Memory is estimated from the schedule, because XLA's buffer assignment is missing."
    return table


def _memory(found: Sequence[Inspection]) -> list[tuple[str, list[float | None]]]:
    """Rows of bytes: as XLA says, and estimates of the steps of which XLA says nothing."""
    told: list[tuple[str, list[float | None]]] = [
        ("memory: arguments", [i.memory and i.memory.arguments for i in found]),
        ("memory: outputs", [i.memory and i.memory.outputs for i in found]),
        ("memory: outputs in donated arguments", [i.memory and i.memory.aliased for i in found]),
        ("memory: temporaries", [i.memory and i.memory.temporaries for i in found]),
        ("memory: in the host's memory", [i.memory and i.memory.host for i in found]),
        ("memory: peak", [i.memory and i.memory.peak for i in found]),
    ]
    living = [None if i.memory else i.answers.memory for i in found]
    estimated: list[tuple[str, list[float | None]]] = [
        ("memory: arguments, estimated", [one and one.arguments for one in living]),
        ("memory: peak, estimated", [one and one.peak.bytes for one in living]),
    ]
    return [row for row in told + estimated if any(number is not None for number in row[1])]


def _collectives_of_both(found: Sequence[Inspection], top: int) -> Table:
    """A table of the collectives of both steps. Collectives with equal kind, size and number of devices share a row."""
    sides = [
        [((one.kind, one.devices, one.bytes), (one.executions, one.alone_ms, one.exposed_ms)) for one in i.collectives]
        for i in found
    ]
    return both_sides("dumps", "alone", sides, _time_unit(found), top)


def both_sides(what: str, time: str, sides: Sequence[Iterable[Side]], unit: Unit, top: int) -> Table:
    """A table of the collectives before and after a change, largest gain first.

    Args:
      what: what is compared, for the title.
      time: heading of the column with times.
      sides: the collectives before and after. Those with the same key share a row.
    """
    table = Table(title=f"Collectives of both {what}, largest gain first", title_justify="left", title_style="bold")
    for column in ("collective", "devices", "size"):
        table.add_column(column, justify="left" if column == "collective" else "right", no_wrap=True)
    for column in ("runs", time, "exposed"):
        table.add_column(f"{column}, before -> after", justify="right", no_wrap=True)
    rows: dict[tuple[str, int, int], list[list[float]]] = {}
    for side, collectives in enumerate(sides):
        for key, values in collectives:
            row = rows.setdefault(key, [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
            for number, value in enumerate(values):
                row[side][number] += value
    ordered = sorted(rows.items(), key=lambda item: (item[1][1][2] - item[1][0][2], item[0]))
    for (kind, devices, size), (before, after) in ordered[:top]:
        runs = f"{before[0]:,.0f} -> {after[0]:,.0f}"
        times = [f"{unit.text(before[k])} -> {unit.text(after[k])}" for k in (1, 2)]
        shown = (f"{devices:,}", size_unit([size]).text(size)) if devices else ("?", "?")
        table.add_row(kind, *shown, runs, *times)
    if ordered[top:]:
        table.caption = f"and {len(ordered) - top} more (--top)"
    return table


def _collectives(inspection: Inspection, name: str, top: int) -> Table:
    table = Table(title=f"Collectives{name}, most exposed first", title_justify="left", title_style="bold")
    for column in ("collective", "part", "in loops"):
        table.add_column(column, overflow="fold")
    for column in ("devices", "runs", "size", "alone", "hidden", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    unit = _time_unit([inspection])
    table.add_column(f"hidden under ({unit.name} per run)", overflow="fold")
    for report in inspection.collectives[:top]:
        table.add_row(
            report.instruction if report.kind in report.instruction else f"{report.instruction} ({report.kind})",
            report.part,
            " > ".join(report.loops) or "-",
            _devices(report),
            f"{report.executions:,}" + ("*" if report.notes else ""),
            size_unit([report.bytes]).text(report.bytes),
            unit.text(report.alone_ms),
            unit.text(report.hidden_ms),
            unit.text(report.exposed_ms),
            under_text(report.under, unit),
        )
    hidden = inspection.collectives[top:]
    if hidden:
        exposed = unit.text(sum(r.exposed_ms for r in hidden))
        table.caption = f"and {len(hidden)} more, {exposed} exposed (--top)"
    return table


def _unknown(inspection: Inspection) -> str:
    """Text about the three unknown custom calls that take the most time: target, family, executions and time."""
    unit = _time_unit([inspection])
    named = [f"{u.target} ({u.family}), {u.executions:,} x, {unit.text(u.total_ms)}" for u in inspection.unknown[:3]]
    return "; ".join(named) + (f" and {len(inspection.unknown) - 3} more" if len(inspection.unknown) > 3 else "")


def _devices(report: CollectiveReport) -> str:
    """The number and size of the groups of a collective, and the mesh axes that they run over."""
    groups = f"{report.groups:,} x " if report.groups > 1 else ""
    return f"{groups}{report.devices:,}" + (f" over {', '.join(report.axes)}" if report.axes else "")


def under_text(found: Iterable[Under], unit: Unit) -> str:
    """The three kinds of operators that run longest under a collective, and their times, as text."""
    kinds: dict[str, float] = {}
    for under in found:
        kinds[under.what] = kinds.get(under.what, 0.0) + under.ms
    longest = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:3]
    fine = replace(unit, digits=max(unit.digits, 2))  # a single run takes less than a step
    parts = [(what, fine.number(ms)) for what, ms in longest]
    return ", ".join(f"{what} {time}" for what, time in parts if time != fine.number(0.0)) or "nothing"


def _copies(inspection: Inspection, name: str, top: int) -> Table:
    title = f"Large buffers copied or filled in loops{name}, longest first"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("instruction", "kind", "shape", "in loops"):
        table.add_column(column, overflow="fold")
    for column in ("size", "runs", "total"):
        table.add_column(column, justify="right", no_wrap=True)
    unit = _time_unit([inspection])
    for copy in inspection.copies[:top]:
        size, total = size_unit([copy.bytes]).text(copy.bytes), unit.text(copy.total_ms)
        loops = " > ".join(copy.loops)
        table.add_row(copy.instruction, copy.kind, copy.shape, loops, size, f"{copy.executions:,}", total)
    left = inspection.copies[top:]
    if left:
        table.caption = f"and {len(left)} more, {unit.text(sum(c.total_ms for c in left))} (--top)"
    return table
