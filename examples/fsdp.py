"""FSDP: parameters and optimizer state are split over the replicas; XLA gathers each layer's weights when needed."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 64
mesh = jax.make_mesh((len(jax.devices()),), ("dp",), axis_types=(AxisType.Auto,))
optimizer = optax.adamw(1e-3)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@strand_interleave(microbatches=4, donate_argnums=0)
def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    params, opt_state = state
    loss, grads = value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    params = jax.device_put(params, NamedSharding(mesh, P(None, "dp")))
    state = params, optimizer.init(params)
    x = jax.device_put(jax.random.normal(keys[2], (ROWS, WIDTH)), NamedSharding(mesh, P("dp")))
    for _ in range(10):
        state, loss = train_step(state, x)
        print(f"loss {loss:.4f}")
    train_step.report(state, x).print()


if __name__ == "__main__":
    main()
