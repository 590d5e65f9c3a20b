"""The train steps that `run.py` compares: one model and batch on the same GPUs, as pipelines and without a pipeline.

A pipeline variant has a schedule (`passes.pipeline_fold`), owners of embedding and head, and an order of instructions.
The baselines do not need dhelix's strands: 1F1B, interleaved 1F1B with two or four chunks per stage, DualPipeV, and
steps without a pipeline. They run in XLA's order, under every launch setting that dhelix's variants run under.
DualPipeV also runs a forward and a backward together. In an order made by dhelix, it counts as dhelix's. W and
interleaved SI count as dhelix's in any order. *Ends* are the embedding and the head:

    own ends       the stage of the first chunk computes the embedding, the stage of the last chunk the head
    shared ends    each stage holds a part of the vocabulary, and all stages compute the ends together

The literature defines 1F1B and the other baselines with own ends. They also run with shared ends, and the faster form
counts. With own ends, the other stages wait, and all stages store the ends and sum their gradients. With shared ends,
all stages must compute an end at the same time. In 1F1B, a forward then waits for a backward each time. The other
schedules lose little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optax

from dhelix.benchmarks.strands.variants import OURS, XLA, Setting
from dhelix.launch.train.meshes.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.models import Training, make_mesh, make_train_step
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.passes.framework.manager import Stage
from dhelix.passes.pipeline_fold import LOCKSTEP
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes


@dataclass(frozen=True)
class Variant:
    """One train step.

    Attributes:
      schedule: the pipeline's schedule, one of `passes.pipeline_fold.SCHEDULES`; "": no pipeline.
      order: scheduler of the instructions: "xla", or a schedule of `strand_interleave`.
      shared_ends: whether all stages share embedding and head; for pipelines only.
      sharding: "shard_map", or "auto" for XLA's partitioner; without a pipeline only.
      dp: data parallelism instead of tensor parallelism; without a pipeline only.
      sends_beside: whether messages overlap with compute, as in `Fold`.
      chunks: chunks per stage of interleaved schedules.
    """

    name: str
    schedule: str = ""
    order: str = "xla"
    shared_ends: bool = False
    sharding: Any = "shard_map"
    dp: int = 1
    sends_beside: bool = False
    chunks: int = 2

    @property
    def kind(self) -> str:
        return OURS if self.lockstep or self.order != "xla" else XLA

    @property
    def pipelined(self) -> bool:
        return bool(self.schedule)

    @property
    def lockstep(self) -> bool:
        """Whether all loops of the program have known trip counts."""
        return self.schedule in LOCKSTEP


SI = "interleaved_si"

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("W, xla", "w", shared_ends=True),
        Variant("W, list", "w", "list", shared_ends=True),
        Variant("W, dp", "w", "dp", shared_ends=True),
        Variant("W, sends beside, dp", "w", "dp", shared_ends=True, sends_beside=True),
        Variant("W, own ends, xla", "w"),
        Variant("W, own ends, dp", "w", "dp"),
        Variant("SI, xla", SI, shared_ends=True),
        Variant("SI, dp", SI, "dp", shared_ends=True),
        Variant("SI, own ends, dp", SI, "dp"),
        Variant("SI 4, xla", SI, shared_ends=True, chunks=4),
        Variant("SI 4, dp", SI, "dp", shared_ends=True, chunks=4),
        Variant("SI 4, own ends, dp", SI, "dp", chunks=4),
        Variant("1F1B", "1f1b"),
        Variant("1F1B, shared ends", "1f1b", shared_ends=True),
        Variant("interleaved", "interleaved"),
        Variant("interleaved, shared ends", "interleaved", shared_ends=True),
        Variant("interleaved 4", "interleaved", chunks=4),
        Variant("interleaved 4, shared ends", "interleaved", shared_ends=True, chunks=4),
        Variant("interleaved, shared ends, dp", "interleaved", "dp", shared_ends=True),
        Variant("DualPipeV", "dualpipev"),
        Variant("DualPipeV, shared ends", "dualpipev", shared_ends=True),
        Variant("DualPipeV, dp", "dualpipev", "dp"),
        Variant("DualPipeV, shared ends, dp", "dualpipev", "dp", shared_ends=True),
        Variant("no pipeline"),
        Variant("no pipeline, GSPMD", sharding="auto"),
        Variant("no pipeline, DP 2, GSPMD", sharding="auto", dp=2),
        Variant("no pipeline, strands, dp", order="dp"),
    )
}

ESSENTIAL = (
    "SI 4, dp; SI, dp; W, dp; SI, own ends, dp; W, own ends, dp; SI 4, xla; W, xla; 1F1B; 1F1B, shared ends; "
    "interleaved; interleaved, shared ends; interleaved 4; interleaved 4, shared ends; DualPipeV; "
    "DualPipeV, shared ends; DualPipeV, dp; no pipeline; no pipeline, GSPMD; no pipeline, DP 2, GSPMD"
)

NO_GRAPHS: Mapping[str, Any] = {"xla_gpu_enable_command_buffer": ""}
"""No CUDA graphs: they cannot hold loops whose trip count XLA does not know, and profiles were measured without."""


def training_of(
    variant: Variant, config: DecoderConfig, stages: int, tp: int, microbatches: int, devices: Any, dp: int = 1
) -> Training:
    """The train step on stages x dp x tp GPUs. Without a pipeline, it has the variant's dp, and tp takes the rest.

    Args:
      microbatches: sequences of the batch per data-parallel group of a pipeline. A step without a pipeline has
        `microbatches / variant.dp` micro-batches.
    """
    optimizer = optax.adamw(1e-4)
    if variant.pipelined:
        mesh = make_mesh(dp, tp, devices, pp=stages)
        return make_pipelined_step(
            config,
            mesh,
            optimizer,
            microbatches,
            variant.schedule,
            variant.chunks,
            shared_ends=variant.shared_ends,
            sends_beside=variant.sends_beside,
        )
    mesh = make_mesh(variant.dp, stages * tp // variant.dp, devices)
    return make_train_step(config, mesh, optimizer, microbatches // variant.dp, variant.sharding)


def options_of(variant: Variant, training: Training, setting: Setting) -> dict[str, Any]:
    """The options of `strand_interleave` for the variant, with the costs of the setting."""
    model = setting.costs()
    order = StepOptions(schedule=variant.order)  # pyright: ignore[reportArgumentType]
    passes = () if variant.kind == XLA else default_passes(order, model=model, hardware=setting.hardware)
    if not isinstance(training, PipelinedTraining):
        return {"passes": passes}
    passes = [one for one in passes if one.stage is not Stage.LOWERED]  # the pipeline's schedule makes the strands
    return {"passes": passes, "pipeline": training.fold, "microbatches": training.microbatches}
