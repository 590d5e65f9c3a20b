"""`dhelix simulate --search`: the fastest way to run a model on a cluster, among all meshes and schedules.

    dhelix simulate --search --preset llama-8b --cluster h100-infiniband --batch 512 --out llama-8b-64

Choices are made and searched in `passes/simulation`. Here they become options of a train step, and are compiled in
processes of their own. Flags that are given are fixed: `--mesh tp=8` leaves the other axes to the search.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from absl import logging
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.shard.job import compute_of, model_sizes
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.simulate import programs, search_files
from dhelix.launch.simulate.flags import cluster_of
from dhelix.launch.simulate.search_tables import SearchView, headline
from dhelix.launch.train import step_flags, trainer
from dhelix.launch.train.meshes.mesh_axes import parsed_axes
from dhelix.launch.train.options import Options
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.passes.sharding.collective_times import times_of
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.simulation import layout_search
from dhelix.passes.simulation.choices import PIPELINES, Choice, ModelShape, Space, choices
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.estimates import Estimator
from dhelix.passes.simulation.layout_search import Simulated
from dhelix.passes.simulation.simulated_step import SimulatedStep
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.files import storage

_COLLECTED = 100_000, 20, 5  # `gc.set_threshold` of processes that simulate


@dataclasses.dataclass(frozen=True)
class Task:
    """What is searched. It is sent to other processes.

    Attributes:
      options: the step; what a choice fixes is replaced.
      cluster: all of its GPUs are used.
      setting, spread, profile: as the flags of `dhelix simulate` say.
    """

    options: Options
    cluster: Cluster
    setting: str
    spread: Spread
    profile: str | None

    def model(self) -> ClusterCosts:
        """The costs of the cluster."""
        profile = storage.load(self.profile) if self.profile else None
        return ClusterCosts.of(self.cluster, self.setting, self.spread, profile)

    def options_of(self, choice: Choice) -> Options:
        """The step that runs as `choice` says."""
        names = ("dp", "ep", "cp", "tp") if choice.ep > 1 else ("dp", "cp", "tp")
        return dataclasses.replace(
            self.options,
            mesh=",".join(f"{name}={choice.axes[name]}" for name in names),
            pp=choice.pp,
            pipeline=choice.pipeline or None,
            microbatches=choice.microbatches,
            remat=choice.remat,
            states=None if choice.states == "whole" else choice.states,
        )


def searched(chosen: Mapping[str, Any], given: frozenset[str], console: Console) -> tuple[SearchView, list[str]]:
    """The search that the flags ask for, and the files that it wrote.

    Args:
      chosen: values of all flags.
      given: names of the flags that were given.

    Raises:
      DhelixError: nothing fits, or the flags contradict each other.
    """
    into = search_files.folder(chosen["out"]) if chosen["out"] else None
    options = step_flags.options(chosen)
    cluster = cluster_of(chosen)
    spread = Spread(chosen["slowest_gpu"], chosen["slowest_link"])
    task = Task(options, cluster, chosen["setting"], spread, chosen["profile"])
    config = trainer.configuration(options)
    model = task.model()
    batch = options.batch or cluster.gpus
    task = dataclasses.replace(task, options=dataclasses.replace(options, batch=batch))
    fixed = _fixed(chosen, given, isinstance(config, MoeConfig))
    space = Space(cluster.gpus, cluster.gpus_per_node, batch, _systems(chosen, given), fixed)
    shape = shape_of(options.preset, config)
    found, left_out = choices(shape, space)
    programs.target_of(cluster)
    limit = cluster.hardware.memory_bytes
    most = min(chosen["simulations"], len(found))
    say(console, f"{len(found):,} ways to run {options.preset} with {batch} sequences on {cluster.gpus} GPUs.")
    takes = "each takes up to half a minute of a core"
    say(console, f"At most {most} of them are simulated, and the best one in XLA's order; {takes}.")
    with Progress(console, 0, most, "simulate") as progress, Simulations(task, chosen["processes"]) as simulate:

        def shown(done: Sequence[Simulated]) -> None:
            fitting = [one for one in done if one.fits]
            best = min(fitting, key=lambda one: one.seconds, default=None)
            progress.update(len(done), f"best: {best.choice}, {1e3 * best.seconds:,.0f} ms" if best else "none fits")

        result = layout_search.search(found, estimator_of(task, shape), simulate, limit, chosen["simulations"], shown)
    best = task.options_of(result.ranked[0].choice)
    view = SearchView(best, cluster, spread, model.words, result, left_out)
    if into is None:
        return view, []
    if view.best.choice.system == "strands":
        say(console, "Making the plan of the best one.")
    else:
        say(console, "No plan.json: the best way has XLA's order, and the command carries it out.")
    return view, search_files.write(into, view, headline(view), model)


def _systems(chosen: Mapping[str, Any], given: frozenset[str]) -> tuple[str, ...]:
    """The systems to choose from. Raises DhelixError for those that cannot be searched."""
    names = tuple(chosen["systems"]) if "systems" in given else tuple(PIPELINES)
    for name in names:
        if name not in PIPELINES:
            raise DhelixError(f"--search compares {' and '.join(PIPELINES)}, not {name!r}; leave {name} out")
    return names


def _fixed(chosen: Mapping[str, Any], given: frozenset[str], experts: bool) -> dict[str, int | str]:
    """What the flags leave no choice about."""
    try:
        found: dict[str, int | str] = dict(parsed_axes(chosen["mesh"], experts))
    except DhelixError as error:
        raise DhelixError(f"{error}. To search, give sizes of axes, such as tp=8; the others are searched") from None
    for name in ("pp", "microbatches", "remat", "states", "pipeline"):
        if name in given:
            found[name] = chosen[name]
    return found


def shape_of(name: str, config: DecoderConfig) -> ModelShape:
    """What decides how the model can be split."""
    sizes = model_sizes(name, config, config.seq)
    shared = (config.heads, config.kv_heads, config.kv_heads * config.head_dim)
    if not isinstance(config, MoeConfig):
        return ModelShape(sizes, config.seq, *shared)
    experts = config.experts * 3 * config.hidden * config.ffn
    return ModelShape(
        sizes, config.seq, *shared, config.experts, config.chosen * config.capacity_factor, experts
    )  # fmt: skip


def estimator_of(task: Task, shape: ModelShape) -> Estimator:
    """The estimator of a model on the cluster."""
    hardware, model = task.cluster.hardware, task.model()
    section = model.profile.section(model.setting)
    times = times_of(section.collectives, hardware)
    return Estimator(shape, compute_of(hardware, shape.sizes), hardware, times, Overlap().on(hardware, section))


class Simulations(contextlib.AbstractContextManager["Simulations"]):
    """Simulates choices in processes of their own, which also keeps a crash of the compiler from ending the search."""

    def __init__(self, task: Task, processes: int | None) -> None:
        self.task, self.processes = task, processes or os.cpu_count() or 1
        self._pool = _pool(self.processes)

    def __call__(self, chosen: Sequence[Choice]) -> Iterator[SimulatedStep | str]:
        tasks = [self._pool.submit(simulated, self.task, choice) for choice in chosen]
        results = [self._result(task.result) for task in tasks]
        if None in results:  # the compiler crashed, and with it what else was at work
            self._pool.shutdown(cancel_futures=True)
            self._pool = _pool(self.processes)
        for choice, result in zip(chosen, results, strict=True):
            yield self._alone(choice) if result is None else result

    def _alone(self, choice: Choice) -> SimulatedStep | str:
        """The result of a choice that is simulated in a process of its own."""
        with _pool(1) as pool:
            result = self._result(pool.submit(simulated, self.task, choice).result)
        return "the compiler crashed" if result is None else result

    @staticmethod
    def _result(result: Callable[[], SimulatedStep | str]) -> SimulatedStep | str | None:
        try:
            return result()
        except BrokenProcessPool:
            return None

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU of this machine has nothing to do
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(processes, spawn, initializer=prepare)


def prepare() -> None:
    """Prepares a process that simulates, and does nothing else.

    - It drops what libraries write to stderr: XLA warns of each choice that needs much memory. Errors come as results.
    - It looks for garbage less often than usual. Programs are made of many objects, which live until the step is
      simulated. The usual search for garbage among them takes a sixth of the time of a simulation.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    gc.freeze()  # what is imported stays
    gc.set_threshold(*_COLLECTED)


def simulated(task: Task, choice: Choice) -> SimulatedStep | str:
    """The simulated step of a choice, or the reason why there is none."""
    logging.set_verbosity(logging.ERROR)  # the tables say which times are guesses
    try:
        return programs.simulated_options(task.options_of(choice), task.cluster, choice.system, task.model())
    except DhelixError as error:
        return str(error)
