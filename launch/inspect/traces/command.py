"""`dhelix inspect TRACE`: measured times of a program, from a trace of the profiler.

    dhelix inspect trace --compare other-trace --png timeline.png

If the trace holds the compiled program, the estimate of `dhelix inspect DUMP` stands beside the measured times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from absl import flags
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.launch.inspect import targets
from dhelix.launch.inspect.inspection import Inspection, inspect_module
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.times import ROOFLINE, costs_for, named
from dhelix.launch.inspect.traces import picture
from dhelix.launch.inspect.traces.measurement import Measurement, measure
from dhelix.launch.inspect.traces.tables import comparison, headline, print_tables, tables
from dhelix.launch.shown import timeline_plot
from dhelix.launch.shown.page import write as page
from dhelix.launch.shown.timeline_plot import Picture
from dhelix.profiles.hardware import Hardware
from dhelix.runtime.profiling.traces import recording
from dhelix.runtime.profiling.traces.recording import Recording


def run(values: flags.FlagValues, paths: Sequence[str], titles: Sequence[str], show: Sequence[str]) -> None:
    """Measures one trace or two, and prints and writes the results.

    Args:
      titles: a title of the pictures for each path.
      show: which tables to print, of `flags.TABLES`.

    Raises DhelixError if the command fails.
    """
    if other := next((path for path in paths if not recording.is_trace(path)), None):
        raise DhelixError(f"{other} is not a profiler trace, but the other path is: give two traces, or two dumps")
    found = []
    for path in paths:
        recorded = recording.load(path, values.program)
        with dumps.blaming_module(f"the program in {path} is not valid", partial(_program, recorded)):
            predicted, notes, hardware = _predicted(recorded, values)
            found.append(measure(recorded, predicted, notes, hardware, values.gpu))
    if values.png or values.perfetto or values.html:
        pictures = [picture.of(measured, title) for measured, title in zip(found, titles, strict=True)]
        if values.png:
            timeline_plot.save_png(
                pictures, values.png, values.headline, "Measured in one step on one GPU, without the pause after it."
            )
        if values.perfetto:
            timeline_plot.save_perfetto(pictures, values.perfetto)
        if values.html:
            _save_html(found, pictures, values.html, values.headline)
    if values.json:
        print(to_json(found))
    else:
        print_tables(found, values.top, show=show)


def _program(recorded: Recording) -> bytes:
    return recorded.module.to_bytes() if recorded.module is not None else b""


def _save_html(found: Sequence[Measurement], pictures: Sequence[Picture], path: str, title: str) -> None:
    headlines = [line for measured in found for line in (headline(measured), measured.says_which()) if line]
    if len(found) == 2:
        headlines.append(comparison(found))
    notes = [f"{measured.source}: {note}" for measured in found for note in measured.notes]
    shown = [table for table in tables(found, page.MOST_ROWS) if isinstance(table, Table)]
    page.save(path, title or found[0].program, headlines, notes, pictures, shown)


def _predicted(
    recorded: Recording, values: flags.FlagValues
) -> tuple[Inspection | None, tuple[str, ...], Hardware | None]:
    """The estimate for the recorded program, notes on it, and the GPU. No estimate is no reason to fail."""
    if recorded.module is None:
        return None, (), None
    try:
        if values.hardware:
            gpu, notes = named(values.hardware), ()
        else:
            gpu, notes = targets.of_facts(recorded.gpus[0].facts)
        bandwidth = 1e9 * (values.inter_bandwidth or 0.0)
        costs, cost_model = costs_for(recorded.module, gpu, values.profile, values.setting, bandwidth)
        source = f"predicted from the {cost_model}" + (f" for {gpu.name}" if cost_model == ROOFLINE else "")
        return inspect_module(recorded.module, costs, cost_model, source=source), (*notes, source), gpu
    except DhelixError as error:
        return None, (f"nothing is predicted: {error}",), None


def to_json(found: Sequence[Measurement]) -> str:
    """The measurements as a JSON object. For one, its key is `measurement`; for two, `before` and `after`."""
    keys = ("before", "after") if len(found) == 2 else ("measurement",)
    data: dict[str, Any] = {key: measured.to_dict() for key, measured in zip(keys, found, strict=True)}
    if len(found) == 2:
        before, after = (measured.mean("step_ms") for measured in found)
        data["ratio"] = before / after
    return json.dumps(data, indent=2)
