"""A train step of Llama whose layers form a pipeline: `models.train_step` with the gradients of a folded model.

    training = make_pipelined_step(preset("llama-8b"), make_mesh(dp, tp, pp=4), optimizer, microbatches=16)
    step = strand_interleave(training.train_step, microbatches=16, pipeline=training.fold, donate_argnums=0)
    state = training.init(jax.random.key(0))
    state, metrics = step(state, batch)

The model file does not change. Each device holds the layers of its stage's chunks, [chunks of the stage, layers of a
chunk, ...]. The optimizer works on the folded state (`runtime.pipeline.folded_state`). Checkpoints hold the model's own
order, so a run may resume with another number of stages.

    embedding, head    split over    computed by                                          default for
    shared ends        tp and pp     all stages, each its part of the vocabulary          lockstep with "shard_map"
    own ends           tp            only the stage of the first or of the last chunk     other schedules; "auto"

Shared ends give all stages equal work, but all stages must compute an end together. This slows 1F1B down, because at
that time some of its stages go forward and others backward (docs/design/pipelines.md). Own ends are stored on every
stage, since all stages run one program.

`sharding="shard_map"`: one `shard_map` over pp, dp and tp. `value_and_grad` returns the gradients of the device's own
work. They are summed once per step, over the axes that a parameter is replicated over.

`sharding="auto"`: `value_and_grad` makes a `shard_map` over pp alone. Inside it, XLA's partitioner inserts the
collectives of dp and tp. So gradients are summed over dp where they arise: in each layer of each micro-batch.

Model folding: DHelix section 4.1 (arXiv 2411.15871).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.models import LlamaConfig, Training, llama
from dhelix.models.layers import resolve_attention
from dhelix.models.parallel import AutoParallel, ManualParallel, Parallel
from dhelix.models.train_step import Gradients, Sharding, assemble, check_mesh, over_mesh, reduce_gradients
from dhelix.passes.pipeline_fold import LOCKSTEP, Layout
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.pipeline.folded_state import Move
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad

AXIS = "pp"


@dataclasses.dataclass(frozen=True)
class PipelinedTraining(Training):
    """A `Training` whose `train_step` must run in `strand_interleave(microbatches=..., pipeline=fold)`.

    A step without a pipeline cannot use the folded state.
    """

    fold: Fold = dataclasses.field(kw_only=True)


def make_pipelined_step(
    config: LlamaConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    schedule: str = "w",
    chunks_per_stage: int = 2,
    sharding: Sharding = "shard_map",
    shared_ends: bool | None = None,
    sends_beside: bool = False,
) -> PipelinedTraining:
    """A train step of `config` over `mesh` (axes `pp`, `dp` and `tp`), with the layers on the stages that `schedule`
    says.

    Args:
      optimizer: works element by element or with norms; `folded_state` says what padding forbids.
      schedule, chunks_per_stage, sends_beside: see `Fold`.
      sharding: whether collectives of dp and tp are written by hand or made by XLA's partitioner.
      shared_ends: whether embedding and head are split over `pp`, too. Default: yes for lockstep schedules ("w",
        "interleaved_si") with "shard_map".

    Raises:
      ValueError: the model does not divide over the mesh, or its layers are not stacked.
      DhelixError: fewer layers than chunks, an unknown schedule, or shared ends or cuDNN's attention with "auto".
    """
    shared = _shares_ends(schedule, sharding, shared_ends)
    ends = ("tp", AXIS) if shared else ("tp",)
    check_mesh(config, mesh, microbatches, (AXIS, "dp", "tp"), ends)
    fold = Fold(mesh.shape[AXIS], config.layers, schedule, chunks_per_stage, AXIS, mesh, sends_beside)
    layout = fold.layout(config.layers)
    config = dataclasses.replace(config, attention=_attention(config, mesh, sharding))
    specs = llama.param_specs(config, AXIS, shared)
    if sharding == "auto":
        gradients_of: Gradients = value_and_grad(_loss(config, AutoParallel(mesh)))
    else:
        gradients_of = _manual_gradients(config, mesh, specs, shared)
    training = assemble(
        config, mesh, microbatches, optimizer, gradients_of, specs, _initial(config, mesh, layout), ends
    )
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


def _attention(config: LlamaConfig, mesh: Mesh, sharding: str) -> Literal["xla", "cudnn"]:
    """JAX does not partition cuDNN's attention (`custom_partitioning`) if one axis is manual and others are not."""
    if sharding == "auto" and config.attention == "cudnn":
        raise DhelixError("attention='cudnn' in a pipeline needs sharding='shard_map'; use that, or attention='xla'")
    return "xla" if sharding == "auto" else resolve_attention(config, mesh.devices.flat[0].platform)


def _loss(config: LlamaConfig, parallel: Parallel) -> Callable[[llama.Params, jax.Array], jax.Array]:
    def loss_of(params: llama.Params, rows: jax.Array) -> jax.Array:
        return llama.loss(config, llama.cast_params(config, params), rows[:, :-1], rows[:, 1:], parallel)

    return loss_of


def _manual_gradients(config: LlamaConfig, mesh: Mesh, specs: llama.Params, shared_ends: bool) -> Gradients:
    """Loss and gradients under `shard_map`. `models.train_step` gives the reason for `check_vma=False`."""
    loss_of = _loss(config, ManualParallel(pipeline=AXIS if shared_ends else None))

    def local(params: llama.Params, rows: jax.Array) -> tuple[jax.Array, llama.Params]:
        loss, gradients = value_and_grad(loss_of)(params, rows)
        return lax.pmean(loss, "dp"), reduce_gradients(gradients, specs, ("tp", AXIS))

    return over_mesh(local, mesh, specs)


def _initial(config: LlamaConfig, mesh: Mesh, layout: Layout) -> Callable[[jax.Array], llama.Params]:
    """The same initial values that the model has without a pipeline, folded as they are made."""
    move = Move(layout, mesh, AXIS, fold=True)
    specs = llama.param_specs(config)["layers"]

    def initial(key: jax.Array) -> llama.Params:
        params = llama.init_params(config, key)
        layers = {name: move.array(stack, PartitionSpec(*specs[name][1:])) for name, stack in params["layers"].items()}
        return params | {"layers": layers}

    return initial
