"""Train steps of a small model on 8 devices: plain pytrees, Optax, Flax Linen, Flax NNX.

Each entry of STEPS makes (step, state, batch). `step(state, batch) -> (state, metrics)` takes its gradients with
dhelix's value_and_grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave

LAYERS, WIDTH, ROWS = 3, 8, 16
Step = tuple[Callable[[Any, Any], Any], Any, Any]
STEPS: dict[str, Callable[[], Step]] = {}


def _entry(make: Callable[[], Step]) -> Callable[[], Step]:
    STEPS[make.__name__] = make
    return make


def _mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))


def batch(rows: int = ROWS) -> dict[str, jax.Array]:
    random = np.random.RandomState(0)
    sharding = NamedSharding(_mesh(), P("dp"))
    values = {"x": random.standard_normal((rows, WIDTH)), "y": random.standard_normal((rows, WIDTH))}
    return {name: jax.device_put(value.astype(np.float32), sharding) for name, value in values.items()}


def weights() -> jax.Array:
    values = np.random.RandomState(1).standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3
    return jax.device_put(values, NamedSharding(_mesh(), P(None, None, "tp")))


def squared_error(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """A scan over layers gives a forward and a backward loop."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jnp.mean((jax.lax.scan(layer, batch["x"], w)[0] - batch["y"]) ** 2)


@_entry
def plain_pytree() -> Step:
    def step(state: dict[str, jax.Array], batch: Any) -> Any:
        loss, grads = value_and_grad(squared_error)(state["w"], batch)
        return {"w": state["w"] - 0.1 * grads, "step": state["step"] + 1}, loss

    return step, {"w": weights(), "step": jnp.int32(0)}, batch()


@_entry
def optax_adam() -> Step:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(state: Any, batch: Any) -> Any:
        w, moments = state
        loss, grads = value_and_grad(squared_error)(w, batch)
        updates, moments = optimizer.update(grads, moments, w)
        return (optax.apply_updates(w, updates), moments), {"loss": loss, "norm": optax.tree.norm(grads)}

    w = weights()
    return step, (w, optimizer.init(w)), batch()


class _LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(linen.Dense(WIDTH)(x)), None


class _LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = linen.scan(_LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return linen.Dense(WIDTH)(layers()(x, None)[0])


@_entry
def linen_train_state() -> Step:
    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Any:
            y = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((y - batch["y"]) ** 2), {"rows": jnp.sum(jnp.ones(len(y), jnp.int32))}

        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss, **aux}

    model, data = _LinenModel(), batch()
    params = model.init(jax.random.key(0), data["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    return step, state, data


class _NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x))

        return forward(x, self.layers)


@_entry
def nnx_split_state() -> Step:
    graph, params = nnx.split(_NnxModel(nnx.Rngs(0)), nnx.Param)
    optimizer = optax.sgd(0.1)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            model = nnx.merge(graph, params)
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return step, (params, optimizer.init(params)), batch()


def of_two_layers(mesh: Mesh, **options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    """A decorated step of two layers and four micro-batches over a mesh with axis `dp`, and abstract arguments.

    With two strands it needs more memory than the plain step plus 3 %: its layers hold little, and dx also crosses.
    """

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def train_step(w: jax.Array, x: jax.Array) -> Any:
        value, gradients = value_and_grad(loss)(w, x)
        return w - gradients, value

    weights = jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    batch = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp")))
    return strand_interleave(train_step, microbatches=4, donate_argnums=0, **options), (weights, batch)
