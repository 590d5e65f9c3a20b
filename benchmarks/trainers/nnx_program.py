"""A Flax NNX program that knows nothing of dhelix: FSDP over all devices, and accumulation in a `lax.scan`.

It prints each loss in all digits of a float32.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, SEQ, VOCAB, ROWS, MICROBATCHES = 2, 64, 4, 64, 256, 32, 4
mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.fork(split=LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(self.norm(x))


def loss_fn(model: Model, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    parts = tokens.reshape(MICROBATCHES, -1, SEQ + 1)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "data")))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def accumulate(carry, part):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p, rest), part))(params)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, parts)
    optimizer.update(model, jax.tree.map(lambda g: g / MICROBATCHES, grads))
    return loss / MICROBATCHES


def sharding(x: jax.Array) -> NamedSharding:
    """The largest dimension is divided over the devices."""
    sizes = [size if size % mesh.size == 0 else 0 for size in x.shape]
    if not sizes or not max(sizes):
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*("data" if n == sizes.index(max(sizes)) else None for n in range(x.ndim))))


def main() -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    for part in (model, optimizer):
        nnx.update(part, jax.tree.map(lambda x: jax.device_put(x, sharding(x)), nnx.state(part)))
    for n in range(10):
        tokens = jax.random.randint(jax.random.key(n), (ROWS, SEQ + 1), 0, VOCAB)
        loss = train_step(model, optimizer, jax.device_put(tokens, NamedSharding(mesh, P("data"))))
        print(f"loss {float(loss)!r}", flush=True)


if __name__ == "__main__":
    main()
