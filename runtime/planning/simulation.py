"""Simulates a train step on a cluster that need not exist, in several ways to run it.

    mesh = dhelix.deviceless.mesh({"dp": 8, "tp": 8}, "h100")     # the arguments are shapes over this mesh
    found = dhelix.simulate(train_step, state, batch, cluster="h100-infiniband")
    print(found)
    found.fastest.seconds, found.fastest.memory, found.fastest.parts.exposed

The step is compiled for all GPUs of the mesh of its arguments. XLA's compile time hardly depends on their number. The
passes are those of the decorator, with the costs of the cluster (`passes/simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import Pass, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, Report
from dhelix.passes.framework.units import milliseconds
from dhelix.passes.hlo import HloModule
from dhelix.passes.sharding.planner import in_words
from dhelix.passes.simulation import systems as known_systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.megatron_order import MegatronOrder
from dhelix.passes.simulation.round_robin import RoundRobin
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work, fastest, gains
from dhelix.passes.simulation.systems import System
from dhelix.profiles.clusters import cluster_file, known
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.hardware import gpu_name
from dhelix.runtime.compiler import deviceless, kernel_cache, memory_need, registration
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.planning.step_sizes import mesh_of_arguments
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes
from dhelix.runtime.step.strand_interleave import interleaved

_SCHEDULES: dict[str, Literal["dp", "intra_batch"]] = {"intra-batch": "intra_batch", "wavelet": "dp", "strands": "dp"}

_INSTEAD = "which @strand_interleave would run instead; its report says why"


@dataclass(frozen=True)
class CompiledStep:
    """A step that was compiled in one way to run it.

    Attributes:
      module: the scheduled module.
      memory: bytes that it needs on a GPU.
      notes: passes that did not run, and why.
    """

    module: HloModule
    memory: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Simulation:
    """A step in several ways to run it, on one cluster.

    Attributes:
      name: name of the step.
      cluster: the cluster, with as many nodes as the step uses.
      source: where measured times come from, in words.
      steps: a simulated step for each system.
    """

    name: str
    cluster: Cluster
    source: str
    steps: tuple[SimulatedStep, ...]

    @property
    def fastest(self) -> SimulatedStep:
        """`simulated_step.fastest` of the steps."""
        return fastest(self.steps)

    def __str__(self) -> str:
        best, gain = self.fastest, gains(self.steps)
        rows = [
            f"  {one.system}: {milliseconds(one.seconds)}, {milliseconds(one.parts.exposed)} of it exposed "
            f"communication, {one.mfu:.1%} of the peak, {in_words(one.memory)}"
            f"{f', {in_words(one.missing)} too much' if one.missing else ''}"
            f"{f'; compute waits for {one.waits}' if one.waits else ''}"
            for one in self.steps
        ]
        notes = [f"  {one.system}: {note}" for one in self.steps for note in one.notes]
        return "\n".join([
            f"{self.name} on {self.cluster.words()}: {best.system} takes {milliseconds(best.seconds)} a step"
            f"{f'; {gain}' if gain else ''}. {best.certainty}",
            *rows,
            *notes,
            f"  times: {self.source}; and constants of the cluster",
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, in seconds and bytes."""
        constants = [{"name": one.name, "value": one.value, "source": one.source} for one in self.cluster.origins()]
        return {
            "step": self.name,
            "cluster": self.cluster.name,
            "gpus": self.cluster.gpus,
            "constants": constants,
            "measured_times": self.source,
            "steps": [one.to_json() for one in self.steps],
        }


def simulate(
    step: Callable[..., Any],
    *args: Any,
    cluster: str | Mapping[str, Any] | Cluster = "h100-infiniband",
    systems: Sequence[str] = ("blocking", "xla", "strands"),
    constants: Mapping[str, float] | None = None,
    slowest_gpu: float = 1.0,
    slowest_link: float = 1.0,
    setting: str = "default",
    model_flops: float = 0.0,
    tokens: int = 0,
) -> Simulation:
    """Simulates a train step on a cluster that need not exist. Nothing runs, and no GPU is needed.

    Args:
      step: the step: a function, the result of `jax.jit`, or of `strand_interleave`.
      *args: its arguments: `jax.ShapeDtypeStruct`s with shardings over `dhelix.deviceless.mesh(...)`.
      cluster: a name, a JSON file, the values of such a file, or a cluster. It gets as many nodes as the mesh fills.
        docs/guide/simulate.md says what there is.
      systems: ways to run the step, of `dhelix.passes.simulation.systems.SYSTEMS`.
      constants: constants of the cluster by name, instead of its own.
      slowest_gpu, slowest_link: how many times longer the slowest GPU computes, and a collective takes until its
        slowest part has arrived.
      setting: launch setting whose measured times are used.
      model_flops: floating-point operations of the model in a step, for MFU; default: what the program computes, with
        what it computes again for rematerialization.
      tokens: tokens of a step, for tokens per second.

    Raises:
      DhelixError: the arguments are not on GPUs, the cluster has other or fewer GPUs, or a system is unknown.
    """
    chosen = known_systems.chosen(list(systems))
    if not chosen:
        raise DhelixError(f"systems is empty; give some of {', '.join(known_systems.SYSTEMS)}")
    decorated = step if isinstance(step, InterleavedStep) else interleaved(step, StepOptions())
    described = _described(cluster).with_constants(dict(constants or {}), "constants=")
    of_step = _filled(described, args)
    model = ClusterCosts.of(of_step, setting, Spread(slowest_gpu, slowest_link))
    work = Work(tokens, model_flops, of_step.gpus, of_step.hardware.peak_flops)
    steps = tuple(simulated(decorated, args, chosen, model, of_step, work))
    if model_flops and max(one.mfu for one in steps) > 1.0:
        raise DhelixError(
            f"model_flops={model_flops:g} would be more than {of_step.gpus} GPUs can compute in a step; give the "
            "operations of one step, forward and backward"
        )
    return Simulation(str(getattr(step, "__name__", "step")), of_step, model.words, steps)


def _described(cluster: str | Mapping[str, Any] | Cluster) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    return known.find(cluster) if isinstance(cluster, str) else cluster_file.of_json(dict(cluster), "cluster=")


def _filled(cluster: Cluster, args: Sequence[Any]) -> Cluster:
    """The cluster with as many nodes as the devices of the arguments fill."""
    devices = mesh_of_arguments(args).devices.flat
    gpus, kind = len(devices), gpu_name(devices[0].device_kind)
    if devices[0].platform not in ("gpu", "cuda"):
        raise DhelixError(
            "the step's arguments are not on GPUs; give jax.ShapeDtypeStructs with shardings over a mesh of GPUs such "
            'as dhelix.deviceless.mesh({"dp": 8}, "h100")'
        )
    if kind != cluster.gpu:
        raise DhelixError(
            f"the arguments are on {kind}s, but {cluster.name} has {cluster.gpu}s; make the mesh with "
            f"dhelix.deviceless.mesh(..., {cluster.gpu.lower()!r}), or give another cluster"
        )
    per_node = cluster.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise DhelixError(f"{gpus} GPUs do not fill nodes of {per_node}; change the mesh, or gpus_per_node in a file")
    nodes = math.ceil(gpus / per_node)
    if nodes > cluster.nodes:
        raise DhelixError(
            f"the mesh has {gpus} GPUs, but {cluster.name} has {cluster.gpus}; give a larger cluster (with_nodes, or "
            "nodes in a file)"
        )
    return cluster.with_nodes(nodes)


def simulated(
    step: InterleavedStep,
    args: Sequence[Any],
    compared: Sequence[System],
    model: ClusterCosts,
    cluster: Cluster,
    work: Work,
) -> Iterator[SimulatedStep]:
    """Simulates a step in each way to run it. Ways that compile the plain step share one compilation.

    Args:
      args: the step's arguments, as shapes.
      model: costs of the cluster.
      work: what a step computes; operations of 0 stand for those of the program.
    """
    plain, in_xlas_order = None, math.inf
    for system in compared:
        if system.plain:
            plain = program = plain or compiled(step, args, system, model)
        else:
            program = compiled(step, args, system, model)
        costs = model.costs()
        played = simulate_module(program.module, costs.hardware, costs)
        parts = step_parts(program.module, costs, program.memory, played)
        if system.name == "blocking":
            peers = costs.in_step.wait * sum(one.count for one in played.collectives)
            parts = known_systems.blocking(parts, peers)
        counted = work if work.flops else Work(work.tokens, parts.flops * work.gpus, work.gpus, work.peak)
        notes = program.notes
        if system.name == "xla":
            in_xlas_order = parts.seconds
        elif system.name == "strands" and parts.seconds > in_xlas_order:
            notes = (*notes, f"slower than the plain step, {_INSTEAD}")
        yield SimulatedStep(system.name, parts, program.memory, counted, cluster.hardware.memory_bytes, notes)


def compiled(step: InterleavedStep, args: Sequence[Any], system: System, model: CostModel) -> CompiledStep:
    """The step as `system` runs it.

    Args:
      model: costs of the cluster, with which orders are searched.

    Raises:
      DhelixError: a pass cannot run at all.
    """
    passes = passes_of(system, model, step.options)
    changed = step.but(passes=passes)
    lowered = changed.lower(*args)
    with registration.unpredicted():  # `simulated` predicts the times
        found = deviceless.compile(lowered, **kernel_cache.options(lowered))
    notes = notes_of(changed.outcomes(*args)) if passes else ()
    return CompiledStep(compiled_module(found), memory_need.of_compiled(found).total, notes)


def passes_of(system: System, model: CostModel, given: StepOptions) -> tuple[Pass, ...]:
    """The passes of a way to run a step.

    Args:
      model: costs of the cluster, with which orders are searched.
      given: options of the step. With a pipeline, its executor makes the strands.
    """
    if system.plain:
        return ()
    if system.name == "megatron":
        return (MegatronOrder(model.hardware, model=model),)
    options = StepOptions(schedule=_SCHEDULES[system.name])
    passes = default_passes(options, model=model, hardware=model.hardware)
    if system.name == "wavelet":
        passes = (*(one for one in passes if one.stage is Stage.LOWERED), RoundRobin(model.hardware, model=model))
    return tuple(one for one in passes if given.pipeline is None or one.stage is not Stage.LOWERED)


def notes_of(report: Report) -> tuple[str, ...]:
    """One sentence for each pass that wanted to change the step and did not."""
    failed = (one for one in report if one.outcome not in (CHANGED, UNCHANGED))
    return tuple(f"{one.name}: {'; '.join(one.summary)}" for one in failed)
