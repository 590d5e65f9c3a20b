"""`dhelix inspect`: shows what hides each collective of a compiled step, what is exposed, and what is copied.

    dhelix inspect DUMP --compare OTHER_DUMP --png timeline.png

A profiler trace in place of the dump is measured instead (`traces/command.py`).
`inspect_compiled(jax.jit(step).lower(...).compile())` does the same from Python.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.launch.defaults import NO_EFFECT
from dhelix.launch.inspect import targets
from dhelix.launch.inspect.flags import NONE
from dhelix.launch.inspect.inspection import CollectiveReport, Inspection, inspect_module, unknown_text
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.times import ROOFLINE, costs_for, named
from dhelix.launch.inspect.traces import command as traces
from dhelix.launch.shown import timeline_plot
from dhelix.launch.shown.page import write as page
from dhelix.launch.shown.units import Unit, size_unit, time_unit
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import Gain
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.profiling.traces import recording

_ALL = 10_000  # rows of a table in the page


def _names(paths: Sequence[str]) -> list[str]:
    """Titles for the dumps: the last parts of their paths, or the paths if these parts are equal.

    Two dumps often contain programs with the same name, which would make poor titles. A single dump gets the title "".
    """
    names = [Path(path).absolute().name for path in paths]
    return [""] if len(paths) == 1 else names if len(set(names)) > 1 else list(paths)


def run(values: flags.FlagValues, arguments: list[str]) -> int | None:
    """Runs `dhelix inspect`: inspects one dump or two, and prints and writes the results.

    Raises DhelixError if the command fails.
    """
    if len(arguments) != 1:
        raise DhelixError(
            "give one dump to inspect (a file or folder of --xla_dump_to), and a second one with --compare"
        )
    paths = [path for path in (arguments[0], values.compare) if path is not None]
    titles = values.titles
    if len(titles) > len(paths):
        raise DhelixError(f"--titles has {len(titles)} titles for {len(paths)} dump(s): give one for each dump")
    if values.headline and not (values.png or values.html):
        raise DhelixError("--headline is printed in the picture; add --png FILE or --html FILE")
    if any(map(recording.is_trace, paths)):
        return traces.run(values, paths)
    if values.program:
        raise DhelixError("--program chooses a program of a trace, and this is a dump")
    found = [
        inspect_dump(path, values.hardware, title, values.profile, values.setting, values.inter_bandwidth or 0.0)
        for path, title in zip(paths, [*titles, *_names(paths)[len(titles) :]], strict=True)
    ]
    if values.inter_bandwidth and not any(i.parts.assumed for i in found):
        print(f"dhelix inspect: {NO_EFFECT}", file=sys.stderr)
    if values.png:
        save_png(found, values.png, values.headline)
    if values.perfetto:
        timeline_plot.save_perfetto([i.picture for i in found], values.perfetto)
    if values.html:
        save_html(found, values.html, values.headline)
    for file in filter(None, (values.png, values.perfetto, values.html)):
        print(f"dhelix inspect: wrote {file}", file=sys.stderr)
    if values.json:
        print(to_json(found))
    else:
        print_tables(found, values.top)


def inspect_compiled(
    compiled: Any,
    hardware: str | None = None,
    title: str = "",
    source: str = "compiled step",
    profile: str = NONE,
    setting: str = "default",
) -> Inspection:
    """Inspects the result of `jax.jit(step).lower(...).compile()`. The compilation may have been deviceless.

    Args:
      hardware: the GPU whose times are used, one of `dhelix.profiles.hardware.ALL`; default: the GPU that the step is
        compiled for.
      title: title of the picture; default: the module's name.
      source: name of the step in tables.
      profile, setting: choose the costs; see `inspect_dump`.

    Raises:
      DhelixError: the executable has no scheduled HLO, `hardware` is unknown, or the file `profile` cannot be used.
    """
    module = compiled_module(compiled)
    if not module.is_scheduled:
        raise DhelixError(f"{module.name} is not scheduled, but estimates need a schedule; compile it first")
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    kind = next((device.device_kind for sharding in shardings for device in sharding.device_set), "")
    gpu, notes = (named(hardware), ()) if hardware else targets.of_kind(kind)
    costs, cost_model = costs_for(module, gpu, profile, setting)
    return inspect_module(module, costs, cost_model, dumps.memory_of(compiled), source, title, notes)


def inspect_dump(
    path: str | Path,
    hardware: str | None = None,
    title: str = "",
    profile: str = NONE,
    setting: str = "default",
    inter_bandwidth: float = 0.0,
) -> Inspection:
    """Inspects a file or a folder that `--xla_dump_to` wrote. `dumps.find_module` chooses the module in a folder.

    Args:
      hardware: the GPU whose times are used; default: the GPU that the dump describes (`targets.choose`).
      title: title of the picture.
      profile: "none" for the costs of a roofline, or a profile's file for its costs. "auto" takes a profile if there is
        one for the hardware and the setting, and a roofline otherwise.
      setting: launch setting of the profile.
      inter_bandwidth: GB/s of each GPU between nodes, for collectives that were not measured; 0: the usual value.

    Raises:
      DhelixError: the path has no scheduled and valid module, `targets.choose` refuses the module's target, `hardware`
        is unknown, or the file `profile` cannot be used or has no such setting.
    """
    found = dumps.read(path)
    gpu, notes = targets.choose(found.file, found.module, named(hardware) if hardware else None)
    on_cpu = targets.read(found.file, found.module).backend == "CPU"
    costs, cost_model = costs_for(found.module, gpu, NONE if on_cpu else profile, setting, 1e9 * inter_bandwidth)
    memory, told = dumps.read_memory(found.file), (*found.notes, *notes)
    with dumps.blaming(found.file):
        return inspect_module(found.module, costs, cost_model, memory, str(found.file), title, told, not on_cpu)


def save_png(found: Sequence[Inspection], path: str | Path, headline: str = "") -> None:
    """Draws the timelines of one or several inspections in one picture, on the same time axis."""
    first = found[0]
    pictures = [first.picture]
    for other in found[1:]:
        ratio = other.step_ms / first.step_ms if first.step_ms else 1.0
        summary = f"{other.picture.summary}  ·  {ratio:.2f} × the step above"
        pictures.append(dataclasses.replace(other.picture, summary=summary))
    timeline_plot.save_png(pictures, path, headline, f"{_estimate(found)} The step was not run.")


def to_json(found: Sequence[Inspection]) -> str:
    """The inspections as a JSON object. For one, its key is `inspection`; for two, `before`, `after` and `gain`."""
    keys = ("before", "after") if len(found) == 2 else ("inspection",)
    data: dict[str, Any] = {key: i.to_dict() for key, i in zip(keys, found, strict=True)}
    if len(found) == 2:
        gain = Gain(*(i.parts for i in found))
        causes = {name: 1e3 * seconds for name, seconds in gain.causes.items()}
        data["gain"] = {"ratio": gain.ratio, "causes_ms": causes, "warning": gain.unequal() or None}
    return json.dumps(data, indent=2)


def print_tables(found: Sequence[Inspection], top: int = 12, console: Console | None = None) -> None:
    """Prints a table of totals, with one column for each inspection, and then the collectives and copies of each."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 144, highlight=False, markup=False)
    for inspection in found:
        console.print(_name(inspection), style="bold")
        for note in _notes(inspection):
            console.print(f"  {note}", style="yellow")
    for line, style in _headlines(found):
        console.print(line, style=style)
    for shown in _tables(found, top):
        console.print(shown, style="yellow" if isinstance(shown, str) and shown.startswith("  *") else None)


def save_html(found: Sequence[Inspection], path: str | Path, headline: str = "") -> None:
    """Writes the timelines and all rows of all tables as one page, see `dhelix.launch.shown.page`."""
    names = " and ".join(fingerprint.unmark(inspection.module) for inspection in found)
    headlines = [line.strip() for line, _ in _headlines(found)]
    tables = [shown for shown in _tables(found, _ALL) if isinstance(shown, Table)]
    notes = [f"{inspection.source}: {note}" for inspection in found for note in _notes(inspection)]
    page.save(path, headline or names, headlines, notes, [i.picture for i in found], tables)


def _name(inspection: Inspection) -> str:
    return f"{inspection.source}: {inspection.module}, {inspection.instructions:,} instructions"


def _notes(inspection: Inspection) -> list[str]:
    unknown = inspection.unknown_kernels
    return [*inspection.notes, *([f"{unknown_text(inspection)}: {_unknown(inspection)}"] if unknown else [])]


def _headlines(found: Sequence[Inspection]) -> Iterator[tuple[str, str]]:
    """Where the times come from and what was gained, each with the style of its line."""
    yield _estimate(found), ""
    if len(found) == 2:
        gain = Gain(*(inspection.parts for inspection in found))
        yield f"{gain.time()}, compared with the first dump", "bold"
        yield f"  {gain.why()}", ""
        if warning := gain.unequal():
            yield f"  Not a fair comparison: {warning}", "yellow"


def _tables(found: Sequence[Inspection], top: int) -> Iterator[Table | str]:
    """The tables, and sentences in place of empty ones and on single rows."""
    yield _totals(found)
    if len(found) == 2:
        yield _collectives_of_both(found, top)
    for inspection in found:
        name = f" of {inspection.picture.title}" if len(found) > 1 else ""
        yield _collectives(inspection, name, top) if inspection.collectives else f"No collectives{name}."
        for report in inspection.collectives[:top]:
            yield from (f"  * {report.instruction}: {note}" for note in report.notes)
        yield _copies(inspection, name, top) if inspection.copies else f"No large copies in loops{name}."


def _estimate(found: Sequence[Inspection]) -> str:
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
        table.add_column(inspection.picture.title, justify="right")
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
    sizes: list[tuple[str, list[float | None]]] = [
        ("memory: arguments", [i.memory and i.memory.arguments for i in found]),
        ("memory: outputs", [i.memory and i.memory.outputs for i in found]),
        ("memory: outputs in donated arguments", [i.memory and i.memory.aliased for i in found]),
        ("memory: temporaries", [i.memory and i.memory.temporaries for i in found]),
        ("memory: in the host's memory", [i.memory and i.memory.host for i in found]),
        ("memory: peak", [i.memory and i.memory.peak for i in found]),
    ]
    of_step = _time_unit(found)
    if not any(i.memory for i in found):
        sizes = [("memory", [None for _ in found])]
    rows = [(*row, of_step) for row in times] + [(*row, size_unit(row[1])) for row in sizes]
    for name, numbers, unit in rows:
        shown = ["-" if n is None else unit.text(n) for n in numbers]
        if two:
            before, after = numbers
            if before is None or after is None or shown[0] == unit.text(0.0):
                shown.append("")
            else:
                shown.append(f"{after / before:.2f} x")
        table.add_row(name, *shown, style="bold" if name in ("step", "  exposed", "memory: peak") else "")
    return table


def _collectives_of_both(found: Sequence[Inspection], top: int) -> Table:
    """A table of the collectives of both steps. Collectives with equal kind, size and number of devices share a row."""
    table = Table(title="Collectives of both dumps, largest gain first", title_justify="left", title_style="bold")
    for column in ("collective", "devices", "size"):
        table.add_column(column, justify="left" if column == "collective" else "right", no_wrap=True)
    for column in ("runs", "alone", "exposed"):
        table.add_column(f"{column}, before -> after", justify="right", no_wrap=True)
    rows: dict[tuple[str, int, int], list[list[float]]] = {}
    for side, inspection in enumerate(found):
        for one in inspection.collectives:
            row = rows.setdefault((one.kind, one.devices, one.bytes), [[0, 0.0, 0.0], [0, 0.0, 0.0]])
            for number, value in enumerate((one.executions, one.alone_ms, one.exposed_ms)):
                row[side][number] += value
    unit = _time_unit(found)
    ordered = sorted(rows.items(), key=lambda item: (item[1][1][2] - item[1][0][2], item[0]))
    for (kind, devices, size), (before, after) in ordered[:top]:
        runs = f"{before[0]:,.0f} -> {after[0]:,.0f}"
        times = [f"{unit.text(before[k])} -> {unit.text(after[k])}" for k in (1, 2)]
        table.add_row(kind, f"{devices:,}", size_unit([size]).text(size), runs, *times)
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
            _under(report, unit),
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


def _under(report: CollectiveReport, unit: Unit) -> str:
    """The three kinds of operators that run longest under a collective, and their times, as text."""
    kinds: dict[str, float] = {}
    for under in report.under:
        kinds[under.what] = kinds.get(under.what, 0.0) + under.ms
    longest = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:3]
    parts = [(what, ms / unit.size) for what, ms in longest]
    return ", ".join(f"{what} {time:.2f}" for what, time in parts if time >= 0.005) or "nothing"


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
