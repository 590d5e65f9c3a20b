"""`dhelix fold`: shows the layers of each pipeline stage, the work of each stage in each tick, and the step's time.

    dhelix fold --layers 32 --stages 4 --microbatches 12 --out fold.svg

Layouts and schedules are data (`dhelix.passes.pipeline_fold`), and the time of a step follows from the time of a layer.
So nothing is compiled, and nothing runs. docs/guide/pipeline.md explains layouts and schedules.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.fold import chart as fold_chart
from dhelix.launch.fold import tables as fold_tables
from dhelix.launch.fold.tables import FoldView
from dhelix.launch.fold.times import cell_times
from dhelix.launch.shown import json_output
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.presets import PRESETS
from dhelix.passes.pipeline_fold import (
    SCHEDULES,
    Evaluation,
    PipelineCosts,
    bidirectional,
    evaluate,
    evaluate_programs,
    fold_layout,
    layout_of,
    make_schedule,
    validate,
    zero_bubble_v,
)

_LAYERS = 32  # of the example in DHelix figure 8


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix fold` and returns its exit status. Raises DhelixError if the command fails."""
    chosen: dict[str, Any] = values.flag_values_dict()
    chosen["layers"] = _layers(chosen)
    target = json_output.target(chosen["json"], arguments, "fold")
    view = view_of(chosen)
    to_stdout = target == "-"
    console = Console(stderr=to_stdout, width=None if sys.stdout.isatty() else 144, highlight=False)
    if chosen["out"]:
        times, words = cell_times(view.schedule, view.costs), (fold_tables.summary(view), fold_tables.axis(view.costs))
        fold_chart.save(fold_chart.chart(view.schedule, times, *words), chosen["out"])
    if to_stdout:
        print(_json(view))
    else:
        fold_tables.print_view(view, console)
    if target and not to_stdout:
        json_output.write(target, f"{_json(view)}\n")
    for name in (chosen["out"], None if to_stdout else target):
        if name:
            console.print(f"wrote {name}", soft_wrap=True, markup=False)
    return 0


def view_of(chosen: Mapping[str, Any]) -> FoldView:
    """The schedule that the flags choose, its evaluation, and the evaluations of all schedules.

    Raises:
      DhelixError: the chosen schedule does not fit the numbers of layers, stages and micro-batches.
    """
    costs = _costs(chosen)
    layout = layout_of(chosen["schedule"], chosen["layers"], chosen["stages"], chosen["chunks_per_stage"])
    config = PRESETS.get(chosen["preset"] or "")
    if isinstance(config, MoeConfig):
        try:
            dataclasses.replace(config, layers=layout.layers).check_chunks(layout.chunks)
        except ValueError as error:
            raise DhelixError(str(error)) from None
    schedule = make_schedule(chosen["schedule"], layout, chosen["microbatches"])
    validate(schedule)
    evaluation = evaluate(schedule, costs)
    return FoldView(schedule, costs, evaluation, _compared(chosen, costs, evaluation))


def _layers(chosen: Mapping[str, Any]) -> int:
    """The number of layers to fold: `--layers`, else that of the preset, else that of DHelix figure 8."""
    return chosen["layers"] or (PRESETS[chosen["preset"]].layers if chosen["preset"] else _LAYERS)


def _costs(chosen: Mapping[str, Any]) -> PipelineCosts:
    if odd := [name for name in ("forward", "backward", "send", "si_gain") if not math.isfinite(chosen[name])]:
        raise DhelixError(f"--{odd[0]} {chosen[odd[0]]}: give a finite number")
    both = (1.0 - chosen["si_gain"]) * (chosen["forward"] + chosen["backward"])
    return PipelineCosts(chosen["forward"], chosen["backward"], both, send=chosen["send"])


def _compared(chosen: Mapping[str, Any], costs: PipelineCosts, shown: Evaluation) -> dict[str, Evaluation | str]:
    """The evaluation of each schedule by name, or the reason why the schedule does not fit.

    Schedules that dhelix can execute come first.

    Args:
      shown: the evaluation of the chosen schedule.
    """
    layers, stages, count = (chosen[name] for name in ("layers", "stages", "microbatches"))

    def executed(name: str) -> Evaluation:
        if name == shown.name:
            return shown
        layout = layout_of(name, layers, stages, chosen["chunks_per_stage"])
        return evaluate(make_schedule(name, layout, count), costs)

    def evaluated(name: str) -> Evaluation:
        plain_costs = costs.without_gain()
        if name == "zbv":  # this schedule has no SI blocks, so SI gains nothing
            programs = plain = zero_bubble_v(fold_layout(layers, stages), count, costs)
        else:
            programs = plain = bidirectional(layers, stages, count, costs)
            if plain_costs is not costs:
                plain = bidirectional(layers, stages, count, plain_costs)
        return evaluate_programs(programs, plain, costs)

    found: dict[str, Evaluation | str] = {}
    for name in (*SCHEDULES, "zbv", "bidirectional"):
        try:
            found[name] = executed(name) if name in SCHEDULES else evaluated(name)
        except DhelixError as error:
            found[name] = str(error)
    return found


def _json(view: FoldView) -> str:
    return json.dumps(view.to_json(), indent=1)
