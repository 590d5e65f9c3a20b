"""A plain train step for Llama: micro-batches accumulated by `lax.scan`, over a mesh of `dp` x `tp` devices.

Nothing here knows of strands or passes; it is what a user would write:

    mesh = make_mesh(dp=2, tp=4)
    training = make_train_step(preset("llama-demo"), mesh, optax.adamw(1e-3), microbatches=4)
    step = jax.jit(training.train_step, donate_argnums=0)
    state = training.init(jax.random.key(0))
    state, metrics = step(state, {"tokens": tokens})      # int32 [microbatches * batch, seq + 1]

To compile without arrays, for a mesh of devices that need not exist: `step.lower(training.abstract_state(),
training.abstract_batch(batch=16))`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhelix.models import llama
from dhelix.models.config import LlamaConfig
from dhelix.models.layers import resolve_attention
from dhelix.models.parallel import AutoParallel, ManualParallel, Parallel

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Sharding = Literal["shard_map", "auto"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters in `param_dtype`, the optimizer's state, and the number of steps taken (int32 scalar)."""

    params: llama.Params
    opt_state: optax.OptState
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Training:
    """A train step and what is needed to call it or to compile it.

    `train_step(state, batch) -> (state, metrics)` is a plain function to be jitted; `metrics` holds the
    float32 scalars `loss` (nats per token) and `grad_norm`. `batch["tokens"]` is int32 `[microbatches *
    batch, seq + 1]`, sharded by `batch_sharding`; micro-batch m is rows m, m + microbatches, ..., the same
    for any number of `dp` shards.
    """

    config: LlamaConfig
    mesh: Mesh
    microbatches: int
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    init: Callable[[jax.Array], TrainState]
    state_shardings: TrainState
    batch_sharding: NamedSharding

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return jax.tree.map(_with_sharding, shapes, self.state_shardings)

    def abstract_batch(self, batch: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of `batch` rows in all (micro-batches times micro-batch size times dp) of `seq` + 1
        tokens."""
        shape = (batch, (seq or self.config.seq) + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)}


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def accumulate_gradients(
    config: LlamaConfig, parallel: Parallel, microbatches: int, params: llama.Params, rows: jax.Array
) -> tuple[jax.Array, llama.Params]:
    """Mean loss and float32 mean gradients over the micro-batches of `rows [microbatches * batch, seq +
    1]`."""
    params = llama.cast_params(config, params)
    # Splitting off the last factor of the rows, and not the first, keeps each micro-batch spread over all dp
    # shards.
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


def _manual_gradients(config: LlamaConfig, mesh: Mesh, microbatches: int):
    """Loss and gradients under `shard_map`.

    `check_vma=False`: with JAX's tracking of replication, the gradient of a replicated parameter is summed
    over the mesh where it arises, that is, an all-reduce over dp and tp in each layer of each micro-batch,
    unless every parameter is first cast to varying. Without it, collectives transpose as `models.parallel`
    says and nothing is added: each device's gradients are those of its own tokens, and the sums are the two
    lines below, once per step.
    """
    specs = llama.param_specs(config)

    def local(params: llama.Params, rows: jax.Array) -> tuple[jax.Array, llama.Params]:
        loss, gradients = accumulate_gradients(config, ManualParallel(), microbatches, params, rows)

        def reduce(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
            # A norm's weight is replicated over tp, but each device has seen its part of the sequence only.
            if "tp" not in spec:
                gradient = lax.psum(gradient, "tp")
            return lax.pmean(gradient, "dp")

        return lax.pmean(loss, "dp"), jax.tree.map(reduce, gradients, specs)

    in_specs, out_specs = (specs, PartitionSpec("dp")), (PartitionSpec(), specs)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _auto_gradients(config: LlamaConfig, mesh: Mesh, microbatches: int):
    """Loss and gradients of the global arrays; XLA's partitioner inserts the collectives."""

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
    """A train step of `config` over `mesh` (axes `dp` and `tp`), with explicit collectives or by XLA's
    partitioner.

    The optimizer's update stands outside of `shard_map`, so that a global norm is one. Raises ValueError for
    a mesh or a batch that the model does not divide over.
    """
    _check(config, mesh, microbatches, sharding)
    config = dataclasses.replace(config, attention=resolve_attention(config, mesh.devices.flat[0].platform))
    make_gradients = _manual_gradients if sharding == "shard_map" else _auto_gradients
    gradients_of = make_gradients(config, mesh, microbatches)
    shardings = _state_shardings(config, mesh, optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(config, mesh, microbatches, batch["tokens"])
        loss, gradients = gradients_of(state.params, batch["tokens"])
        updates, opt_state = optimizer.update(gradients, state.opt_state, _widen(state.params))
        params: Any = optax.apply_updates(state.params, updates)
        new_state = lax.with_sharding_constraint(TrainState(params, opt_state, state.step + 1), shardings)
        return new_state, {"loss": loss, "grad_norm": optax.tree.norm(gradients)}

    return Training(
        config=config,
        mesh=mesh,
        microbatches=microbatches,
        train_step=train_step,
        init=jax.jit(lambda key: _initial_state(config, optimizer, key), out_shardings=shardings),
        state_shardings=shardings,
        batch_sharding=NamedSharding(mesh, PartitionSpec("dp")),
    )


def _initial_state(config: LlamaConfig, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    params = llama.init_params(config, key)
    return TrainState(params, optimizer.init(_widen(params)), jnp.int32(0))


def _widen(params: llama.Params) -> llama.Params:
    """In float32, as gradients are: so the optimizer's state is float32 from the first step on."""
    return jax.tree.map(lambda weight: weight.astype(jnp.float32), params)


def _state_shardings(config: LlamaConfig, mesh: Mesh, optimizer: optax.GradientTransformation) -> TrainState:
    """Optimizer state of a parameter's shape is sharded as the parameter, the rest of it is replicated."""
    state = jax.eval_shape(lambda key: _initial_state(config, optimizer, key), jax.random.key(0))
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), llama.param_specs(config))
    opt_state: Any = optax.tree.map_params(
        optimizer, lambda _, s: s, state.opt_state, params, transform_non_params=lambda _: replicated
    )
    # Shardings stand where the state has arrays.
    fields: Any = {"params": params, "opt_state": opt_state, "step": replicated}
    return TrainState(**fields)


def _check(config: LlamaConfig, mesh: Mesh, microbatches: int, sharding: str) -> None:
    if sharding not in ("shard_map", "auto"):
        raise ValueError(f"sharding={sharding!r} is unknown; use 'shard_map' or 'auto'")
    if tuple(mesh.axis_names) != ("dp", "tp") or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"the mesh must have the Auto axes 'dp' and 'tp', not {mesh}; build it with make_mesh(dp, tp)")
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}; give a number of at least 1")
    tp = mesh.shape["tp"]
    for name in ("heads", "kv_heads", "ffn", "vocab"):
        if getattr(config, name) % tp:
            raise ValueError(f"{name} = {getattr(config, name)} does not divide by tp = {tp}; use a smaller tp")


def _check_batch(config: LlamaConfig, mesh: Mesh, microbatches: int, tokens: jax.Array) -> None:
    rows, length = tokens.shape
    dp, tp = mesh.shape["dp"], mesh.shape["tp"]
    if rows % (microbatches * dp):
        raise ValueError(
            f"a batch of {rows} rows does not divide by {microbatches} micro-batches x dp {dp}; "
            f"use a multiple of {microbatches * dp} rows"
        )
    if (length - 1) % tp:
        raise ValueError(f"rows of {length} tokens train on {length - 1}, which does not divide by tp {tp}")
