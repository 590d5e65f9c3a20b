"""A model of plain arrays, tensor-parallel by JAX's partitioner."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 8, 64, 256, 32
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(1e-3)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


@strand_interleave(microbatches=4, donate_argnums=(0, 1))  # in place of jax.jit
def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = value_and_grad(loss_fn)(params, batch)  # in place of jax.value_and_grad
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main() -> None:
    draw = partial(jax.random.normal, dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": 0.1 * draw(keys[0], (LAYERS, WIDTH, HIDDEN)), "down": 0.1 * draw(keys[1], (LAYERS, HIDDEN, WIDTH))}
    specs = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    params = jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    opt_state = optimizer.init(params)
    batch = {"x": draw(keys[2], (ROWS, WIDTH)), "y": draw(keys[3], (ROWS, WIDTH))}
    for _ in range(10):
        params, opt_state, loss = train_step(params, opt_state, batch)
        print(f"loss {loss:.4f}")
    train_step.report(params, opt_state, batch).print()


if __name__ == "__main__":
    main()
