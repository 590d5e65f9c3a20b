"""`dhelix inspect`: shows what hides each collective of a compiled step, what is exposed, and what is copied.

    dhelix inspect DUMP --compare OTHER_DUMP --png timeline.png

A profiler trace in place of the dump is measured instead (`traces/command.py`).
`inspect_compiled(jax.jit(step).lower(...).compile())` does the same from Python.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.launch.defaults import NO_EFFECT
from dhelix.launch.inspect import picture, tables, targets
from dhelix.launch.inspect.flags import NONE, ONLY_DUMPS, ONLY_TRACES, TABLES, chosen_tables
from dhelix.launch.inspect.inspection import Inspection, inspect_module
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.times import costs_for, named
from dhelix.launch.inspect.traces import command as traces
from dhelix.launch.shown import timeline_plot
from dhelix.launch.shown.page import write as page
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import Gain
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.profiling.traces import recording


def _names(paths: Sequence[str]) -> list[str]:
    """Titles for the dumps: the last parts of their paths, or the paths if these parts are equal.

    Two dumps often contain programs with the same name, which would make poor titles. A single dump gets the title "".
    """
    names = [Path(path).absolute().name for path in paths]
    return [""] if len(paths) == 1 else names if len(set(names)) > 1 else list(paths)


def run(values: flags.FlagValues, arguments: list[str]) -> None:
    """Runs `dhelix inspect`: inspects one dump or two, and prints and writes the results.

    `flags.check` has checked the paths.

    Raises DhelixError if the command fails.
    """
    paths = [path for path in (arguments[0], values.compare) if path is not None]
    if len(values.titles) > len(paths):
        raise DhelixError(f"--titles has {len(values.titles)} titles for {len(paths)} dump(s): give one for each dump")
    titles = [*values.titles, *_names(paths)[len(values.titles) :]]
    show = chosen_tables(values)
    if values.headline and not (values.png or values.html):
        raise DhelixError("--headline is printed in the picture; add --png FILE or --html FILE")
    are_traces = any(map(recording.is_trace, paths))
    kind, lacks = ("trace", ONLY_DUMPS) if are_traces else ("dump", ONLY_TRACES)
    if values["show"].present and show != list(TABLES) and (wanted := set(show).intersection(lacks)):
        has = ", ".join(table for table in TABLES if table not in lacks)
        raise DhelixError(f"a {kind} has no table {min(wanted)}: give one of {has}, or all, with --show")
    if are_traces:
        traces.run(values, paths, titles, show)
    else:
        _inspect_dumps(values, paths, titles, show)
    for file in filter(None, (values.png, values.perfetto, values.html)):
        print(f"dhelix inspect: wrote {file}", file=sys.stderr)


def _inspect_dumps(values: flags.FlagValues, paths: Sequence[str], titles: Sequence[str], show: Sequence[str]) -> None:
    if values.program:
        raise DhelixError("--program chooses a program of a trace, and this is a dump")
    if values.gpu is not None:
        raise DhelixError(
            "--gpu chooses a GPU of a trace, and this is a dump; for which GPU times count, use --hardware"
        )
    found = [
        inspect_dump(path, values.hardware, title, values.profile, values.setting, values.inter_bandwidth or 0.0)
        for path, title in zip(paths, titles, strict=True)
    ]
    if values.inter_bandwidth and not any(i.parts.assumed for i in found):
        print(f"dhelix inspect: {NO_EFFECT}", file=sys.stderr)
    if values.png:
        save_png(found, values.png, values.headline)
    if values.perfetto:
        timeline_plot.save_perfetto(list(map(picture.of, found)), values.perfetto)
    if values.html:
        save_html(found, values.html, values.headline)
    if values.json:
        print(to_json(found))
    else:
        tables.print_tables(found, values.top, show=show)


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
    pictures = [picture.of(first)]
    for other in found[1:]:
        ratio = other.step_ms / first.step_ms if first.step_ms else 1.0
        drawn = picture.of(other)
        pictures.append(dataclasses.replace(drawn, summary=f"{drawn.summary}  ·  {ratio:.2f} × the step above"))
    timeline_plot.save_png(pictures, path, headline, f"{tables.estimate(found)} The step was not run.")


def to_json(found: Sequence[Inspection]) -> str:
    """The inspections as a JSON object. For one, its key is `inspection`; for two, `before`, `after` and `gain`."""
    keys = ("before", "after") if len(found) == 2 else ("inspection",)
    data: dict[str, Any] = {key: i.to_dict() for key, i in zip(keys, found, strict=True)}
    if len(found) == 2:
        gain = Gain(*(i.parts for i in found))
        causes = {name: 1e3 * seconds for name, seconds in gain.causes.items()}
        data["gain"] = {"ratio": gain.ratio, "causes_ms": causes, "warning": gain.unequal() or None}
    return json.dumps(data, indent=2)


def save_html(found: Sequence[Inspection], path: str | Path, headline: str = "") -> None:
    """Writes the timelines and all rows of all tables as one page, see `dhelix.launch.shown.page`."""
    names = " and ".join(fingerprint.unmark(inspection.module) for inspection in found)
    headlines = [line.strip() for line, _ in tables.headlines(found)]
    shown_tables = [shown for shown in tables.all_tables(found, page.MOST_ROWS) if isinstance(shown, Table)]
    notes = [f"{inspection.source}: {note}" for inspection in found for note in tables.notes_on(inspection)]
    page.save(path, headline or names, headlines, notes, list(map(picture.of, found)), shown_tables)
