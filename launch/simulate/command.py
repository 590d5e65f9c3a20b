"""`dhelix simulate`: time and memory of a train step on a cluster that need not exist.

    dhelix simulate --preset llama-66b --cluster dhelix-a800 --mesh cp=2,tp=8 --microbatches 8

Each way to run the step is compiled (`programs.py`) with the costs of the cluster (`passes/simulation`), and played by
the evaluator. docs/guide/simulate.md explains the output and its limits.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags, logging
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.shown import json_output
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.simulate import programs, search, search_tables, tables
from dhelix.launch.simulate.flags import cluster_of
from dhelix.launch.simulate.tables import SimulationView
from dhelix.launch.train import step_flags
from dhelix.passes.simulation import systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.simulated_step import SimulatedStep
from dhelix.profiles.files import storage
from dhelix.runtime.compiler import deviceless


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix simulate` and returns its exit status. Raises DhelixError if the command fails."""
    chosen: dict[str, Any] = values.flag_values_dict()
    target = json_output.target(chosen["json"], arguments, "simulate")
    to_stdout = target == "-"
    console = Console(stderr=to_stdout, width=None if sys.stdout.isatty() else 144, highlight=False)
    if not chosen["verbose"]:
        logging.set_verbosity(logging.ERROR)  # warnings would repeat the headline
    given = frozenset(name for name in chosen if values[name].present)
    _check(chosen, given)
    written = list[str]()
    if chosen["search"]:
        view, written = search.searched(chosen, given, console)
        show = functools.partial(search_tables.print_view, view)
    else:
        view = view_of(chosen, console)
        show = functools.partial(tables.print_view, view)
    text = json.dumps(view.to_json(), indent=1)
    if to_stdout:
        print(text)
    else:
        show(console)
    if written:
        say(console, f"wrote {', '.join(written)}")
    if target and not to_stdout:
        json_output.write(target, f"{text}\n")
        say(console, f"wrote {target}")
    return 0


def _check(chosen: Mapping[str, Any], given: frozenset[str]) -> None:
    """Raises DhelixError for flags that say nothing, or contradict each other."""
    if not chosen["preset"]:
        raise DhelixError("which model? give --preset NAME; `dhelix simulate --help` lists the names")
    if not chosen["search"]:
        for name in ("simulations", "processes", "out"):
            if name in given:
                raise DhelixError(f"--{name} needs --search")


def view_of(chosen: Mapping[str, Any], console: Console) -> SimulationView:
    """The simulation that the flags ask for.

    Raises:
      DhelixError: the cluster is unknown or too small, or the options contradict each other.
    """
    compared = systems.chosen(chosen["systems"])
    if not compared:
        raise DhelixError(f"--systems is empty; give some of {', '.join(systems.SYSTEMS)}")
    options = step_flags.options(chosen)
    layout = programs.layout_of(options, cluster_of(chosen))
    spread = Spread(chosen["slowest_gpu"], chosen["slowest_link"])
    profile = storage.load(chosen["profile"]) if chosen["profile"] else None
    model = ClusterCosts.of(layout.cluster, chosen["setting"], spread, profile)
    deviceless.prepare_environment()
    training, batch = programs.training_of(options, layout)
    gpus, takes = layout.cluster.gpus, "each program takes about half a minute, and several on a slow machine"
    say(console, f"Compiling {options.preset} for {gpus} GPU{'s' * (gpus > 1)}; {takes}.")
    with Progress(console, 0, len(compared), "simulate") as progress:
        found = list[SimulatedStep]()
        for step in programs.simulated(training, batch, compared, model, layout.cluster):
            found.append(step)
            progress.update(len(found), f"{step.system} is simulated")
    return SimulationView(options, layout, spread, model.words, tuple(found), programs.bubble_of(options))
