"""`dhelix simulate --search`: the fastest way to run a model on a cluster, among all meshes and schedules.

    dhelix simulate --search --preset llama-8b --cluster h100-infiniband --batch 512 --out llama-8b-64

Choices are made and searched in `passes/simulation`. Here they become options of a train step, and are compiled in
processes of their own. Flags that are given are fixed: `--mesh tp=8` leaves the other axes to the search.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
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
from dhelix.launch.train.options import Options
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.passes.sharding.collective_times import Links, LinkTimes, MeasuredTimes
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.simulation import layout_search, systems
from dhelix.passes.simulation.choices import PIPELINES, Choice, ModelShape, Space, choices
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.estimates import Estimator
from dhelix.passes.simulation.layout_search import Simulated
from dhelix.passes.simulation.simulated_step import SimulatedStep
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.files import storage
from dhelix.runtime.compiler import deviceless


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
    space = Space(cluster.gpus, cluster.gpus_per_node, batch, _systems(chosen, given), _fixed(chosen, given))
    shape = shape_of(options.preset, config)
    found, left_out = choices(shape, space)
    if cluster.gpu.lower() not in deviceless.targets():
        programs.training_of(task.options_of(found[0]), programs.layout_of(task.options_of(found[0]), cluster))
    limit = cluster.hardware.memory_bytes
    most = min(chosen["simulations"], len(found))
    say(console, f"{len(found):,} ways to run {options.preset} with {batch} sequences on {cluster.gpus} GPUs. At most "
        f"{most} of them are simulated; each takes about half a minute of a core.")  # fmt: skip
    with Progress(console, 0, most, "simulate") as progress, Simulations(task, chosen["processes"]) as simulate:

        def shown(done: Sequence[Simulated]) -> None:
            fitting = [one for one in done if one.fits]
            best = min(fitting, key=lambda one: one.seconds, default=None)
            progress.update(len(done), f"best: {best.choice}, {1e3 * best.seconds:,.0f} ms" if best else "none fits")

        result = layout_search.search(
            found, estimator_of(task, shape, config), simulate, limit, chosen["simulations"], shown
        )
    view = SearchView(options, cluster, spread, model.words, batch, result, left_out)
    if into is None:
        return view, []
    if view.best.choice.system == "strands":
        say(console, "Making the plan of the best one.")
    else:
        say(console, "No plan.json: the best way has XLA's order, and the command carries it out.")
    return view, search_files.write(into, view, headline(view), task.options_of(view.best.choice), model)


def _systems(chosen: Mapping[str, Any], given: frozenset[str]) -> tuple[str, ...]:
    """The systems to choose from. Raises DhelixError for those that cannot be searched."""
    names = tuple(chosen["systems"]) if "systems" in given else tuple(PIPELINES)
    for name in names:
        if name not in PIPELINES:
            raise DhelixError(f"--search compares {' and '.join(PIPELINES)}, not {name!r}; leave {name} out")
    return names


def _fixed(chosen: Mapping[str, Any], given: frozenset[str]) -> dict[str, int | str]:
    """What the flags leave no choice about."""
    found: dict[str, int | str] = {}
    for part in filter(None, chosen["mesh"].split(",")):
        name, _, size = part.partition("=")
        if name not in ("dp", "ep", "cp", "tp") or not size.isdecimal() or int(size) < 1:
            raise DhelixError(f"--mesh {chosen['mesh']}: give sizes of axes, such as tp=8; the others are searched")
        found[name] = int(size)
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


def estimator_of(task: Task, shape: ModelShape, config: DecoderConfig) -> Estimator:
    """The estimator of a model on the cluster."""
    hardware, model = task.cluster.hardware, task.model()
    section = model.profile.section(model.setting)
    links = Links.of(hardware)
    times = MeasuredTimes(section.collectives, hardware, links) if section.collectives else LinkTimes(links)
    return Estimator(
        shape, compute_of(hardware, shape.sizes), hardware.gpus_per_node, times, hardware.intra_bandwidth,
        hardware.inter_bandwidth, hardware.kernel_seconds, Overlap().on(hardware, section),
    )  # fmt: skip


class Simulations(contextlib.AbstractContextManager["Simulations"]):
    """Simulates choices in processes of their own, which also keeps a crash of the compiler from ending the search."""

    def __init__(self, task: Task, processes: int | None) -> None:
        self.task, self.processes = task, processes or os.cpu_count() or 1
        self._pool = self._started()

    def _started(self) -> concurrent.futures.ProcessPoolExecutor:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU of this machine has nothing to do
        return _pool(self.processes)

    def __call__(self, chosen: Sequence[Choice]) -> Iterator[SimulatedStep | str]:
        tasks = [self._pool.submit(simulated, self.task, choice) for choice in chosen]
        results = [self._result(task.result) for task in tasks]
        if None in results:  # the compiler crashed, and with it what else was at work
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._started()
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
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(processes, spawn, initializer=_silence)


def _silence() -> None:
    """Drops what libraries write to stderr: XLA warns of each choice that needs much memory. Errors come as results."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def simulated(task: Task, choice: Choice) -> SimulatedStep | str:
    """The simulated step of a choice, or the reason why there is none."""
    deviceless.prepare_environment()
    logging.set_verbosity(logging.ERROR)  # the tables say which times are guesses
    options = task.options_of(choice)
    try:
        layout = programs.layout_of(options, task.cluster)
        training, batch = programs.training_of(options, layout)
        (step,) = programs.simulated(training, batch, systems.chosen([choice.system]), task.model(), layout.cluster)
    except DhelixError as error:
        return str(error)
    return step
