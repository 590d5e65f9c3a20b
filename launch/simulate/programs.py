"""The train step of `dhelix simulate` on the GPUs of a cluster, in each way to run it.

    layout = layout_of(options, cluster)                      # the mesh, and as many nodes as it needs
    training, batch = training_of(options, layout)
    for step in simulated(training, batch, systems, model, layout.cluster): ...

`runtime/planning/simulation.py` compiles and simulates it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.launch.profile.step import gpus_of_mesh
from dhelix.launch.train import trainer
from dhelix.launch.train.meshes.mesh_axes import mesh_axes
from dhelix.models import Training
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.passes.pipeline_fold import PipelineCosts, evaluate, make_schedule
from dhelix.passes.pipeline_fold import layout_of as schedule_layout
from dhelix.passes.simulation import systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work
from dhelix.passes.simulation.systems import System
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.planning import simulation

_FORWARD, _BACKWARD = 1, 2  # times of a layer, relative to each other


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


def target_of(cluster: Cluster) -> str:
    """The name of the cluster's GPU for the compiler. Raises DhelixError if dhelix cannot compile for it."""
    if cluster.gpu.lower() not in deviceless.targets():
        known = ", ".join(target.upper() for target in deviceless.targets())
        raise DhelixError(f"dhelix cannot compile for {cluster.gpu}; use a cluster of {known}")
    return cluster.gpu.lower()


def training_of(options: trainer.Options, layout: Layout, config: DecoderConfig | None = None) -> tuple[Training, int]:
    """The plain train step on the GPUs of the layout, and its batch size in sequences.

    Args:
      config: the model; None: as the options say.

    Raises:
      DhelixError: dhelix cannot compile for the cluster's GPU, or the options contradict each other.
    """
    devices = deviceless.topology(target_of(layout.cluster), layout.shape).devices
    mesh = ",".join(f"{name}={size}" for name, size in layout.axes.items() if size > 1) or "dp=1,tp=1"
    config = config or trainer.configuration(options)
    return trainer.make_training(dataclasses.replace(options, mesh=mesh), config, devices)


def simulated(
    training: Training, batch: int, compared: Sequence[System], model: ClusterCosts, cluster: Cluster
) -> Iterator[SimulatedStep]:
    """Simulates a step in each way to run it.

    Args:
      training, batch: as `training_of` returns them.
      model: costs of the cluster.
    """
    step, tokens = trainer.make_step(training, plain=False), batch * training.config.seq
    flops = float(tokens * training.config.flops_per_token())
    work = Work(tokens, flops, cluster.gpus, cluster.hardware.peak_flops)
    arguments = training.abstract_state(), training.abstract_batch(batch)
    yield from simulation.simulated(step, arguments, compared, model, cluster, work)


def simulated_options(
    options: trainer.Options, cluster: Cluster, system: str, model: ClusterCosts, config: DecoderConfig | None = None
) -> SimulatedStep:
    """Simulates one step in one way to run it, on as many nodes of the cluster as it needs.

    Raises:
      DhelixError: as `layout_of` and `training_of`, or a pass cannot run at all.
    """
    deviceless.prepare_environment()
    layout = layout_of(options, cluster)
    training, batch = training_of(options, layout, config)
    (step,) = simulated(training, batch, systems.chosen([system]), model, layout.cluster)
    return step


def bubble_of(options: trainer.Options) -> float:
    """Idle time over ideal time of the step's pipeline, if all layers take equally long; 0 without a pipeline.

    Embedding and head are left out. With `1f1b`, `interleaved` and `dualpipev`, the stage that computes the head works
    longer, and the others wait for it.
    """
    if options.pp == 1:
        return 0.0
    name, layers = options.pipeline or "w", trainer.configuration(options).layers
    layout = schedule_layout(name, layers, options.pp, options.chunks_per_stage or 2)
    schedule = make_schedule(name, layout, options.microbatches)
    return float(evaluate(schedule, PipelineCosts(_FORWARD, _BACKWARD)).bubble_fraction)
