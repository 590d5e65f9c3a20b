"""Output of `dhelix simulate`: JSON for scripts, and tables for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dhelix.launch.shown.progress import say
from dhelix.launch.simulate.programs import Layout, bubble_of
from dhelix.launch.train.options import Options
from dhelix.passes.framework.units import milliseconds
from dhelix.passes.simulation.cluster_costs import Spread
from dhelix.passes.simulation.simulated_step import SimulatedStep, fastest
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


@dataclass(frozen=True)
class SimulationView:
    """The result of one call of `dhelix simulate`.

    Attributes:
      options: the step.
      layout: its mesh and the cluster.
      spread: how unequal GPUs and links are.
      source: where measured times come from, in words.
      steps: a simulated step for each way to run it.
    """

    options: Options
    layout: Layout
    spread: Spread
    source: str
    steps: tuple[SimulatedStep, ...]

    @property
    def fastest(self) -> SimulatedStep:
        """The fastest step that fits; the fastest of all if none fits."""
        return fastest(self.steps)

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
            "bubble": bubble_of(self.options),
            "slowest_gpu": self.spread.compute,
            "slowest_link": self.spread.communication,
            "steps": [step.to_json() for step in self.steps],
        }


def headline(view: SimulationView) -> str:
    """The first line: the fastest way to run the step, its gain, and how much of it is guessed."""
    best, gpus = view.fastest, view.layout.cluster.gpus
    others = ", ".join(
        f"{other.seconds / best.seconds:.2f} x as fast as {other.system}" for other in view.steps if other is not best
    )
    fits = "" if not best.missing else f" It does not fit: a GPU lacks {best.missing / _GB:.1f} GB."
    return (
        f"{view.options.preset} on {gpus} GPU{'s' * (gpus > 1)}: {best.system} takes {milliseconds(best.seconds)} a "
        f"step, MFU {best.mfu:.1%}{f'; {others}' if others else ''}.{fits} {best.certainty}"
    )


def print_view(view: SimulationView, console: Console) -> None:
    """Prints the headline, the cluster, the steps with their parts, what waits, and the cluster's constants."""
    console.print(headline(view), style="bold", markup=False)
    axes = {"pp": view.options.pp, **view.layout.axes}
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one GPU"
    say(console, f"{view.layout.cluster.words()}. Mesh: {mesh}. {view.steps[0].work.tokens:,} tokens a step.")
    say(console, f"Times: {view.source}; and the constants below.")
    if bubble := bubble_of(view.options):
        name = view.options.pipeline or "w"
        say(
            console,
            f"Pipeline {name}: stages are idle for {bubble:.1%} of their work (bubble), if they work equally long.",
        )
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
    table = _table("Steps", "system", "ms", "MFU", "tokens/s/GPU", "hidden", "memory", "guessed", "")
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
    table = _table("Where the time goes, ms", "system", *(words for words, _ in _PARTS), "all", "communication alone")
    for step in view.steps:
        cells = [f"{1e3 * getattr(step.parts, name):,.1f}" for _, name in _PARTS]
        table.add_row(step.system, *cells, f"{1e3 * step.seconds:,.1f}", f"{1e3 * step.parts.sent:,.1f}")
    return table


def _print_remarks(step: SimulatedStep, console: Console) -> None:
    waits = ", ".join(f"{words} {milliseconds(seconds)}" for words, seconds in step.parts.exposed_by if seconds > 0.0)
    if waits:
        say(console, f"{step.system}: compute waits for {waits}.")
    for note in step.notes:
        say(console, f"{step.system}: {note}.")


def _constants(view: SimulationView) -> Table:
    table = _table("Constants, where nothing was measured", "constant", "value", "from")
    for one in view.layout.cluster.origins():
        table.add_row(one.name, _number(one.value), one.source)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if math.isclose(value, round(value)) else f"{value:,.4g}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        text = name in ("system", "", "constant", "from")
        table.add_column(name, justify="left" if text else "right")
    return table
