"""`dhelix simulate`: time and memory of a train step on a cluster that need not exist.

    dhelix simulate --preset llama-66b --cluster dhelix-a800 --mesh cp=2,tp=8 --microbatches 8

Each way to run the step is compiled (`programs.py`) with the costs of the cluster (`passes/simulation`), and played by
the evaluator. docs/guide/simulate.md explains the output and its limits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.shown import json_output
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.simulate import programs, tables
from dhelix.launch.simulate.tables import SimulationView
from dhelix.launch.train import step_flags
from dhelix.models import Training
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.simulation import systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work
from dhelix.passes.simulation.systems import System
from dhelix.profiles.clusters import known
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.files import storage
from dhelix.runtime.compiler import deviceless


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix simulate` and returns its exit status. Raises DhelixError if the command fails."""
    chosen: dict[str, Any] = values.flag_values_dict()
    target = json_output.target(chosen["json"], arguments, "simulate")
    to_stdout = target == "-"
    console = Console(stderr=to_stdout, width=None if sys.stdout.isatty() else 144, highlight=False)
    view = view_of(chosen, console)
    text = json.dumps(view.to_json(), indent=1)
    if to_stdout:
        print(text)
    else:
        tables.print_view(view, console)
    if target and not to_stdout:
        json_output.write(target, f"{text}\n")
        say(console, f"wrote {target}")
    return 0


def view_of(chosen: Mapping[str, Any], console: Console) -> SimulationView:
    """The simulation that the flags ask for.

    Raises:
      DhelixError: the cluster is unknown or too small, or the options contradict each other.
    """
    if not chosen["preset"]:
        raise DhelixError("which model? give --preset NAME; `dhelix simulate --help` lists the names")
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
        for step in simulated(training, batch, compared, model, layout.cluster):
            found.append(step)
            progress.update(len(found), f"{step.system} is simulated")
    return SimulationView(options, layout, spread, model.words, tuple(found))


def cluster_of(chosen: Mapping[str, Any]) -> Cluster:
    """The cluster that the flags describe. Raises DhelixError if there is none."""
    cluster = known.find(chosen["cluster"])
    if chosen["nodes"]:
        cluster = cluster.with_nodes(chosen["nodes"])
    values: dict[str, Any] = {}
    for part in chosen["constants"]:
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise DhelixError(f"--constants {part}: give NAME=NUMBER, such as between_gb_per_second=25") from None
    return cluster.with_constants(values, "--constants")


def simulated(
    training: Training, batch: int, compared: Sequence[System], model: ClusterCosts, cluster: Cluster
) -> Iterator[SimulatedStep]:
    """Simulates a step in each way to run it. Ways that compile the plain step share one compilation.

    Args:
      training, batch: as `programs.training_of` returns them.
      model: costs of the cluster.
    """
    plain = None
    work = work_of(training, batch, cluster)
    for system in compared:
        if system.plain:
            plain = program = plain or programs.compiled(training, batch, system, model)
        else:
            program = programs.compiled(training, batch, system, model)
        parts = step_parts(program.module, model.costs(), program.memory.peak)
        if system.name == "blocking":
            parts = systems.blocking(parts)
        limit = cluster.hardware.memory_bytes
        yield SimulatedStep(system.name, parts, program.memory.peak, work, limit, program.notes)


def work_of(training: Training, batch: int, cluster: Cluster) -> Work:
    """What a step of `batch` sequences computes."""
    config = training.config
    tokens = batch * config.seq
    return Work(tokens, float(tokens * config.flops_per_token()), cluster.gpus, cluster.hardware.peak_flops)
