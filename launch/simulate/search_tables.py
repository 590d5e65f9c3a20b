"""Output of `dhelix simulate --search`: the ten best, why others lose, and the command that runs the best one."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dhelix.launch.shown.progress import say
from dhelix.launch.simulate.tables import table_of
from dhelix.launch.train import step_flags
from dhelix.launch.train.options import Options
from dhelix.passes.framework.units import milliseconds
from dhelix.passes.sharding.planner import in_words
from dhelix.passes.simulation.cluster_costs import Spread
from dhelix.passes.simulation.layout_search import Found, Lost, Simulated
from dhelix.profiles.clusters.cluster import Cluster

SHOWN = 10


@dataclass(frozen=True)
class SearchView:
    """The result of a search.

    Attributes:
      options: the best step.
      cluster, spread: as for `dhelix simulate`.
      source: where measured times come from, in words.
      found: what the search found.
      left_out: how many choices the model's sizes do not allow, by the reason.
    """

    options: Options
    cluster: Cluster
    spread: Spread
    source: str
    found: Found
    left_out: dict[str, int]

    @property
    def best(self) -> Simulated:
        return self.found.ranked[0]

    @property
    def command(self) -> str:
        """The command that trains as the best choice says, on every node."""
        words = ["dhelix", "launch"]
        if self.cluster.nodes == 1:
            words += ["--processes", str(self.cluster.gpus)]
        words += ["-m", "dhelix", "train", *(["--plain"] if self.best.choice.system == "xla" else [])]
        return shlex.join([*words, *step_flags.words(self.options)])

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, in seconds and bytes."""
        found = self.found
        return {
            "preset": self.options.preset,
            "cluster": self.cluster.name,
            "gpus": self.cluster.gpus,
            "batch": self.options.batch,
            "measured_times": self.source,
            "slowest_gpu": self.spread.compute,
            "slowest_link": self.spread.communication,
            "considered": found.considered,
            "expected_not_to_fit": found.too_large,
            "left_out": self.left_out,
            "complete": found.complete,
            "expected_to_be_faster": found.faster,
            "median_error_of_expected": found.error,
            "ranked": [_json(one) for one in found.ranked],
            "others": [_json(one) for one in found.others],
            "why": {
                trait: {value: _lost(lost) for value, lost in values.items()} for trait, values in found.reasons.items()
            },
            "command": self.command,
        }


def _json(one: Simulated) -> dict[str, Any]:
    choice = one.choice
    return {
        "axes": choice.axes, "sequences": choice.sequences, "microbatches": choice.microbatches, "remat": choice.remat,
        "states": choice.states, "pipeline": choice.pipeline, "system": choice.system,
        "expected_seconds": one.expected, "estimated_seconds": one.estimate.seconds,
        "estimated_memory": one.estimate.memory,
        **({"refused": one.refused} if one.step is None else {"step": one.step.to_json()}),
    }  # fmt: skip


def _lost(lost: Lost) -> dict[str, Any]:
    behind = None if math.isinf(lost.behind) else lost.behind
    return {"choice": str(lost.choice or ""), "behind": behind, "simulated": lost.simulated, "why": lost.why}


def headline(view: SearchView) -> str:
    """The first line: the best choice, its gain over XLA's order, and how sure it is."""
    found, best = view.found, view.best
    assert best.step is not None
    gain = ""
    if best.choice.system != "xla":
        gain = f"; {_gain(view)}"
    faster = ""
    if found.faster:
        ways = f"{found.faster:,} other way{'s are' if found.faster > 1 else ' is'}"
        faster = f" Not finished: {ways} expected to be faster; give more --simulations."
    return (
        f"{view.options.preset} on {view.cluster.gpus} GPUs, {view.options.batch} sequences a step: {best.choice}: "
        f"{milliseconds(best.seconds)} a step, MFU {best.step.mfu:.1%}{gain}. "
        f"{best.step.certainty}{faster}"
    )


def _gain(view: SearchView) -> str:
    """How much faster the best way is than XLA's order: that of the same mesh, and of the best that was simulated."""
    found, best = view.found, view.best
    plain = [one for one in found.ranked if one.choice.system == "xla"]
    same = [one for one in plain if dataclasses.replace(one.choice, system=best.choice.system) == best.choice]
    if not plain:
        return "no simulated way in XLA's order fits"
    words = f"{plain[0].seconds / best.seconds:.2f} x as fast as the fastest that was simulated in XLA's order"
    if not same or same[0] is plain[0]:
        return words
    return f"{same[0].seconds / best.seconds:.2f} x as fast as XLA's order of it, {words}"


def print_view(view: SearchView, console: Console) -> None:
    """Prints the headline, what was searched, the ten best, why others lose, and the command."""
    found = view.found
    console.print(headline(view), style="bold", markup=False)
    say(console, f"{view.cluster.words()}. Times: {view.source}; and the cluster's constants.")
    number = len(found.ranked) + len(found.others)
    end = "no other is expected within 2 % of the best" if found.complete else "the search is not finished"
    say(console, f"{found.considered:,} ways considered, {found.too_large:,} of them expected not to fit; {number} "
        f"simulated; expected times were off by {found.error:.1%} (median); {end}.")  # fmt: skip
    console.print(_best(view))
    console.print(_reasons(view))
    for one in found.others:
        if one.refused:
            say(console, f"Cannot run: {one.choice}: {one.refused}")
    for reason, count in view.left_out.items():
        say(console, f"Left out {count:,} times: {reason}.")
    where = ", on each node under its scheduler" if view.cluster.nodes > 1 else ""
    say(console, f"The command for the best one{where}:")
    say(console, f"  {view.command}")


def _best(view: SearchView) -> Table:
    table = table_of(
        "The fastest", "", "mesh", "micro-batches", "remat", "states", "schedule", "ms", "MFU", "tokens/s/GPU",
        "memory", "guessed",
    )  # fmt: skip
    for number, one in enumerate(view.found.ranked[:SHOWN], 1):
        step, choice = one.step, one.choice
        assert step is not None
        table.add_row(
            str(number), choice.mesh, f"{choice.microbatches} x {choice.sequences}", choice.remat, choice.states,
            choice.traits()["schedule"], f"{1e3 * step.seconds:,.1f}", f"{step.mfu:.1%}",
            f"{step.tokens_per_second:,.0f}", in_words(step.memory), f"{step.parts.guessed:.0%}",
        )  # fmt: skip
    return table


def _reasons(view: SearchView) -> Table:
    table = table_of("Why others lose: the best with each value", "", "value", "longer", "why", "with")
    for trait, values in view.found.reasons.items():
        for value, lost in values.items():
            longer = "-" if math.isinf(lost.behind) else "best" if lost.behind == 0 else f"{lost.behind:+.1%}"
            table.add_row(trait, value, longer, lost.why, str(lost.choice or ""))
            trait = ""
    return table
