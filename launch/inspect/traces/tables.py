"""Prints measurements of traces: a headline, then tables of the step, the GPUs, the collectives and the pauses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from dhelix.launch.inspect.answers import tables as answers
from dhelix.launch.inspect.flags import SHOWN, TABLES
from dhelix.launch.inspect.inspection import Inspection
from dhelix.launch.inspect.tables import both_sides, outcome, under_text
from dhelix.launch.inspect.traces.collectives import MeasuredCollective, median_speed
from dhelix.launch.inspect.traces.measurement import MeasuredGpu, Measurement
from dhelix.launch.shown.units import Unit, size_unit, time_unit
from dhelix.passes.framework.gain import Gain

_ROWS = (
    ("step", "step_ms"),
    ("compute", "compute_ms"),
    ("  lost because collectives run beside it", "slow_down_ms"),
    ("communication", "communication_ms"),
    ("  hidden under compute", "hidden_ms"),
    ("  exposed", "exposed_ms"),
    ("  waits for other GPUs", "waited_ms"),
    ("nothing runs", "idle_ms"),
)
_REST = (("exposed communication", "exposed_ms"), ("nothing runs", "idle_ms"))
"""The parts of a step in which nothing computes. Operations as measured include what overlap costs."""


def print_tables(
    found: Sequence[Measurement],
    top: int = 12,
    console: Console | None = None,
    show: Sequence[str] = SHOWN,
) -> None:
    """Prints one measurement, or two side by side, the second one after a change.

    Args:
      top: largest number of rows in a table.
      show: which tables, of `flags.TABLES`.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 144, highlight=False, markup=False)
    for measured in found:
        console.print(f"{measured.source}: {measured.program}, {_recorded(measured)}", style="bold")
        for note in measured.notes:
            console.print(f"  {note}", style="yellow")
        console.print(headline(measured), soft_wrap=True)
        if which := measured.says_which():
            console.print(which, soft_wrap=True)
    if len(found) == 2:
        console.print(comparison(found), style="bold")
    for table in tables(found, top, show):
        console.print(table)


def comparison(found: Sequence[Measurement]) -> str:
    """How the second trace's steps compare with the first one's, and which part of the step changed most."""
    before, after = (measured.mean("step_ms") for measured in found)
    unit = time_unit([before, after])
    if not all(measured.steps for measured in found):
        lasts = f"The second trace lasts {after / before:.2f} x as long as the first"
        return f"{lasts}. The numbers of steps are unknown, so steps do not compare."
    changes = {
        words: found[1].mean(field) - found[0].mean(field) for words, field in (("compute", "compute_ms"), *_REST)
    }
    words, change = max(changes.items(), key=lambda item: abs(item[1]))
    why = f"{words} changed most, by {'+' if change > 0 else ''}{unit.text(change)}"
    unfair = f" Not a fair comparison: {reason}." if (reason := _unequal(*found)) else ""
    return f"A step takes {unit.text(after)}, {after / before:.2f} x the time of the first trace; {why}.{unfair}"


def _unequal(one: Measurement, other: Measurement) -> str:
    """Why the steps of two traces are not equal work on equal machines; "" if nothing shows this."""
    if len(one.gpus) != len(other.gpus):
        return f"{len(one.gpus)} and {len(other.gpus)} GPUs were recorded"
    if one.predicted is None or other.predicted is None:
        return ""
    if one.predicted.hardware != other.predicted.hardware:
        return f"the first ran on {one.predicted.hardware}s, the second on {other.predicted.hardware}s"
    return Gain(one.predicted.parts, other.predicted.parts).unequal()


def tables(found: Sequence[Measurement], top: int, show: Sequence[str] = TABLES) -> Iterator[Table | str]:
    """The tables, and a sentence where there are no collectives; arguments as for `print_tables`."""
    if "step" in show:
        yield _steps(found)
    if len(found) == 2 and "collectives" in show:
        yield _collectives_of_both(found, top)
    for number, measured in enumerate(found, 1):
        name = f" of trace {number}" if len(found) > 1 else ""
        step_ms = measured.mean("step_ms")
        unit = time_unit([step_ms])
        if "time" in show and measured.operations:
            rest = {words: measured.mean(field) for words, field in _REST}
            yield answers.time_by_category(measured.operations, rest, step_ms, measured.utilization, name)
        if "operations" in show and measured.operations:
            yield answers.operations(measured.operations, step_ms, top, name)
        if "gpus" in show and len(measured.gpus) > 1:
            yield _gpus(measured, name, unit, top)
        if "collectives" in show:
            yield _collectives(measured, name, unit, top) if measured.collectives else f"No collectives{name}."
        if "path" in show and measured.shown.path:
            path, program = measured.shown.path, measured.program_facts
            words = {one.instruction: program.describe(one.instruction) for one in path if one.instruction}
            of = f" of a step of {unit.text(sum(one.ms for one in path))} on GPU {measured.shown.gpu}{name}"
            yield answers.on_critical_path(path, words, top, of)
        if "memory" in show and measured.predicted is not None:
            yield answers.memory_at_peak(measured.predicted.answers.memory, top, f" (from the program){name}")
        if "streams" in show:
            yield _streams(measured, name, unit)
        if "pauses" in show:
            yield _pauses(measured, name, unit)


def headline(measured: Measurement) -> str:
    """One sentence: how long a step takes, and how much of its communication is hidden."""
    begin = "A step takes" if measured.steps else "The trace lasts"
    step_ms, communication_ms, hidden_ms = map(measured.mean, ("step_ms", "communication_ms", "hidden_ms"))
    words, unit = outcome(begin, "measured", step_ms, communication_ms, hidden_ms), time_unit([step_ms])
    last = max(measured.gpus, key=lambda gpu: gpu.delays_ms)
    if last.delays_ms > 0.01 * step_ms:
        waits = unit.text(last.delays_ms)
        words += f" GPU {last.gpu} of {last.host} arrives last: others together wait {waits} for it alone."
    return words


def _recorded(measured: Measurement) -> str:
    steps = f"{measured.steps:,} steps" if measured.steps != 1 else "1 step"
    hosts = f" of {len(measured.hosts)} hosts" if len(measured.hosts) > 1 else ""
    gpus = "1 GPU" if len(measured.gpus) == 1 else f"{len(measured.gpus)} GPUs"
    return f"{steps if measured.steps else 'an unknown number of steps'} on {gpus}{hosts}"


def _steps(found: Sequence[Measurement]) -> Table:
    one = "One step" if all(measured.steps for measured in found) else "The whole trace"
    several = any(len(measured.gpus) > 1 for measured in found)
    table = Table(title=f"{one}, mean of the GPUs" if several else one, title_justify="left", title_style="bold")
    table.add_column("")
    if len(found) == 2:
        for heading in ("before", "after", "after / before"):
            table.add_column(heading, justify="right")
    else:
        bounds = ("least", "most") if len(found[0].gpus) > 1 else ()
        predicted = ("predicted",) if found[0].predicted is not None else ()
        for heading in ("measured", *bounds, *predicted):
            table.add_column(heading, justify="right")
    unit = time_unit([measured.mean("step_ms") for measured in found])
    for words, field in _ROWS:
        means = [measured.mean(field) for measured in found]
        shown = [unit.text(mean) for mean in means]
        if field == "slow_down_ms" and not any(gpu.slow_down_known for one in found for gpu in one.gpus):
            table.add_row(words, *(["?"] * (len(table.columns) - 1)))
            continue
        if len(found) == 2:
            shown.append(f"{means[1] / means[0]:.2f} x" if unit.text(means[0]) != unit.text(0.0) else "")
        else:
            every = [getattr(gpu, field) for gpu in found[0].gpus]
            shown += [unit.text(min(every)), unit.text(max(every))] if len(every) > 1 else []
            shown += [_predicted(found[0].predicted, field, unit)] if found[0].predicted is not None else []
        table.add_row(words, *shown, style="bold" if field in ("step_ms", "exposed_ms") else "")
    known = min(gpu.slow_down_known for measured in found for gpu in measured.gpus)
    if known < 0.995:
        table.caption = f"What overlap costs is known for {known:.0%} of the overlapping compute."
    return table


def _predicted(predicted: Inspection, field: str, unit: Unit) -> str:
    """What `Inspection` predicts for a field of `MeasuredGpu`. It predicts all but the waiting for other GPUs."""
    ms = getattr(predicted, field, None)
    return "-" if ms is None else unit.text(ms)


def _gpus(measured: Measurement, name: str, unit: Unit, top: int) -> Table:
    title = f"GPUs{name}" + (", those that others wait for first" if measured.collectives else "")
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("GPU", "host"):
        table.add_column(column, overflow="fold")
    for column in ("step", "compute", "hidden", "exposed", "nothing runs", "waits", "others wait for it"):
        table.add_column(column, justify="right", no_wrap=True)
    ordered = sorted(measured.gpus, key=lambda gpu: (-gpu.delays_ms, gpu.gpu))
    for gpu in ordered[:top]:
        table.add_row(f"{gpu.gpu}", gpu.host, *(unit.text(ms) for ms in _times(gpu)))
    if ordered[top:]:
        table.caption = f"and {len(ordered) - top} more (--top)"
    return table


def _times(gpu: MeasuredGpu) -> tuple[float, ...]:
    return gpu.step_ms, gpu.compute_ms, gpu.hidden_ms, gpu.exposed_ms, gpu.idle_ms, gpu.waited_ms, gpu.delays_ms


def _collectives(measured: Measurement, name: str, unit: Unit, top: int) -> Table:
    table = Table(title=f"Collectives{name}, most exposed first", title_justify="left", title_style="bold")
    table.add_column("collective", overflow="fold")
    for column in ("devices", "runs", "size", "hidden", "exposed", "waits", "slowed", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    if measured.predicted is not None:
        table.add_column("predicted: exposed", justify="right")
    table.add_column(f"hidden under ({unit.name} per run)", overflow="fold")
    for one in measured.collectives[:top]:
        row = [
            one.instruction if one.kind in one.instruction else f"{one.instruction} ({one.kind})",
            f"{one.devices:,}" + (f" over {', '.join(one.axes)}" if one.axes else "") if one.devices else "?",
            f"{one.executions:,.0f}" if one.executions == round(one.executions) else f"{one.executions:,.1f}",
            size_unit([one.bytes]).text(one.bytes) if one.bytes else "?",
            unit.text(one.hidden_ms),
            unit.text(one.exposed_ms),
            unit.text(one.waited_ms),
            "?" if one.slow_down_ms is None else unit.text(one.slow_down_ms),
            _speed(one),
        ]
        if measured.predicted is not None:
            row.append("-" if one.predicted_exposed_ms is None else unit.text(one.predicted_exposed_ms))
        table.add_row(*row, under_text(one.under, unit))
    left = measured.collectives[top:]
    if left:
        table.caption = f"and {len(left)} more, {unit.text(sum(one.exposed_ms for one in left))} exposed (--top)"
    return table


def _speed(one: MeasuredCollective) -> str:
    """The median bandwidth, and that of the slowest group if it is more than a tenth lower."""
    middle = median_speed(one)
    if middle is None:
        return "?"
    slowest = next(group for group in one.groups if group.gb_per_s is not None)
    if (slowest.gb_per_s or 0.0) > 0.9 * middle:
        return f"{middle:,.1f}"
    return f"{middle:,.1f}; GPUs {_listed(slowest.gpus)}: {slowest.gb_per_s:,.1f}"


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus[:4])) + (", ..." if len(gpus) > 4 else "")


def _streams(measured: Measurement, name: str, unit: Unit) -> Table:
    gpu = measured.shown
    table = Table(title=f"Streams of GPU {gpu.gpu}{name}", title_justify="left", title_style="bold")
    table.add_column("stream", overflow="fold")
    for column in ("compute", "lost beside collectives", "communication", "hidden", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    for stream in gpu.streams:
        times = stream.compute_ms, stream.slow_down_ms, stream.communication_ms, stream.hidden_ms, stream.exposed_ms
        table.add_row(stream.name, *map(unit.text, times))
    return table


def _pauses(measured: Measurement, name: str, unit: Unit) -> Table:
    """When nothing runs on a GPU, by cause."""
    gpu = measured.shown_for_pauses
    title = f"Nothing runs on GPU {gpu.gpu}{name}, most time first"
    fine = replace(unit, digits=3) if unit.size == 1.0 else unit  # pauses of a long step also take microseconds
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("cause")
    for column in ("time in one step" if measured.steps else "time", "pauses in the trace", "longest"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("after the longest came", overflow="fold")
    for cause, found in gpu.pauses.items():
        longest = fine.text(found.longest_ms), found.longest_before
        table.add_row(cause, fine.text(found.ms), f"{found.count:,}", *longest)
    return table


def _collectives_of_both(found: Sequence[Measurement], top: int) -> Table:
    """Collectives with equal kind, size and number of devices share a row. Without the program, names decide."""
    sides = [
        [
            ((one.kind or one.instruction, one.devices, one.bytes), (one.executions, one.total_ms, one.exposed_ms))
            for one in measured.collectives
        ]
        for measured in found
    ]
    return both_sides("traces", "time", sides, time_unit([measured.mean("step_ms") for measured in found]), top)
