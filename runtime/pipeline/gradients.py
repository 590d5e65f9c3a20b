"""Implements `dhelix.value_and_grad` under a pipeline: a schedule over stages computes the loss and its gradients.

    @strand_interleave(microbatches=16, pipeline=Fold(stages=4))
    def train_step(state, batch):
        loss, grads = dhelix.value_and_grad(loss_fn)(state.params, batch)

The layers' parameters and their gradients are folded: they have the shape [chunks, padded, ...] instead of the model's
[layers, ...] (`folded_state.py`). The loss function is traced with the model's own shapes.

Contract under a `shard_map` over the pipeline axis: gradients are the contributions of this device, as in JAX with
`check_vma=False`. If a parameter is replicated over stages, the caller must sum its gradients over the stages. The same
holds for every other axis. Losses and auxiliary outputs are those of the stage that has the last layer, and all
stages get them.

Contract outside of such a `shard_map`: this module makes a `shard_map` over the pipeline axis. Other axes stay
automatic. Losses and gradients are complete, so the caller need not sum them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.chain import Chain, take_apart, trace
from dhelix.runtime.pipeline.derivatives import derive
from dhelix.runtime.pipeline.executor import Pipeline, Sums
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.pipeline.jaxprs import communicates_over, holds

Values = list[Any]


def pipelined_sums(
    function: Callable[..., Sequence[Any]],
    fold: Fold,
    params: Sequence[jax.Array],
    batches: Sequence[jax.Array],
    seed: Callable[[Sequence[Any]], jax.Array],
) -> tuple[Values, Values]:
    """Sums the outputs of `function(*params, *batch)`, and the gradients of its loss, over the micro-batches.

    Args:
      function: returns the outputs of one micro-batch as a flat list. The first output is the scalar loss.
      fold: the pipeline.
      params: the parameters as a flat list. The layers' parameters are folded.
      batches: the inputs of all micro-batches as a flat list. The leading axis of each array is the micro-batch.
      seed: (batch) -> the micro-batch's weight. Its loss, gradients and floating-point outputs are multiplied by it.

    Returns:
      The summed outputs, and the gradients of `params`.

    Raises:
      DhelixError: the model is not a chain of equal layers, the parameters are not folded, or the mesh does not fit the
        number of stages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = fold.axis in mesh.manual_axes
    _check_mesh(mesh if manual else fold.mesh, fold)
    folded, padded = _folded(params, fold, manual)
    schedule = fold.make_schedule(fold.layers or padded * fold.places * fold.stages, batches[0].shape[0])
    layout = schedule.layout
    if padded != layout.padded:
        raise DhelixError(
            f"pipeline=: the state is folded into chunks of {padded} layers, but Fold(layers={layout.layers}) makes "
            f"chunks of {layout.padded}: give both the model's number of layers, and fold the state only once"
        )
    shapes = _stacked(params, folded, layout.layers)
    batch = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batches]
    try:
        jaxpr = trace(function, shapes, batch)
    except DhelixError:
        raise
    except (TypeError, ValueError) as error:
        error.add_note(
            "pipeline=: the loss function got the model's layers stacked in its own order; check that this Fold "
            "folded the state"
        )
        raise
    chain = take_apart(jaxpr, len(params))
    if not all(folded[i] for i in chain.layer_leaves) or any(folded[i] for i in chain.end_leaves):
        raise _not_folded(fold)
    of = derive(chain, [shapes[i] for i in chain.end_leaves], batch, seed)
    along = _stages_meet(jaxpr, mesh if manual else fold.mesh, fold.axis)
    pipeline = Pipeline(of, schedule, fold.axis, communicates_over(jaxpr, fold.axis), fold.sends_beside, along)
    if not chain.casts:  # `prepare` runs on one stage, so it must be traced for the number of layers of one stage
        shapes = _stacked(params, folded, padded * fold.places)
        chain = dataclasses.replace(chain, prepare=take_apart(trace(function, shapes, batch), len(params)).prepare)

    def of_stage(stage: jax.Array, params: Sequence[jax.Array], batches: Sequence[jax.Array]) -> tuple[Values, Values]:
        return _run(chain, pipeline, stage, params, batches)

    if manual:
        return of_stage(lax.axis_index(fold.axis), params, batches)
    return _over_stages(of_stage, fold, folded)(jnp.arange(fold.stages, dtype=jnp.int32), list(params), list(batches))


def _stages_meet(jaxpr: Any, mesh: Any, axis: str) -> bool:
    """Whether the work of a single stage contains a rendezvous with other stages.

    On CPU devices, a collective-permute waits for all devices of the program, including the devices of other stages.
    The work of a stage contains collective-permutes if the model uses them, or if XLA's partitioner makes them for
    automatic axes.
    """
    device: Any = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    if (jax.default_backend() if device is None else device.platform) != "cpu":
        return False
    automatic = [name for name in mesh.axis_names if name not in (axis, *mesh.manual_axes)]
    return any(mesh.shape[name] > 1 for name in automatic) or holds(jaxpr, "ppermute")


def _over_stages(
    of_stage: Callable[..., tuple[Values, Values]], fold: Fold, folded: Sequence[bool]
) -> Callable[..., Any]:
    """Returns `of_stage` as a function of the arrays of all stages.

    The number of each stage is an operand, because XLA cannot compute it if other axes are automatic.
    """
    assert fold.mesh is not None

    def local(stage: jax.Array, params: Sequence[jax.Array], batches: Sequence[jax.Array]) -> tuple[Values, Values]:
        outputs, gradients = of_stage(stage[0], params, batches)
        return outputs, [g if f else lax.psum(g, fold.axis) for g, f in zip(gradients, folded, strict=True)]

    specs = [PartitionSpec(fold.axis) if f else PartitionSpec() for f in folded]
    return jax.shard_map(
        local,
        mesh=fold.mesh,
        in_specs=(PartitionSpec(fold.axis), specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
        axis_names={fold.axis},
        check_vma=False,
    )


def _run(
    chain: Chain, pipeline: Pipeline, stage: jax.Array, params: Sequence[jax.Array], batches: Sequence[jax.Array]
) -> tuple[Values, Values]:
    folded = [params[i] for i in chain.layer_leaves]
    places, padded = folded[0].shape[:2]

    def prepare(folded: Sequence[jax.Array]) -> Values:
        stacks = chain.prepare([x.reshape(_unfolded(x.shape)) for x in folded])
        return [x.reshape(places, padded, *x.shape[1:]) for x in stacks]

    ends = [params[i] for i in chain.end_leaves]
    sums = pipeline.run(stage, prepare(folded), ends, batches)
    gradients: Values = [jnp.zeros(x.shape, jnp.float32) for x in params]
    for leaf, gradient in zip(chain.end_leaves, sums.ends, strict=True):
        gradients[leaf] = gradient
    for leaf, gradient in zip(chain.layer_leaves, _of_parameters(chain, prepare, folded, sums), strict=True):
        gradients[leaf] = gradient
    outputs = sums.outputs
    if pipeline.shared_ends:  # outputs that read more than the loss does, such as sums over layers, are zero elsewhere
        mine = stage == pipeline.schedule.layout.stage_of[-1]
        outputs = [jnp.where(mine, output, 0) for output in outputs]
    return [lax.psum(output, pipeline.axis) for output in outputs], gradients


def _of_parameters(chain: Chain, prepare: Callable[..., Values], folded: Sequence[jax.Array], sums: Sums) -> Values:
    """Computes the gradients of the layers' parameters from the gradients of the scan's weights."""
    if chain.casts:
        return [sums.layers[chain.casts.index(i)] for i in range(len(folded))]
    stacks, vjp = jax.vjp(prepare, list(folded))
    return vjp([g.astype(x.dtype) for g, x in zip(sums.layers, stacks, strict=True)])[0]


def _check_mesh(mesh: Any, fold: Fold) -> None:
    if mesh is None:
        raise DhelixError(
            f"pipeline=: value_and_grad is called outside jax.shard_map over {fold.axis!r}, so give the mesh: "
            "Fold(..., mesh=mesh)"
        )
    if mesh.shape.get(fold.axis) != fold.stages:
        raise DhelixError(
            f"Fold(stages={fold.stages}) needs a mesh axis {fold.axis!r} of that size, but the mesh is "
            f"{dict(mesh.shape)}"
        )


def _stacked(params: Sequence[jax.Array], folded: Sequence[bool], layers: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the loss function's parameters in the model's order, for a model of `layers` layers."""
    return [
        jax.ShapeDtypeStruct((layers, *x.shape[2:]) if f else x.shape, x.dtype)
        for x, f in zip(params, folded, strict=True)
    ]


def _unfolded(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0] * shape[1], *shape[2:])


def _folded(params: Sequence[jax.Array], fold: Fold, manual: bool) -> tuple[list[bool], int]:
    """Returns for each parameter whether it is folded, and the number of layers in a chunk.

    Candidates are parameters of shape [chunks, n, ...]. The n whose candidates have the most elements in total is the
    number of layers in a chunk.
    """
    chunks = fold.places * (1 if manual else fold.stages)
    sizes: dict[int, int] = {}
    for x in params:
        if len(x.shape) > 1 and x.shape[0] == chunks:
            sizes[x.shape[1]] = sizes.get(x.shape[1], 0) + x.size
    if not sizes:
        raise _not_folded(fold)
    padded = max(sizes, key=lambda n: sizes[n])
    return [len(x.shape) > 1 and x.shape[:2] == (chunks, padded) for x in params], padded


def _not_folded(fold: Fold) -> DhelixError:
    return DhelixError(
        f"pipeline=: the layers' parameters are not folded for {fold.stages} stages of {fold.places} chunks, or "
        "argnums= does not name them: fold the state once, with Fold.fold(state, mesh), and differentiate with "
        "respect to the layers, too"
    )
