"""Training programs as other people write them. Nothing of dhelix is in them. Each returns the losses of its steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS = 3, 16, 16, 4, 3


def _mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices("cpu")[:count]).reshape(tuple(axes.values())), tuple(axes))


def _weights() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    shapes = {"wi": (LAYERS, WIDTH, 4 * WIDTH), "wo": (LAYERS, 4 * WIDTH, WIDTH)}
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _data(step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + step), (MICROBATCHES * ROWS, WIDTH))


def _loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["wi"]) @ weights["wo"], None

    return jnp.mean((jax.lax.scan(layer, x, params)[0] - 1.0) ** 2)


def ahead_of_time(calls_jitted: bool = False) -> list[float]:
    """As MaxText: FSDP x TP by shardings, accumulation in a scan, lowered and compiled before the first step.

    With `calls_jitted`, what was compiled only tells its memory, and the jitted function runs.
    """
    mesh = _mesh(fsdp=4, tensor=2)
    specs = {"wi": P(None, "fsdp", "tensor"), "wo": P(None, "tensor", "fsdp")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    optimizer = optax.adamw(1e-2)

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state = state
        parts = batch.reshape(MICROBATCHES, -1, WIDTH)
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "fsdp")))

        def accumulate(carry: Any, part: jax.Array) -> tuple[Any, None]:
            loss, grads = jax.value_and_grad(_loss)(params, part)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, parts)
        grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss / MICROBATCHES}

    params = jax.device_put(_weights(), shardings)
    whole = NamedSharding(mesh, P())
    state = params, jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), optimizer.init(params))
    of_state = jax.tree.map(lambda x: x.sharding, state)
    of_batch = NamedSharding(mesh, P("fsdp"))
    jitted = jax.jit(train_step, in_shardings=(of_state, of_batch), out_shardings=(of_state, None), donate_argnums=0)
    compiled = jitted.lower(state, jax.device_put(_data(0), of_batch)).compile({})
    losses = []
    for step in range(STEPS):
        state, metrics = (jitted if calls_jitted else compiled)(state, jax.device_put(_data(step), of_batch))
        losses.append(float(metrics["loss"]))
    return losses


def filtered_jit() -> list[float]:
    """As Equinox programs: modules as arguments of a filtered jit, accumulation in a fori_loop."""

    class Mlp(eqx.Module):
        weights: dict[str, jax.Array]
        activation: Callable[[jax.Array], jax.Array] = eqx.field(static=True)

        def __call__(self, x: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return x + self.activation(x @ w["wi"]) @ w["wo"], None

            return jax.lax.scan(layer, x, self.weights)[0]

    mesh = _mesh(data=8)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model: Mlp, opt_state: Any, batch: jax.Array) -> tuple[Mlp, Any, jax.Array]:
        parts = batch.reshape(MICROBATCHES, -1, WIDTH)
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "data")))
        loss_of = eqx.filter_value_and_grad(lambda m, x: jnp.mean((m(x) - 1.0) ** 2))

        def one(n: jax.Array, carry: Any) -> Any:
            return jax.tree.map(jnp.add, carry, loss_of(model, parts[n]))

        zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
        loss, grads = jax.lax.fori_loop(0, MICROBATCHES, one, (jnp.zeros(()), zeros))
        grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss / MICROBATCHES

    model = Mlp(jax.device_put(_weights(), NamedSharding(mesh, P())), jnp.tanh)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    losses = []
    for n in range(STEPS):
        batch = jax.device_put(_data(n), NamedSharding(mesh, P("data")))
        model, opt_state, loss = step(model, opt_state, batch)
        losses.append(float(loss))
    return losses


def nnx_in_place() -> list[float]:
    """As Flax NNX programs: a jitted step that changes its model, with a Python loop over micro-batches."""
    mesh = _mesh(data=8)

    class Mlp(nnx.Module):
        def __init__(self) -> None:
            weights = jax.device_put(_weights(), NamedSharding(mesh, P()))
            self.wi, self.wo = nnx.Param(weights["wi"]), nnx.Param(weights["wo"])

        def __call__(self, x: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ w[0]) @ w[1], None

            return jax.lax.scan(layer, x, (self.wi[...], self.wo[...]))[0]

    @nnx.jit
    def step(model: Mlp, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        def loss_of(model: Mlp, x: jax.Array) -> jax.Array:
            return jnp.mean((model(x) - 1.0) ** 2)

        parts = jax.lax.with_sharding_constraint(
            batch.reshape(MICROBATCHES, -1, WIDTH), NamedSharding(mesh, P(None, "data"))
        )
        found = [nnx.value_and_grad(loss_of)(model, parts[n]) for n in range(MICROBATCHES)]
        grads = jax.tree.map(lambda *g: sum(g) / MICROBATCHES, *(grads for _, grads in found))
        optimizer.update(model, grads)
        return jnp.sum(jnp.stack([loss for loss, _ in found])) / MICROBATCHES

    model = Mlp()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [
        float(step(model, optimizer, jax.device_put(_data(n), NamedSharding(mesh, P("data"))))) for n in range(STEPS)
    ]


def across_calls(steps: int = 1) -> list[float]:
    """As Keras and Tunix: a step for each micro-batch, and optax.MultiSteps that updates at the last one."""
    mesh = _mesh(data=8)
    optimizer = optax.MultiSteps(optax.adam(1e-2), MICROBATCHES)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.device_put(_weights(), NamedSharding(mesh, P()))
    opt_state = optimizer.init(params)
    losses = []
    for n in range(steps):
        batch = jax.device_put(_data(n)[:ROWS], NamedSharding(mesh, P("data")))
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


TRAINERS = {one.__name__: one for one in (ahead_of_time, filtered_jit, nnx_in_place)}
