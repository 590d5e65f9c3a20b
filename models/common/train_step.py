"""A plain train step for Llama over a mesh of `dp` x `tp` devices. A `lax.scan` accumulates gradients of micro-batches.

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
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.parallel import AutoParallel, ManualParallel, Parallel
from dhelix.models.llama import model as llama
from dhelix.models.llama.llama_config import LlamaConfig
from dhelix.models.moe.moe_config import MoeConfig

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Sharding = Literal["shard_map", "auto", "fsdp"]
"""What inserts the collectives.

`shard_map`: the code of the model. `auto`: XLA's partitioner. `fsdp`: XLA's partitioner; with experts, the code of the
model. Matrices, their gradients and their optimizer state are also split over `dp` (FSDP, ZeRO-3), and layers gather
weights when they need them.
"""
Gradients = Callable[[llama.Params, jax.Array], tuple[Any, ...]]
"""A function that maps (parameters, tokens) to (mean loss, mean gradients in float32).

The result may have a third part: a dict of further metrics.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training: parameters in `param_dtype`, optimizer state, and number of finished steps (int32)."""

    params: llama.Params
    opt_state: optax.OptState
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Training:
    """A train step, and everything that is needed to call or compile it.

    `train_step(state, batch) -> (state, metrics)` is a plain function, which the caller jits. `metrics` holds the
    float32 scalars `loss` (nats per token) and `grad_norm`. `batch["tokens"]` is int32 `[microbatches * batch,
    seq + 1]` with the sharding `batch_sharding`. Micro-batch m has the rows m, m + microbatches, and so on, for any
    number of `dp` shards.

    Checkpoints store layers in the model's order. If a train step uses another order, `to_model_order` and
    `from_model_order` convert states. They take states of arrays or of `jax.ShapeDtypeStruct`s. `ends` are the mesh
    axes that split embedding and head. `data` are the mesh axes that split the batch.
    """

    config: LlamaConfig
    mesh: Mesh
    microbatches: int
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    init: Callable[[jax.Array], TrainState]
    state_shardings: TrainState
    batch_sharding: NamedSharding
    to_model_order: Callable[[TrainState], TrainState] = lambda state: state
    from_model_order: Callable[[TrainState], TrainState] = lambda state: state
    ends: tuple[str, ...] = ("tp",)
    data: tuple[str, ...] = ("dp",)

    def check_batch(self, tokens: jax.Array | jax.ShapeDtypeStruct) -> None:
        """Checks that rows and sequence length of `tokens` divide over the mesh.

        Raises:
          ValueError: a size is no multiple of the number of shards.
        """
        _check_batch(self.mesh, self.microbatches, tokens, self.ends, self.data)

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return jax.tree.map(_with_sharding, shapes, self.state_shardings)

    def abstract_batch(self, batch: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch as `jax.ShapeDtypeStruct`s with shardings, `[batch, seq + 1]`.

        Args:
          batch: number of rows: micro-batches times micro-batch size times dp (times ep with experts).
          seq: sequence length; default: `config.seq`.
        """
        shape = (batch, (seq or self.config.seq) + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)}


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def accumulate_gradients(
    config: LlamaConfig, parallel: Parallel, microbatches: int, params: llama.Params, rows: jax.Array
) -> tuple[jax.Array, llama.Params]:
    """The mean loss and the mean gradients over all micro-batches of `rows [microbatches * batch, seq + 1]`.

    Both are float32.
    """
    params = llama.cast_params(config, params)
    # A micro-batch has every microbatches-th row, so that each micro-batch is spread over all dp shards.
    tokens = rows.reshape(-1, microbatches, rows.shape[1]).swapaxes(0, 1)

    def micro_batch(carry: tuple[jax.Array, llama.Params], tokens: jax.Array):
        total, gradients = carry
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        loss, new = jax.value_and_grad(llama.loss, argnums=1)(config, params, inputs, targets, parallel)
        gradients = jax.tree.map(lambda accumulated, g: accumulated + g.astype(jnp.float32), gradients, new)
        return (total + loss, gradients), None

    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), params)
    (total, gradients), _ = lax.scan(micro_batch, (jnp.float32(0), zeros), tokens)
    return total / microbatches, jax.tree.map(lambda g: g / microbatches, gradients)


def _manual_gradients(config: LlamaConfig, mesh: Mesh, microbatches: int) -> Gradients:
    """A function that computes loss and gradients under `shard_map`.

    `check_vma` is False, because JAX's tracking of replication would cost time. With tracking, JAX sums the gradient of
    a replicated parameter over the mesh at once: an all-reduce over dp and tp in each layer of each micro-batch. To
    avoid this, every parameter would have to be cast to varying first. Without tracking, collectives transpose as
    `models.common.parallel` says, and JAX adds no sums. The gradients of a device then cover its own tokens, and
    `reduce_gradients` sums them once per step.
    """
    specs = llama.param_specs(config)

    def local(params: llama.Params, rows: jax.Array) -> tuple[jax.Array, llama.Params]:
        loss, gradients = accumulate_gradients(config, ManualParallel(), microbatches, params, rows)
        return lax.pmean(loss, "dp"), reduce_gradients(gradients, specs)

    return over_mesh(local, mesh, specs)


def over_mesh(local: Gradients, mesh: Mesh, specs: llama.Params) -> Gradients:
    """`local` under `shard_map`. The function `local(params, rows) -> (loss, gradients)` computes for one device."""
    in_specs, out_specs = (specs, PartitionSpec("dp")), (PartitionSpec(), specs)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def reduce_gradients(
    gradients: llama.Params, specs: llama.Params, model_axes: tuple[str, ...] = ("tp",)
) -> llama.Params:
    """The gradients of the whole batch, from the gradients that each device has computed. Runs under `shard_map`.

    Gradients are averaged over `dp`. If a parameter is replicated over one of `model_axes`, as the weights of norms
    are, each device has computed its gradient from a part of the sequence. So these gradients are also summed over that
    axis.
    """

    def reduce(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        axes = tuple(axis for axis in model_axes if axis not in axes_of(spec))
        return lax.pmean(lax.psum(gradient, axes) if axes else gradient, "dp")

    return jax.tree.map(reduce, gradients, specs)


def axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that split an array with this spec."""
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}


def _auto_gradients(config: LlamaConfig, mesh: Mesh, microbatches: int) -> Gradients:
    """A function that computes loss and gradients from global arrays. XLA's partitioner inserts the collectives."""

    def whole(params: llama.Params, rows: jax.Array) -> tuple[jax.Array, llama.Params]:
        return accumulate_gradients(config, AutoParallel(mesh), microbatches, params, rows)

    return whole


def make_train_step(
    config: LlamaConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    sharding: Sharding = "shard_map",
) -> Training:
    """A train step of `config` over `mesh`, which has the axes `dp` and `tp`. `sharding` says what inserts collectives.

    Raises:
      ValueError: `sharding` is unknown, or the model does not divide over the mesh.
    """
    if isinstance(config, MoeConfig):
        raise ValueError("a mixture of experts has a train step of its own; use dhelix.models.moe.train_step")
    if sharding not in ("shard_map", "auto", "fsdp"):
        raise ValueError(f"sharding={sharding!r} is unknown; use 'shard_map', 'auto' or 'fsdp'")
    check_mesh(config, mesh, microbatches)
    config = dataclasses.replace(config, attention=resolve_attention(config, mesh.devices.flat[0].platform))
    make_gradients = _manual_gradients if sharding == "shard_map" else _auto_gradients
    gradients_of = make_gradients(config, mesh, microbatches)
    initial = functools.partial(llama.init_params, config)
    specs = llama.param_specs(config)
    if sharding == "fsdp":
        specs = over_dp(config, specs, jax.eval_shape(initial, jax.random.key(0)), mesh.shape["dp"])
    return assemble(config, mesh, microbatches, optimizer, gradients_of, specs, initial)


def over_dp(config: LlamaConfig, specs: llama.Params, params: llama.Params, dp: int) -> llama.Params:
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
        return llama.spec_of(*entries)

    return jax.tree_util.tree_map_with_path(split, specs, params)


def assemble(
    config: LlamaConfig,
    mesh: Mesh,
    microbatches: int,
    optimizer: optax.GradientTransformation,
    gradients_of: Gradients,
    specs: llama.Params,
    initial_params: Callable[[jax.Array], llama.Params],
    ends: tuple[str, ...] = ("tp",),
    data: tuple[str, ...] = ("dp",),
) -> Training:
    """A `Training` that uses a given function for loss and gradients.

    The optimizer's update is outside of `shard_map`, so that a global norm covers all devices.

    Args:
      gradients_of: the function that computes loss and gradients.
      specs: how parameters are split.
      initial_params: makes initial parameters from a random key.
      ends: the mesh axes that split embedding and head.
      data: the mesh axes that split the batch.
    """

    def initial_state(key: jax.Array) -> TrainState:
        params = initial_params(key)
        return TrainState(params, optimizer.init(_widen(params)), jnp.int32(0))

    shardings = _state_shardings(jax.eval_shape(initial_state, jax.random.key(0)), mesh, optimizer, specs)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(mesh, microbatches, batch["tokens"], ends, data)
        loss, gradients, *more = gradients_of(state.params, batch["tokens"])
        updates, opt_state = optimizer.update(gradients, state.opt_state, _widen(state.params))
        params: Any = optax.apply_updates(state.params, updates)
        new_state = lax.with_sharding_constraint(TrainState(params, opt_state, state.step + 1), shardings)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
        return new_state, metrics | (more[0] if more else {})

    return Training(
        config=config,
        mesh=mesh,
        microbatches=microbatches,
        train_step=train_step,
        init=jax.jit(initial_state, out_shardings=shardings),
        state_shardings=shardings,
        batch_sharding=NamedSharding(mesh, PartitionSpec(data)),
        ends=ends,
        data=data,
    )


def _widen(params: llama.Params) -> llama.Params:
    """The parameters in float32, the type of the gradients. So the optimizer's state is float32 from the first step."""
    return jax.tree.map(lambda weight: weight.astype(jnp.float32), params)


def _state_shardings(
    state: TrainState, mesh: Mesh, optimizer: optax.GradientTransformation, specs: llama.Params
) -> TrainState:
    """The shardings of a state. The optimizer state of a parameter is sharded like the parameter.

    All other state is replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    opt_state: Any = optax.tree.map_params(
        optimizer, lambda _, s: s, state.opt_state, params, transform_non_params=lambda _: replicated
    )
    # This `TrainState` has shardings in place of arrays.
    fields: Any = {"params": params, "opt_state": opt_state, "step": replicated}
    return TrainState(**fields)


def check_mesh(
    config: LlamaConfig,
    mesh: Mesh,
    microbatches: int,
    axes: tuple[str, ...] = ("dp", "tp"),
    ends: tuple[str, ...] = ("tp",),
) -> None:
    """Checks that `mesh` has the axes `axes`, and that the model's sizes divide over them.

    Args:
      ends: the mesh axes that split the vocabulary.

    Raises:
      ValueError: the mesh has other axes, or a size is no multiple of the number of shards.
    """
    if tuple(mesh.axis_names) != axes or any(kind != AxisType.Auto for kind in mesh.axis_types):
        quoted = ", ".join(repr(axis) for axis in axes[:-1])
        make = "make_mesh(dp, tp, pp=stages)" if "pp" in axes else "make_mesh(dp, tp)"
        raise ValueError(
            f"the mesh must have the Auto axes {quoted} and {axes[-1]!r}, not {mesh}; build it with {make}"
        )
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}; give a number of at least 1")
    layers, vocabulary = ("tp", mesh.shape["tp"]), _shards(mesh, ends)
    for name, (axis, shards) in {"heads": layers, "kv_heads": layers, "ffn": layers, "vocab": vocabulary}.items():
        if getattr(config, name) % shards:
            raise ValueError(
                f"{name} = {getattr(config, name)} is not divisible by {axis} = {shards}; use a smaller {axis}"
            )


def _check_batch(
    mesh: Mesh,
    microbatches: int,
    tokens: jax.Array | jax.ShapeDtypeStruct,
    ends: tuple[str, ...],
    data: tuple[str, ...],
) -> None:
    rows, length = tokens.shape
    axis, shards = _shards(mesh, data)
    if rows % (microbatches * shards):
        raise ValueError(
            f"a batch of {rows} rows is not divisible by {microbatches} micro-batches x {axis} {shards}; use a "
            f"multiple of {microbatches * shards} rows"
        )
    axis, shards = _shards(mesh, ends)
    if (length - 1) % shards:
        raise ValueError(
            f"rows of {length} tokens train on {length - 1}, which is not divisible by {axis} {shards}; use a sequence "
            "length that is"
        )


def _shards(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, int]:
    """Words for mesh axes, and the number of shards into which these axes split a dimension."""
    return " x ".join(axes), math.prod(mesh.shape[axis] for axis in axes)
