"""Output of `dhelix simulate`: JSON for scripts, and tables for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dhelix.launch.shown.progress import say
from dhelix.launch.simulate.programs import Layout
from dhelix.launch.train.options import Options
from dhelix.passes.framework.units import milliseconds
from dhelix.passes.simulation.cluster_costs import Spread
from dhelix.passes.simulation.simulated_step import SimulatedStep, fastest, gains
from dhelix.passes.simulation.systems import SYSTEMS

_GB = 1e9
_PARTS = (
    ("kernels", "compute"),
    ("copies", "copies"),
    ("lower clock", "clock"),
    ("slow-down", "slow_down"),
    ("exposed", "exposed"),
    ("pauses", "idle"),
)
"""The parts of a step: their words, and their names in `StepParts`."""

_TEXTS = frozenset(
    ("", "system", "constant", "from", "mesh", "micro-batches", "remat", "states", "schedule", "value", "why", "with")
)


@dataclass(frozen=True)
class SimulationView:
    """The result of one call of `dhelix simulate`.

    Attributes:
      options: the step.
      layout: its mesh and the cluster.
      spread: how unequal GPUs and links are.
      source: where measured times come from, in words.
      steps: a simulated step for each way to run it.
      bubble: idle time over ideal time of the pipeline (`programs.bubble_of`).
    """

    options: Options
    layout: Layout
    spread: Spread
    source: str
    steps: tuple[SimulatedStep, ...]
    bubble: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values: seconds, bytes, and constants in the units of their names."""
        cluster, work = self.layout.cluster, self.steps[0].work
        return {
            "step": {name: value for name, value in self.options.said().items() if value is not None},
            "mesh": {"pp": self.options.pp, **self.layout.axes},
            "gpus": cluster.gpus,
            "tokens": work.tokens,
            "model_flops": work.flops,
            "cluster": {
                "name": cluster.name,
                "gpu": cluster.gpu,
                "nodes": cluster.nodes,
                "gpus_per_node": cluster.gpus_per_node,
                "nodes_per_leaf": cluster.hardware.nodes_per_leaf,
                "oversubscription": cluster.hardware.oversubscription,
                "constants": [
                    {"name": one.name, "value": one.value, "source": one.source} for one in cluster.origins()
                ],
                "notes": list(cluster.notes),
            },
            "measured_times": self.source,
            "bubble": self.bubble,
            "slowest_gpu": self.spread.compute,
            "slowest_link": self.spread.communication,
            "steps": [step.to_json() for step in self.steps],
        }


def headline(view: SimulationView) -> str:
    """The first line: the fastest way to run the step, its gain, and how much of it is guessed."""
    best, gain, gpus = fastest(view.steps), gains(view.steps), view.layout.cluster.gpus
    fits = "" if not best.missing else f" It does not fit: a GPU lacks {best.missing / _GB:.1f} GB."
    return (
        f"{view.options.preset} on {gpus} GPU{'s' * (gpus > 1)}: {best.system} takes {milliseconds(best.seconds)} a "
        f"step, MFU {best.mfu:.1%}{f'; {gain}' if gain else ''}.{fits} {best.certainty}"
    )


def print_view(view: SimulationView, console: Console) -> None:
    """Prints the headline, the cluster, the steps with their parts, what waits, and the cluster's constants."""
    console.print(headline(view), style="bold", markup=False)
    axes = {"pp": view.options.pp, **view.layout.axes}
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one GPU"
    say(console, f"{view.layout.cluster.words()}. Mesh: {mesh}. {view.steps[0].work.tokens:,} tokens a step.")
    say(console, f"Times: {view.source}; and the constants below.")
    if view.bubble:
        words = f"Pipeline {view.options.pipeline or 'w'}: the bubble is {view.bubble:.1%} of a stage's work"
        say(console, f"{words}, if all stages work equally long.")
    if view.spread != Spread():
        words = f"the slowest GPU takes {view.spread.compute:g} x as long, collectives {view.spread.communication:g} x"
        say(console, f"Spread: {words}.")
    for note in view.layout.cluster.notes:
        say(console, f"- {note}")
    console.print(_steps(view))
    console.print(_parts(view))
    for step in view.steps:
        _print_remarks(step, console)
    console.print(_constants(view))


def _steps(view: SimulationView) -> Table:
    table = table_of("Steps", "system", "ms", "MFU", "tokens/s/GPU", "hidden", "memory", "guessed", "")
    for step in view.steps:
        fits = f"{step.missing / _GB:.1f} GB too much" if step.missing else ""
        words = "; ".join(filter(None, (SYSTEMS[step.system].words, fits)))
        table.add_row(
            step.system, f"{1e3 * step.seconds:,.1f}", f"{step.mfu:.1%}", f"{step.tokens_per_second:,.0f}",
            f"{step.hidden:.0%}" if step.parts.sent else "-", f"{step.memory / _GB:.1f} GB",
            f"{step.parts.guessed:.0%}", words,
        )  # fmt: skip
    return table


def _parts(view: SimulationView) -> Table:
    table = table_of("Where the time goes, ms", "system", *(words for words, _ in _PARTS), "all", "communication alone")
    for step in view.steps:
        cells = [f"{1e3 * getattr(step.parts, name):,.1f}" for _, name in _PARTS]
        table.add_row(step.system, *cells, f"{1e3 * step.seconds:,.1f}", f"{1e3 * step.parts.sent:,.1f}")
    return table


def _print_remarks(step: SimulatedStep, console: Console) -> None:
    if step.waits:
        say(console, f"{step.system}: compute waits for {step.waits}.")
    for note in step.notes:
        say(console, f"{step.system}: {note}.")


def _constants(view: SimulationView) -> Table:
    table = table_of("Constants, where nothing was measured", "constant", "value", "from")
    for one in view.layout.cluster.origins():
        table.add_row(one.name, _number(one.value), one.source)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if math.isclose(value, round(value)) else f"{value:,.4g}"


def table_of(title: str, *columns: str) -> Table:
    """An empty table. Columns of text are aligned to the left, those of numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right")
    return table
