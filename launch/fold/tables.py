"""Output of `dhelix fold`: JSON for scripts, and tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dhelix.launch.fold.chart import COLOURS, TITLES, span_text, strands
from dhelix.passes.pipeline_fold.evaluation import Evaluation
from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule, Work
from dhelix.passes.pipeline_fold.tasks import PipelineCosts

_LABEL = 13  # width of the label left of the ticks, in characters


@dataclass(frozen=True)
class FoldView:
    """The result of one call of `dhelix fold`.

    Attributes:
      schedule: the chosen schedule.
      evaluation: the evaluation of `schedule`: times, idle time, residuals.
      compared: evaluations of all schedules by name. A schedule that does not fit has a text with the reason instead.
    """

    schedule: Schedule
    costs: PipelineCosts
    evaluation: Evaluation
    compared: Mapping[str, Evaluation | str]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values. Layers, stages and micro-batches are numbered from 0.

        Times are in the unit of `costs`. `ticks` and `residuals` hold one list for each stage.
        """
        schedule, layout = self.schedule, self.schedule.layout
        stages = range(layout.stages)
        return {
            "schedule": schedule.name,
            "layers": layout.layers,
            "stages": layout.stages,
            "microbatches": schedule.microbatches,
            "layout": [[layer for c in layout.chunks_of(stage) for layer in layout.layers_of(c)] for stage in stages],
            "chunks": [
                {"stage": layout.stage_of[c], "layers": list(layout.layers_of(c)), "padding": _padding(layout, c)}
                for c in range(layout.chunks)
            ],
            "ticks": [_ticks(schedule, stage, lambda work: [work.microbatch, work.chunk]) for stage in stages],
            "residuals": [
                _ticks(schedule, stage, lambda work: {"slot": work.slot, "reversed": work.reversed}) for stage in stages
            ],
            **_numbers(self.evaluation),
            "peak_residual_slots": max(self.evaluation.peak_residual_slots),
            "costs": {
                "forward": float(self.costs.forward),
                "backward": float(self.costs.backward),
                "co_executed": float(self.costs.of_pair(1, 1)),
                "send": float(self.costs.send),
            },
            "compared": [
                {"schedule": name, **({"refused": found} if isinstance(found, str) else _numbers(found))}
                for name, found in self.compared.items()
            ],
        }


def _ticks(schedule: Schedule, stage: int, say: Callable[[Work], Any]) -> list[dict[str, Any]]:
    def either(work: Work | None) -> Any:
        return None if work is None else say(work)

    return [
        {"tick": number, "forward": either(cells[stage].forward), "backward": either(cells[stage].backward)}
        for number, cells in enumerate(schedule.ticks)
    ]


def _numbers(found: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON values. Residuals and parameters are lists with one number for each stage."""
    return {
        "step_time": round(float(found.step_time), 6),
        "bubble_fraction": round(float(found.bubble_fraction), 9),
        "idle_share": round(float(found.idle_share), 9),
        "co_executed_share": round(float(found.co_executed_share), 9),
        "peak_residual_slots_by_stage": list(found.peak_residual_slots),
        "peak_residual_layers_by_stage": list(found.peak_residual_layers),
        "parameter_layers_by_stage": list(found.stage_layers),
    }


def summary(view: FoldView) -> str:
    """A line of text: the bubble, the fraction of ticks that are SI blocks, and the number of residual slots."""
    found = view.evaluation
    parts = [f"bubble {float(found.bubble_fraction):.1%} of a stage's work"]
    if found.co_executed_share:
        parts.append(f"{float(found.co_executed_share):.0%} of the ticks are SI blocks")
    slots = sorted(set(found.peak_residual_slots))
    parts.append(f"residual slots on a stage: {_range(slots)}")
    return "  ·  ".join(parts)


def axis(costs: PipelineCosts) -> str:
    """The text under the time axis of a chart."""
    return f"time; a layer takes {_times(costs)}"


def print_view(view: FoldView, console: Console) -> None:
    """Prints the layout, the schedule, the time of a step, and a table that compares all schedules."""
    layout = view.schedule.layout
    words = f"{layout.layers} layers on {layout.stages} stages, {view.schedule.microbatches} micro-batches"
    console.print(f"{TITLES[view.schedule.name]}: {words}", style="bold")
    _print_layout(layout, console)
    _print_schedule(view.schedule, console)
    console.print(_costs(view), soft_wrap=True, markup=False)
    _print_compared(view, console)


def _print_layout(layout: Layout, console: Console) -> None:
    """Prints the layers of each stage, chunk by chunk, and the number of identity layers that fill up the chunks."""
    table = _table("Layout")
    table.add_column("stage", justify="right")
    for place in range(layout.chunks // layout.stages):
        table.add_column("layers (chunk)" if place == 0 else "")
    table.add_column("layers", justify="right")
    table.add_column("identity layers", justify="right")
    for stage in range(layout.stages):
        chunks = layout.chunks_of(stage)
        cells = [f"{span_text(layout.layers_of(chunk))} ({chunk})" for chunk in chunks]
        held, padding = sum(layout.chunk_layers[c] for c in chunks), sum(_padding(layout, c) for c in chunks)
        table.add_row(str(stage), *cells, str(held), str(padding))
    console.print(table)


def _padding(layout: Layout, chunk: int) -> int:
    return layout.padded - layout.chunk_layers[chunk]


def _print_schedule(schedule: Schedule, console: Console) -> None:
    """Prints a table with a row for each stage and a column for each tick.

    A cell shows the forward work above the backward work, each as micro-batch.chunk. If the terminal is too narrow,
    ticks in the middle are left out, because there the schedule repeats itself.
    """
    strand, width = strands(schedule), len(f"{schedule.microbatches - 1}.{schedule.layout.chunks - 1}")
    ticks = _fitting(len(schedule.ticks), (console.width - _LABEL) // (width + 1))
    table = _table("Schedule, tick by tick: forward above backward, as micro-batch.chunk", padding=0)
    table.add_column("tick", no_wrap=True)
    for tick in ticks:
        table.add_column("··" if tick is None else str(tick), justify="right", min_width=2 if tick is None else width)
    for stage in range(schedule.layout.stages):
        cells = ("" if tick is None else _cell(schedule.ticks[tick][stage], strand) for tick in ticks)
        table.add_row(f"stage {stage}  F\n{'B':>10}", *cells)
    if None in ticks:
        table.caption = f"{len(schedule.ticks)} ticks; {len(schedule.ticks) - len(ticks) + 1} in the middle do not fit"
    console.print(table)


def _fitting(count: int, room: int) -> list[int | None]:
    """The numbers of the ticks that fit into `room` columns. One None stands for all ticks that are left out."""
    if count <= room:
        return list(range(count))
    half = max(room - 1, 2) // 2
    return [*range(half), None, *range(count - half, count)]


def _cell(cell: Cell, strand: Sequence[str]) -> Text:
    return Text("\n").join([_work(cell.forward, strand, False), _work(cell.backward, strand, True)])


def _work(work: Work | None, strand: Sequence[str], backward: bool) -> Text:
    if work is None:
        return Text()
    light, dark = COLOURS[strand[work.microbatch]]
    style = f"white on {dark}" if backward else f"black on {light}"
    return Text(f"{work.microbatch}.{work.chunk}", style)


def _costs(view: FoldView) -> str:
    found = view.evaluation
    return (
        f"A layer takes {_times(view.costs)}. A step takes {float(found.step_time):,.4g}; each stage is idle for "
        f"{float(found.idle_share):.1%} of it."
    )


def _times(costs: PipelineCosts) -> str:
    return (
        f"{float(costs.forward):g} forward, {float(costs.backward):g} backward, {float(costs.of_pair(1, 1)):g} for both"
    )


def _print_compared(view: FoldView, console: Console) -> None:
    table = _table("Schedules")
    table.add_column("")
    for column in ("bubble", "idle", "SI blocks", "step", "residuals", "parameters"):
        table.add_column(column, justify="right", no_wrap=True)
    notes = []
    for name, found in view.compared.items():
        bold = "bold" if name == view.schedule.name else ""
        if isinstance(found, str):
            table.add_row(TITLES[name], *["-"] * 6, style=bold)
            notes.append(f"{TITLES[name]}: {found}.")
            continue
        shares = (found.bubble_fraction, found.idle_share, found.co_executed_share)
        layers = (found.peak_residual_layers, found.stage_layers)
        table.add_row(
            TITLES[name],
            *(f"{float(share):.1%}" for share in shares),
            f"{float(found.step_time):,.4g}",
            *(_range(count) for count in layers),
            style=bold,
        )
    table.caption = (
        "bubble: idle over ideal time, without the SI gain; idle: fraction of the step, with the SI gain; residuals "
        "and parameters: in layers per stage"
    )
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _table(title: str, padding: int = 1) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, padding),
    )
