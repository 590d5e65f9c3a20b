"""What `run.py` compares: train steps of one model and batch on the same GPUs, as pipelines and without one.

A pipeline is a schedule (`passes.pipeline_fold`), who computes embedding and head, and who orders instructions.
Baselines are what a user has without strands: 1F1B, interleaved 1F1B with two chunks on a stage or four, DualPipeV and
steps without a pipeline, all in XLA's order, under every launch setting that ours run under. DualPipeV co-executes,
too; in an order of ours it is ours. W and interleaved SI are ours in any order.

    own ends       embedding and head by the stage of the first and of the last chunk: only a stage's own work
    shared ends    each stage has its share of the vocabulary, and all compute it together

1F1B and the others run as they are defined with own ends. They are compared with shared ends, too, and the faster one
counts: own ends keep the other stages waiting, and are held, and their gradients summed, by all; shared ends join all
stages, which costs 1F1B a forward that waits for a backward each time, and the others little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optax

from dhelix.benchmarks.strands.variants import OURS, XLA, Setting
from dhelix.launch.train.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.models import LlamaConfig, Training, make_mesh, make_train_step
from dhelix.passes.framework.manager import Stage
from dhelix.passes.pipeline_fold import LOCKSTEP
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes


@dataclass(frozen=True)
class Variant:
    """One train step.

    Attributes:
      schedule: of the pipeline, one of `passes.pipeline_fold.SCHEDULES`; "": no pipeline.
      chunks: on each stage, of interleaved schedules.
      order: who orders instructions: "xla", or a schedule of `strand_interleave`.
      shared_ends: see above; of pipelines.
      sharding: "shard_map", or "auto" for XLA's partitioner.
      dp: data parallelism in place of tensor parallelism; without a pipeline.
      sends_beside: of `Fold`.
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
        """Whether its program has loops of known rounds alone."""
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
"""CUDA graphs hold no loops whose rounds are known at run time only, and profiles are of launches without them."""


def training_of(
    variant: Variant, config: LlamaConfig, stages: int, tp: int, microbatches: int, devices: Any, dp: int = 1
) -> Training:
    """The train step on stages x dp x tp GPUs. A step without a pipeline has all of them for tp, or for its own dp.

    Args:
      microbatches: rows of the batch by dp; without a pipeline they are fewer where there is data parallelism.
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
    """For `strand_interleave`: those that make the variant, with the costs of the setting."""
    model = setting.costs()
    order = StepOptions(schedule=variant.order)  # pyright: ignore[reportArgumentType]
    passes = () if variant.kind == XLA else default_passes(order, model=model, hardware=setting.hardware)
    if not isinstance(training, PipelinedTraining):
        return {"passes": passes}
    passes = [one for one in passes if one.stage is not Stage.LOWERED]  # as the decorator does: the strands are there
    return {"passes": passes, "pipeline": training.fold, "microbatches": training.microbatches}
