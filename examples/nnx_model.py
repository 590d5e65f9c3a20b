"""Flax NNX: the model and its optimizer are objects that the step changes in place."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 32
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.fork(split=LAYERS))
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(
            nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        )


def loss_fn(model: Model, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((model(x)[..., 0] - y) ** 2)


@strand_interleave(microbatches=4)  # in place of nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    loss, grads = value_and_grad(loss_fn)(model, batch)  # in place of nnx.value_and_grad
    optimizer.update(model, grads)
    return loss


def main() -> None:
    model = Model(nnx.Rngs(0))
    for linear, spec in ((model.blocks.up, P(None, None, "tp")), (model.blocks.down, P(None, "tp"))):
        linear.kernel[...] = jax.device_put(linear.kernel[...], NamedSharding(mesh, spec))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(1), 2)
    batch = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (ROWS,))
    for _ in range(10):
        print(f"loss {train_step(model, optimizer, batch):.4f}")
    train_step.report(model, optimizer, batch).print()


if __name__ == "__main__":
    main()
