"""A program that knows nothing of dhelix. `dhelix run examples/undecorated.py` interleaves its step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, MICROBATCHES = 4, 64, 256, 4
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@jax.jit
def train_step(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    def micro_batch(sums: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, x)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    rows = batch.reshape(MICROBATCHES, -1, batch.shape[-1])
    (loss, grads), _ = jax.lax.scan(micro_batch, zeros, rows)
    return jax.tree.map(lambda p, g: p - 0.01 * g / MICROBATCHES, params, grads), loss / MICROBATCHES


@jax.jit
def evaluate(params: Any, batch: jax.Array) -> jax.Array:
    return loss_fn(params, batch)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    params = jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    batch = jax.random.normal(keys[2], (32, WIDTH))
    for _ in range(10):
        params, loss = train_step(params, batch)
        print(f"loss {loss:.4f}")
    print(f"evaluation {evaluate(params, batch):.4f}")


if __name__ == "__main__":
    main()
