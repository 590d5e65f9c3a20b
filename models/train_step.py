"""A plain train step for any model of this package. A `lax.scan` accumulates gradients of micro-batches.

A user could have written this step. It does not depend on strands or passes:

    mesh = make_mesh(dp=2, tp=4)
    training = make_train_step(preset("llama-demo"), mesh, optax.adamw(1e-3), microbatches=4)
    step = jax.jit(training.train_step, donate_argnums=0)
    state = training.init(jax.random.key(0))
    state, metrics = step(state, {"tokens": tokens})      # int32 [microbatches * batch, seq + 1]

`step.lower(training.abstract_state(), training.abstract_batch(batch=16))` lowers the step without arrays, also for a
mesh of devices that do not exist.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dhelix.models.common.context_parallel import Context, Exchange
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.mesh import ROWS, TOKENS, axes_of, on_mesh, present, shards, spec_of
from dhelix.models.common.parallel import AutoParallel, ManualParallel, Parallel
from dhelix.models.common.training import (
    Batch,
    Gradients,
    Metrics,
    Params,
    Training,
    assemble,
    check_mesh,
    row_spec,
)
from dhelix.models.families import Family, family_of
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.moe.wide_gradients import gradients_of

Sharding = Literal["shard_map", "auto", "fsdp"]
"""What inserts the collectives.

`shard_map`: the code of the model. `auto`: XLA's partitioner. `fsdp`: XLA's partitioner; with experts or context
parallelism, the code of the model. Matrices, their gradients and their optimizer state are also split over `dp` (FSDP,
ZeRO-3), and layers gather weights when they need them.
"""


def make_train_step(
    config: DecoderConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    sharding: Sharding = "shard_map",
    context: Exchange = "ring",
) -> Training:
    """A train step of `config` over `mesh`, which has the axes `dp` and `tp`, and may have `ep` and `cp`.

    With experts, metrics also have `cross_entropy`, and the means over layers, micro-batches and devices of `balance`,
    `z` and `dropped` (`models.moe.routing.Routing`).

    Args:
      sharding: what inserts collectives.
      context: how devices of a `cp` group exchange keys and values.

    Raises:
      ValueError: an argument is unknown, the model does not divide over the mesh, or `sharding` does not support it.
    """
    check_mesh(config, mesh, microbatches, (*TOKENS, "tp"))
    check_sharding(config, mesh, sharding)
    family = family_of(config)
    config = dataclasses.replace(config, attention=resolve_attention(config, mesh.devices.flat[0].platform))
    specs = on_mesh(family.param_specs(config), mesh)
    initial = functools.partial(family.init_params, config)
    by_hand = sharding == "shard_map" or _needs_hand(config, mesh)
    if sharding == "fsdp" and "dp" not in mesh.axis_names:
        raise ValueError("sharding='fsdp' splits parameters over all of dp; use a mesh with the axis dp")
    if sharding == "fsdp" and (mesh.shape["dp"] > 1 or not by_hand):
        specs = _over_dp(config, specs, jax.eval_shape(initial, jax.random.key(0)), mesh.shape["dp"])
    parallel = manual_parallel(config, mesh, specs, context) if by_hand else AutoParallel(mesh)
    gradients = _gradients(family, config, parallel, microbatches)
    gradients = over_mesh(gradients, config, mesh, specs) if by_hand else gradients
    return assemble(config, mesh, microbatches, optimizer, gradients, specs, initial)


def _needs_hand(config: DecoderConfig, mesh: Mesh) -> bool:
    return isinstance(config, MoeConfig) or shards(mesh, ("cp",)) > 1


def check_sharding(config: DecoderConfig, mesh: Mesh, sharding: str, instead: str = "'shard_map' or 'fsdp'") -> None:
    """Checks that `sharding` supports the model and the mesh, and that the experts divide over the mesh.

    Args:
      instead: what the step supports in place of "auto", for the message.

    Raises:
      ValueError: it does not, or they do not.
    """
    if sharding not in ("shard_map", "auto", "fsdp"):
        raise ValueError(f"sharding={sharding!r} is unknown; use 'shard_map', 'auto' or 'fsdp'")
    if sharding == "auto" and _needs_hand(config, mesh):
        what = "experts" if isinstance(config, MoeConfig) else "context parallelism"
        raise ValueError(f"sharding='auto' is not supported for {what}; use {instead}")
    ep = shards(mesh, ("ep",))
    if not isinstance(config, MoeConfig) and ep > 1:
        raise ValueError(f"the mesh has ep = {ep}, but the model has no experts; leave ep out")
    if isinstance(config, MoeConfig) and config.experts % ep:
        raise ValueError(f"experts = {config.experts} is not divisible by ep = {ep}; use an ep that divides it")


def _over_dp(config: DecoderConfig, specs: Params, params: Params, dp: int) -> Params:
    """`specs`, where each matrix is also split over `dp` if one of its dimensions allows it.

    The dimension to split is the first one that is not split yet and that is a multiple of `dp`. The layer dimension is
    never split, because a scan reads one layer after the other.
    """

    def split(path: tuple[Any, ...], spec: PartitionSpec, param: jax.ShapeDtypeStruct) -> PartitionSpec:
        first = 1 if config.scan_layers and path[0].key == "layers" else 0
        entries = [*spec, *[None] * (param.ndim - len(spec))]
        free = [n for n in range(first, param.ndim) if entries[n] is None and param.shape[n] % dp == 0]
        if param.ndim - first < 2 or not free:
            return spec
        entries[free[0]] = "dp"
        return spec_of(*entries)

    return jax.tree_util.tree_map_with_path(split, specs, params)


# ---- under shard_map


def manual_parallel(
    config: DecoderConfig, mesh: Mesh, specs: Params, context: Exchange = "ring", pipeline: str | None = None
) -> ManualParallel:
    """The exchanges of a model over `mesh`, for parameters that are split as `specs` says."""
    cp = shards(mesh, ("cp",))
    return ManualParallel(
        pipeline=pipeline,
        experts="ep" if "ep" in mesh.axis_names else None,
        rows=present(mesh, ROWS),
        context=Context(cp, context) if cp > 1 else None,
        split_over_dp=_split_over_dp(config, specs),
    )


def _split_over_dp(config: DecoderConfig, specs: Params) -> tuple[tuple[str, int], ...]:
    """The names of the weights that `specs` splits over `dp`, each with the split dimension, not counting layers."""
    first = specs["layers"] if config.scan_layers else specs["layers"][0]
    layer = {name: spec[1:] if config.scan_layers else spec for name, spec in first.items()}
    every = layer | {name: spec for name, spec in specs.items() if name != "layers"}
    return tuple((name, tuple(spec).index("dp")) for name, spec in every.items() if "dp" in axes_of(spec))


def over_mesh(local: Gradients, config: DecoderConfig, mesh: Mesh, specs: Params) -> Gradients:
    """The loss, gradients and metrics of the whole batch, from a function that computes those of one device's tokens.

    `check_vma` is False, because JAX's tracking of replication would cost time. With tracking, JAX sums the gradient of
    a replicated parameter over the mesh at once: an all-reduce over dp and tp in each layer of each micro-batch. To
    avoid this, every parameter would have to be cast to varying first. Without tracking, collectives transpose as
    `common.parallel` says, and JAX adds no sums. The gradients of a device then cover its own tokens, and
    `reduce_gradients` sums them once per step.
    """
    # Devices of a `tp` group route different parts of the sequence, and compute all other metrics alike.
    axes = present(mesh, (*TOKENS, "tp") if isinstance(config, MoeConfig) else TOKENS)

    def whole(params: Params, batch: Batch) -> tuple[jax.Array, Params, Metrics]:
        loss, gradients, metrics = local(params, batch)
        loss, metrics = lax.pmean((loss, metrics), axes)
        return loss, reduce_gradients(gradients, specs, mesh), metrics

    in_specs, out_specs = (specs, row_spec(mesh)), (PartitionSpec(), specs, PartitionSpec())
    return jax.shard_map(whole, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def reduce_gradients(gradients: Params, specs: Params, mesh: Mesh) -> Params:
    """Turns each device's own gradients into those of the mean over all tokens, under `shard_map`.

    A parameter that is replicated over an axis has seen only a part of the work on each device of that axis, so its
    gradient is summed over the axis. A gradient that is split over an axis of `TOKENS` is a sum already: an expert has
    seen the tokens of its whole `ep` group, and what is split over `dp` has been reduce-scattered. The sum over devices
    with different tokens becomes a mean.
    """
    axes = present(mesh, (*TOKENS, "tp", "pp"))

    def reduce(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        summed = tuple(axis for axis in axes if axis not in axes_of(spec))
        return (lax.psum(gradient, summed) if summed else gradient) / shards(mesh, TOKENS)

    return jax.tree.map(reduce, gradients, specs)


# ---- micro-batches


def _gradients(family: Family, config: DecoderConfig, parallel: Parallel, microbatches: int) -> Gradients:
    """A function that computes loss, gradients and metrics: of one device's tokens, or of global arrays."""

    def gradients(params: Params, batch: Batch) -> tuple[jax.Array, Params, Metrics]:
        gradients, metrics = accumulate_gradients(family, config, parallel, microbatches, params, batch)
        return metrics.pop("loss"), gradients, metrics

    return gradients


def accumulate_gradients(
    family: Family, config: DecoderConfig, parallel: Parallel, microbatches: int, params: Params, batch: Batch
) -> tuple[Params, Metrics]:
    """The mean gradients and the mean metrics over all micro-batches of `batch`, in float32.

    The rows of `batch` are `[microbatches * batch, seq + 1]`.
    """
    params = family.trainable(config, params, parallel)
    # A micro-batch has every microbatches-th row, so that each micro-batch is spread over all devices.
    rows = {name: array.reshape(-1, microbatches, array.shape[1]).swapaxes(0, 1) for name, array in batch.items()}
    take = jax.grad(objective_of(family, config, parallel), has_aux=True)

    def micro_batch(carry: tuple[Params, Metrics], rows: Batch):
        gradients, totals = carry
        new, metrics = take(params, rows)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, gradients_of(new))
        return (gradients, jax.tree.map(jnp.add, totals, metrics)), None

    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), gradients_of(params))
    sums, _ = lax.scan(micro_batch, (zeros, dict.fromkeys(family.METRICS, jnp.float32(0))), rows)
    return jax.tree.map(lambda value: value / microbatches, sums)


def objective_of(
    family: Family, config: DecoderConfig, parallel: Parallel
) -> Callable[[Params, Batch], tuple[jax.Array, Metrics]]:
    """The objective of one micro-batch, as a function of parameters and whole rows `[batch, seq + 1]`."""

    def objective(params: Params, rows: Batch) -> tuple[jax.Array, Metrics]:
        own = parallel.own_sequence
        tokens, targets = own(rows["tokens"][:, :-1]), own(rows["tokens"][:, 1:])
        if "segments" not in rows:
            return family.objective(config, params, tokens, targets, parallel)
        before, segments = rows["segments"][:, :-1], rows["segments"][:, 1:]
        counts = (before == segments) & (segments != 0)
        mean = parallel.mean_over_rows(jnp.mean(counts, dtype=jnp.float32))
        weights = own(counts / jnp.maximum(mean, 1 / counts.size))
        return family.objective(config, params, tokens, targets, parallel, before, weights)

    return objective
