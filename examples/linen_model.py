"""Flax Linen with dropout: every micro-batch draws its own masks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 32
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(h), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS
        )
        x, _ = blocks()(x)
        return nn.Dense(1)(x)[..., 0]


model = Model()


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    return jnp.mean((model.apply({"params": params}, batch["x"], rngs={"dropout": key}) - batch["y"]) ** 2)


@strand_interleave(microbatches=4, donate_argnums=(0, 1))
def train_step(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = value_and_grad(loss_fn, rng_argnums=2)(params, batch, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def split(path: Any, leaf: jax.Array) -> NamedSharding:
    """Splits the columns of a block's first matrix, and the rows of its second; replicates the rest."""
    name = jax.tree_util.keystr(path)
    spec = {"Dense_0']['kernel": P(None, None, "tp"), "Dense_1']['kernel": P(None, "tp")}
    return NamedSharding(mesh, next((s for key, s in spec.items() if key in name and leaf.ndim == 3), P()))


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (ROWS,))
    params = model.init({"params": keys[2], "dropout": keys[2]}, x)["params"]
    params = jax.device_put(params, jax.tree_util.tree_map_with_path(split, params))
    opt_state = optimizer.init(params)
    batch = {"x": x, "y": y}
    for number in range(10):
        params, opt_state, loss = train_step(params, opt_state, batch, jax.random.key(number))
        print(f"loss {loss:.4f}")
    train_step.report(params, opt_state, batch, jax.random.key(0)).print()


if __name__ == "__main__":
    main()
