"""A train step as an object: the state, the optimizer's update, the shardings, and checks of meshes and batches.

`models.train_step` makes the function for loss and gradients, which `assemble` turns into a `Training`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.mesh import AXES, ROWS, check_axes, present, row_entry, shards

Params = dict[str, Any]
"""Parameters of a model: nested dicts, and lists of layers, of arrays or of what replaces them (`PartitionSpec`s)."""
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Gradients = Callable[[Params, Batch], tuple[jax.Array, Params, Metrics]]
"""A function that maps (parameters, batch) to (mean loss, mean gradients in float32, further metrics)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training: parameters in `param_dtype`, optimizer state, and number of finished steps (int32)."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Training:
    """A train step, and everything that is needed to call or compile it.

    `train_step(state, batch) -> (state, metrics)` is a plain function, which the caller jits. `metrics` holds the
    float32 scalars `loss` (nats per token) and `grad_norm`. `batch["tokens"]` is int32 `[microbatches * batch,
    seq + 1]` with the sharding `batch_sharding`. Micro-batch m has the rows m, m + microbatches, and so on, for any
    number of `dp` shards.

    `batch["segments"]`, if given, has the same type, shape and sharding. It numbers the documents of a row from 1. A
    token attends only to tokens of its own document. Tokens with the number 0 are padding. The loss of a micro-batch is
    the mean over those tokens that belong to the same document as the token before them. The loss of the step is the
    mean over micro-batches.

    Checkpoints store layers in the model's order. If a train step uses another order, `to_model_order` and
    `from_model_order` convert states. They take states of arrays or of `jax.ShapeDtypeStruct`s. `ends` are the mesh
    axes that split embedding and head.

    `measure(state, batch) -> metrics` is `train_step` without gradients and update. Compiled alone, it goes forward
    only, but in a pipeline. What `train_step` needs around it, it needs, too.
    """

    config: DecoderConfig
    mesh: Mesh
    microbatches: int
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    measure: Callable[[TrainState, Batch], Metrics]
    init: Callable[[jax.Array], TrainState]
    state_shardings: TrainState
    batch_sharding: NamedSharding
    to_model_order: Callable[[TrainState], TrainState] = lambda state: state
    from_model_order: Callable[[TrainState], TrainState] = lambda state: state
    ends: tuple[str, ...] = ("tp",)

    def check_batch(self, batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> None:
        """Checks that rows and sequence length of `batch` divide over the mesh.

        Raises:
          ValueError: a size is no multiple of the number of shards, or an array is unknown or has another shape.
        """
        _check_batch(self.mesh, self.microbatches, batch, self.ends)

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return jax.tree.map(_with_sharding, shapes, self.state_shardings)

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """A state in the model's order as the train step takes it, in its order and with its shardings.

        Another sharding would compile the step again. Rows and columns that Adafactor keeps of layers are replicated,
        but `from_model_order` splits all that belongs to layers.
        """
        return jax.device_put(self.from_model_order(state), self.state_shardings)

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


def assemble(
    config: DecoderConfig,
    mesh: Mesh,
    microbatches: int,
    optimizer: optax.GradientTransformation,
    gradients_of: Gradients,
    specs: Params,
    initial_params: Callable[[jax.Array], Params],
    ends: tuple[str, ...] = ("tp",),
) -> Training:
    """A `Training` that uses a given function for loss and gradients.

    The optimizer's update is outside of `shard_map`, so that a global norm covers all devices.

    Args:
      gradients_of: the function that computes loss and gradients.
      specs: how parameters are split.
      initial_params: makes initial parameters from a random key.
      ends: the mesh axes that split embedding and head.
    """

    def initial_state(key: jax.Array) -> TrainState:
        params = initial_params(key)
        return TrainState(params, optimizer.init(_widen(params)), jnp.int32(0))

    shardings = _state_shardings(jax.eval_shape(initial_state, jax.random.key(0)), mesh, optimizer, specs)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(mesh, microbatches, batch, ends)
        loss, gradients, more = gradients_of(state.params, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, _widen(state.params))
        params: Any = optax.apply_updates(state.params, updates)
        new_state = lax.with_sharding_constraint(TrainState(params, opt_state, state.step + 1), shardings)
        return new_state, {"loss": loss, "grad_norm": optax.tree.norm(gradients)} | more

    def measure(state: TrainState, batch: Batch) -> Metrics:
        _check_batch(mesh, microbatches, batch, ends)
        loss, _, more = gradients_of(state.params, batch)
        return {"loss": loss} | more

    return Training(
        config=config,
        mesh=mesh,
        microbatches=microbatches,
        train_step=train_step,
        measure=measure,
        init=jax.jit(initial_state, out_shardings=shardings),
        state_shardings=shardings,
        batch_sharding=NamedSharding(mesh, row_spec(mesh)),
        ends=ends,
    )


def _widen(params: Params) -> Params:
    """The parameters in float32, the type of the gradients. So the optimizer's state is float32 from the first step."""
    return jax.tree.map(lambda weight: weight.astype(jnp.float32), params)


def _state_shardings(
    state: TrainState, mesh: Mesh, optimizer: optax.GradientTransformation, specs: Params
) -> TrainState:
    """The shardings of a state. The optimizer state of a parameter is sharded like the parameter if it has its shape.

    All other state is replicated, such as the rows and columns that Adafactor keeps of a matrix.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def of_state(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, param: jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding if leaf.shape == param.shape else replicated

    opt_state: Any = optax.tree.map_params(
        optimizer, of_state, state.opt_state, params, state.params, transform_non_params=lambda _: replicated
    )
    # This `TrainState` has shardings in place of arrays.
    fields: Any = {"params": params, "opt_state": opt_state, "step": replicated}
    return TrainState(**fields)


def row_spec(mesh: Mesh) -> PartitionSpec:
    """The spec of a batch: rows are split over those axes of `ROWS` that the mesh has."""
    return PartitionSpec(row_entry(mesh))


def check_mesh(
    config: DecoderConfig,
    mesh: Mesh,
    microbatches: int,
    allowed: tuple[str, ...] = AXES,
    needed: tuple[str, ...] = ("dp", "tp"),
    ends: tuple[str, ...] = ("tp",),
) -> None:
    """Checks that all axes of `mesh` are among `allowed`, and that the model's sizes divide over them.

    Args:
      needed: the axes that the mesh must have.
      ends: the mesh axes that split embedding and head.

    Raises:
      ValueError: the mesh has other axes, or a size is no multiple of the number of shards.
    """
    check_axes(mesh, allowed, needed)
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}; give a number of at least 1")
    split = {"heads": ("tp",), "kv_heads": ("tp",), "ffn": ("tp",)} | dict.fromkeys(config.sizes_of_ends, ends)
    for name, axes in split.items():
        if getattr(config, name) % shards(mesh, axes):
            axis = " x ".join(axes)
            raise ValueError(
                f"{name} = {getattr(config, name)} is not divisible by {axis} = {shards(mesh, axes)}; use a smaller "
                f"{axis}"
            )


def _check_batch(
    mesh: Mesh,
    microbatches: int,
    batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    ends: tuple[str, ...],
) -> None:
    if unknown := sorted(set(batch) - {"tokens", "segments"}):
        raise ValueError(f"a batch has no array {unknown[0]!r}; it has 'tokens', and may have 'segments'")
    if "tokens" not in batch:
        raise ValueError("the batch lacks 'tokens'; give int32 token ids of shape [rows, seq + 1]")
    shape = batch["tokens"].shape
    if "segments" in batch and not jnp.issubdtype(batch["segments"].dtype, jnp.integer):
        raise ValueError(f"segments of type {batch['segments'].dtype} are no numbers of documents; give int32")
    if "segments" in batch and batch["segments"].shape != shape:
        raise ValueError(
            f"segments of shape {batch['segments'].shape} do not fit tokens of shape {shape}; give each token a number"
        )
    rows, length = shape
    axes, parts = " x ".join(present(mesh, ROWS)), shards(mesh, ROWS)
    if rows % (microbatches * parts):
        raise ValueError(
            f"a batch of {rows} rows is not divisible by {microbatches} micro-batches x {axes} {parts}; use a "
            f"multiple of {microbatches * parts} rows"
        )
    cp, others = shards(mesh, ("cp",)), shards(mesh, ends)
    multiple = math.lcm(2 * cp if cp > 1 else 1, cp * others)
    if (length - 1) % multiple:
        split = " x ".join((*(("cp",) if cp > 1 else ()), *ends))
        twice = f"2 x cp = {2 * cp} chunks and {split} = {cp * others} parts" if cp > 1 else f"{split} {others}"
        raise ValueError(
            f"rows of {length} tokens train on {length - 1}, which is not divisible by {twice}; use a sequence length "
            f"that is a multiple of {multiple}"
        )
