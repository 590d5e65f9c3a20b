"""Equinox: a module that has functions among its leaves. Needs the package equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 32
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(1e-3)


class Model(eqx.Module):
    up: jax.Array
    down: jax.Array
    activation: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return x + self.activation(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (self.up, self.down))[0]


def loss_fn(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@strand_interleave(microbatches=4)  # in place of eqx.filter_jit
def train_step(model: Model, opt_state: Any, x: jax.Array) -> tuple[Model, Any, jax.Array]:
    loss, grads = value_and_grad(loss_fn)(model, x)  # in place of eqx.filter_value_and_grad
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)

    def weights(key: jax.Array, spec: P, *size: int) -> jax.Array:
        return jax.device_put(0.1 * jax.random.normal(key, size), NamedSharding(mesh, spec))

    model = Model(
        weights(keys[0], P(None, None, "tp"), LAYERS, WIDTH, HIDDEN),
        weights(keys[1], P(None, "tp"), LAYERS, HIDDEN, WIDTH),
        jax.nn.gelu,
    )
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    for _ in range(10):
        model, opt_state, loss = train_step(model, opt_state, x)
        print(f"loss {loss:.4f}")
    train_step.report(model, opt_state, x).print()


if __name__ == "__main__":
    main()
