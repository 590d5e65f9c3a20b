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


def train_step(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    def micro_batch(sums: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, x)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    rows = batch.reshape(MICROBATCHES, -1, batch.shape[-1])
    (loss, grads), _ = jax.lax.scan(micro_batch, zeros, rows)
    return jax.tree.map(lambda p, g: p - 0.01 * g / MICROBATCHES, params, grads), loss / MICROBATCHES


def inputs() -> tuple[Any, jax.Array]:
    """Parameters on the mesh, and a batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    params = jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    return params, jax.random.normal(keys[2], (32, WIDTH))


def main() -> None:
    params, batch = inputs()
    step = jax.jit(train_step, donate_argnums=0)
    for _ in range(10):
        params, loss = step(params, batch)
        print(f"loss {loss:.4f}")
    print(f"evaluation {jax.jit(loss_fn)(params, batch):.4f}")


if __name__ == "__main__":
    main()
