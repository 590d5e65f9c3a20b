"""A model, its optimizer and its batch, for tests of steps that change NNX objects in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, ROWS, COUNT = 3, 8, 16, 4


class Network(nnx.Module):
    """Layers in a scan, a tied projection, and state that forward changes: running statistics and dropout's counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.Param(jax.random.normal(rngs.params(), (LAYERS, WIDTH, WIDTH)) / 5)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, self.first(x), self.layers[...])
        return self.last(self.dropout(self.norm(x)))


def loss(model: Network, batch: jax.Array) -> jax.Array:
    return jnp.mean((model(batch) - 1) ** 2)


def objects() -> tuple[Any, nnx.Optimizer, nnx.metrics.Average]:
    model = Network(nnx.Rngs(0, dropout=1))
    made = model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), nnx.metrics.Average()
    nnx.update(made, jax.device_put(nnx.state(made), NamedSharding(mesh(), P())))  # so that each step compiles once
    return made


def mesh() -> Mesh:
    return jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


def batch() -> jax.Array:
    values = np.random.RandomState(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh(), P("dp")))


def step_of(take: Callable[[Network, jax.Array], Any]) -> Callable[..., jax.Array]:
    """A step as in Flax's guides; `take(model, batch)` returns loss and gradients."""

    def train_step(model: Network, optimizer: nnx.Optimizer, metrics: Any, batch: jax.Array) -> jax.Array:
        value, gradients = take(model, batch)
        optimizer.update(model, gradients)
        metrics.update(values=value)
        return value

    return train_step


def accumulated(model: Network, batch: jax.Array) -> Any:
    """The expected result of `dhelix.value_and_grad`, computed by a Python loop."""
    total = jnp.float32(0), jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    for rows in batch.reshape(ROWS // COUNT, COUNT, WIDTH).swapaxes(0, 1):
        total = jax.tree.map(jnp.add, total, nnx.value_and_grad(loss)(model, rows))
    return jax.tree.map(lambda x: x / COUNT, total)


def arrays(*objects: Any) -> list[np.ndarray]:
    """All values in NNX objects; for random keys, their data."""
    leaves = jax.tree.leaves(nnx.state(objects))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def check_equal(expected: tuple[Any, ...], actual: tuple[Any, ...], tolerance: float = 0) -> None:
    for want, got in zip(arrays(*expected), arrays(*actual), strict=True):
        assert want.dtype == got.dtype
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
