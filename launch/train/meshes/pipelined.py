"""A train step whose layers form a pipeline: `models.train_step` with gradients from the pipeline.

    training = make_pipelined_step(preset("llama-8b"), make_mesh(dp, tp, pp=4), optimizer, microbatches=16)
    step = strand_interleave(training.train_step, microbatches=16, pipeline=training.fold, donate_argnums=0)
    state = training.init(jax.random.key(0))
    state, metrics = step(state, batch)

The model's code does not change. Each device holds the layers of its stage's chunks, as arrays [chunks of the stage,
layers of a chunk, ...]. The optimizer works on this folded state (`runtime.pipeline.folded_state`). Checkpoints hold
layers in the model's own order, so a run may resume with another number of stages.

Embedding and head are the *ends* of the model. Stages either share the ends, or hold ends of their own:

    embedding, head    split over    computed by                                          default for
    shared ends        tp and pp     all stages, each its part of the vocabulary          lockstep with "shard_map"
    own ends           tp            only the stage of the first or of the last chunk     other schedules; "auto"

Shared ends give all stages equal work, but all stages must compute an end together. This slows 1F1B down, because some
of its stages go forward while others go backward (docs/design/pipelines.md). Own ends are stored on every stage,
because all stages run one program.

With `sharding="shard_map"`, one `shard_map` covers all axes. `value_and_grad` returns the gradients of the
device's own work. Once per step, the gradients of a parameter are summed over the axes over which the parameter is
replicated.

With `sharding="auto"`, `value_and_grad` makes a `shard_map` over pp alone. Inside this `shard_map`, XLA's partitioner
inserts the collectives of dp and tp. So gradients are summed over dp in each layer of each micro-batch.

Model folding is described in DHelix section 4.1 (arXiv 2411.15871).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.launch.train.meshes.sharded import ShardedTraining
from dhelix.models.common.context_parallel import Exchange
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.mesh import on_mesh
from dhelix.models.common.parallel import AutoParallel, Parallel
from dhelix.models.common.training import Batch, Gradients, Metrics, Params, assemble, check_mesh
from dhelix.models.families import Family, family_of
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.train_step import (
    Sharding,
    check_sharding,
    manual_parallel,
    objective_of,
    over_mesh,
)
from dhelix.passes.pipeline_fold import LOCKSTEP, Layout
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.pipeline.folded_state import Move
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad

AXIS = "pp"


@dataclasses.dataclass(frozen=True)
class PipelinedTraining(ShardedTraining):
    """A `Training` whose `train_step` must run in `strand_interleave(microbatches=..., pipeline=fold)`.

    Its state is folded: layers are stored by stage and chunk. A step without a pipeline cannot use a folded state.
    """

    fold: Fold = dataclasses.field(kw_only=True)


def make_pipelined_step(
    config: DecoderConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    schedule: str = "w",
    chunks_per_stage: int = 2,
    sharding: Sharding = "shard_map",
    shared_ends: bool | None = None,
    sends_beside: bool = False,
    context: Exchange = "ring",
) -> PipelinedTraining:
    """A train step of `config` over `mesh`, which has the axes `pp`, `dp` and `tp`, and may have `ep` and `cp`.

    Args:
      optimizer: must keep zero padding at zero. Optimizers that work element by element or with norms do so
        (`folded_state`).
      schedule: schedule of the pipeline; it decides which layers are on which stage (see `Fold`).
      chunks_per_stage, sends_beside: see `Fold`.
      sharding: whether collectives are written by hand ("shard_map") or made by XLA's partitioner ("auto").
      shared_ends: whether embedding and head are also split over `pp`. Default: yes for lockstep schedules ("w",
        "interleaved_si") with "shard_map", else no.
      context: how devices of a `cp` group exchange keys and values.

    Raises:
      ValueError: the model does not divide over the mesh, its layers are not stacked, or layers with experts do not
        divide into chunks.
      DhelixError: there are fewer layers than chunks, the schedule is unknown, or `sharding` is neither "shard_map" nor
        "auto". "auto" is also refused with shared ends and with cuDNN's attention.
    """
    shared = _shares_ends(schedule, sharding, shared_ends)
    ends = ("tp", AXIS) if shared else ("tp",)
    check_mesh(config, mesh, microbatches, needed=(AXIS, "dp", "tp"), ends=ends)
    check_sharding(config, mesh, sharding, instead="'shard_map'")
    fold = Fold(mesh.shape[AXIS], config.layers, schedule, chunks_per_stage, AXIS, mesh, sends_beside)
    layout = fold.layout(config.layers)
    if isinstance(config, MoeConfig):
        config.check_chunks(layout.chunks)
    config = dataclasses.replace(config, attention=_attention(config, mesh, sharding))
    family = family_of(config)
    specs = on_mesh(family.param_specs(config, AXIS, shared), mesh)
    by_hand = sharding != "auto"
    ends_of = AXIS if shared else None
    parallel = manual_parallel(config, mesh, specs, context, ends_of) if by_hand else AutoParallel(mesh)
    gradients = _gradients(family, config, parallel)
    gradients = over_mesh(gradients, config, mesh, specs) if by_hand else gradients
    initial = _initial(family, config, mesh, layout)
    training = assemble(config, mesh, microbatches, optimizer, gradients, specs, initial, ends)
    orders = {"to_model_order": fold.unfold, "from_model_order": fold.fold}
    return PipelinedTraining(**{**vars(training), **orders}, fold=fold)


def _shares_ends(schedule: str, sharding: str, asked: bool | None) -> bool:
    if sharding not in ("shard_map", "auto"):
        raise DhelixError(f"sharding={sharding!r} does not work in a pipeline; use 'shard_map' or 'auto'")
    if sharding == "auto" and asked:
        raise DhelixError(
            "shared_ends=True needs sharding='shard_map', because the model's code shares the vocabulary between stages"
        )
    return schedule in LOCKSTEP and sharding == "shard_map" if asked is None else asked


def _attention(config: DecoderConfig, mesh: Mesh, sharding: str) -> Literal["xla", "cudnn"]:
    """The implementation of attention. With `sharding="auto"`, it is XLA's.

    JAX cannot partition cuDNN's attention (`custom_partitioning`) if one mesh axis is manual and other axes are not.
    """
    if sharding == "auto" and config.attention == "cudnn":
        raise DhelixError("attention='cudnn' in a pipeline needs sharding='shard_map'; use that, or attention='xla'")
    return "xla" if sharding == "auto" else resolve_attention(config, mesh.devices.flat[0].platform)


def _gradients(family: Family, config: DecoderConfig, parallel: Parallel) -> Gradients:
    """A function that computes loss, gradients and metrics of all micro-batches in the pipeline."""
    objective = objective_of(family, config, parallel)

    def loss_of(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        return objective(family.trainable(config, params, parallel), batch)

    def whole(params: Params, batch: Batch) -> tuple[jax.Array, Params, Metrics]:
        (_, metrics), gradients = value_and_grad(loss_of, has_aux=True)(params, batch)
        return metrics.pop("loss"), gradients, metrics

    return whole


def _initial(family: Family, config: DecoderConfig, mesh: Mesh, layout: Layout) -> Callable[[jax.Array], Params]:
    """A function that makes the initial parameters in folded form. They have the same values as without a pipeline."""
    move = Move(layout, mesh, AXIS, fold=True)
    specs = on_mesh(family.param_specs(config)["layers"], mesh)

    def initial(key: jax.Array) -> Params:
        params = family.init_params(config, key)
        layers = {name: move.array(stack, PartitionSpec(*specs[name][1:])) for name, stack in params["layers"].items()}
        return params | {"layers": layers}

    return initial
