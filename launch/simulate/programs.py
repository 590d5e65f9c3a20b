"""Compiles a step for a cluster that need not exist, in each way to run it.

    layout = layout_of(options, cluster)                      # the mesh, and as many nodes as it needs
    program = compiled(options, layout, SYSTEMS["strands"], model)
    program.module, program.memory, program.notes

The program is compiled for all GPUs of the mesh, as on a cluster. XLA's compile time hardly depends on their number.
Passes are those of the decorator, with the costs of the cluster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.profile.step import gpus_of_mesh
from dhelix.launch.train import trainer
from dhelix.launch.train.mesh_axes import mesh_axes
from dhelix.launch.train.pipelined import PipelinedTraining
from dhelix.models import Training
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework.manager import Pass, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, Report
from dhelix.passes.hlo import HloModule
from dhelix.passes.simulation import systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts
from dhelix.passes.simulation.megatron_order import MegatronOrder
from dhelix.passes.simulation.round_robin import RoundRobin
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work
from dhelix.passes.simulation.systems import System
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes

_SCHEDULES: dict[str, Literal["dp", "intra_batch"]] = {"intra-batch": "intra_batch", "wavelet": "dp", "strands": "dp"}


@dataclass(frozen=True)
class Layout:
    """Where the GPUs of a step are.

    Attributes:
      axes: sizes of the mesh axes, without `pp`.
      cluster: the cluster, with as many nodes as the step uses.
      shape: slices x hosts x GPUs, for the compiler.
    """

    axes: dict[str, int]
    cluster: Cluster
    shape: str


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
      module: the scheduled module.
      memory: what it needs on a GPU.
      notes: passes that did not run, and why.
    """

    module: HloModule
    memory: dumps.Memory
    notes: tuple[str, ...] = ()


def layout_of(options: trainer.Options, cluster: Cluster) -> Layout:
    """The mesh of the options on as many nodes of the cluster as it needs. An axis that is not given takes all GPUs.

    Raises:
      DhelixError: the cluster has too few GPUs, or the mesh does not fill its nodes.
    """
    config = trainer.configuration(options)
    experts = config.experts if isinstance(config, MoeConfig) else 0
    needed = options.pp * (gpus_of_mesh(options.mesh) or 1)
    if needed > cluster.gpus:
        nodes = math.ceil(needed / cluster.gpus_per_node)
        raise DhelixError(
            f"--mesh {options.mesh}{f' with --pp {options.pp}' if options.pp > 1 else ''} needs {needed} GPUs, but "
            f"{cluster.name} has {cluster.gpus}; give --nodes {nodes}, or a smaller mesh"
        )
    axes = mesh_axes(options.mesh, cluster.gpus, config.kv_heads, options.pp, experts)
    gpus = options.pp * math.prod(axes.values())
    per_node = min(gpus, cluster.gpus_per_node)
    if gpus % per_node:
        raise DhelixError(f"{gpus} GPUs do not fill nodes of {per_node}; change --mesh, or gpus_per_node in a file")
    return Layout(axes, cluster.with_nodes(gpus // per_node), f"1x{gpus // per_node}x{per_node}")


def training_of(options: trainer.Options, layout: Layout, config: DecoderConfig | None = None) -> tuple[Training, int]:
    """The plain train step on the GPUs of the layout, and its batch size in sequences.

    Args:
      config: the model; None: as the options say.

    Raises:
      DhelixError: dhelix cannot compile for the cluster's GPU, or the options contradict each other.
    """
    gpu = layout.cluster.gpu
    if gpu.lower() not in deviceless.targets():
        known = ", ".join(target.upper() for target in deviceless.targets())
        raise DhelixError(f"dhelix cannot compile for {gpu}; use a cluster of {known}")
    devices = deviceless.topology(gpu.lower(), layout.shape).devices
    mesh = ",".join(f"{name}={size}" for name, size in layout.axes.items() if size > 1) or "dp=1,tp=1"
    config = config or trainer.configuration(options)
    return trainer.make_training(dataclasses.replace(options, mesh=mesh), config, devices)


def compiled(training: Training, batch: int, system: System, model: CostModel) -> CompiledStep:
    """The step as `system` runs it.

    Args:
      training, batch: as `training_of` returns them.
      model: costs of the cluster, with which orders are searched.

    Raises:
      DhelixError: a pass cannot run at all.
    """
    passes = () if system.plain else _passes(system, model, isinstance(training, PipelinedTraining))
    step = trainer.make_step(training, system.plain, StepOptions(passes=passes) if passes else None)
    example = training.abstract_state(), training.abstract_batch(batch)
    found = deviceless.compile(step.lower(*example))
    memory = dumps.memory_of(found)
    assert memory is not None  # the GPU compiler always says how much memory a step needs
    return CompiledStep(compiled_module(found), memory, _notes(step.outcomes(*example)) if passes else ())


def _passes(system: System, model: CostModel, pipelined: bool) -> tuple[Pass, ...]:
    if system.name == "megatron":
        return (MegatronOrder(model.hardware, model=model),)
    options = StepOptions(schedule=_SCHEDULES[system.name])
    passes = default_passes(options, model=model, hardware=model.hardware)
    if system.name == "wavelet":
        passes = (*(one for one in passes if one.stage is Stage.LOWERED), RoundRobin(model.hardware, model=model))
    return tuple(one for one in passes if not pipelined or one.stage is not Stage.LOWERED)


def _notes(report: Report) -> tuple[str, ...]:
    """One sentence for each pass that wanted to change the step and did not."""
    failed = (one for one in report if one.outcome not in (CHANGED, UNCHANGED))
    return tuple(f"{one.name}: {'; '.join(one.summary)}" for one in failed)


def simulated(
    training: Training, batch: int, compared: Sequence[System], model: ClusterCosts, cluster: Cluster
) -> Iterator[SimulatedStep]:
    """Simulates a step in each way to run it. Ways that compile the plain step share one compilation.

    Args:
      training, batch: as `training_of` returns them.
      model: costs of the cluster.
    """
    plain = None
    work = work_of(training, batch, cluster)
    for system in compared:
        if system.plain:
            plain = program = plain or compiled(training, batch, system, model)
        else:
            program = compiled(training, batch, system, model)
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
