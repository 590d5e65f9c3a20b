"""An Equinox program that knows nothing of dhelix: tensor parallelism, and a Python loop over micro-batches.

It prints each loss in all digits of a float32.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, SEQ, VOCAB, ROWS, MICROBATCHES = 2, 64, 4, 64, 256, 16, 4
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
optimizer = optax.adamw(1e-3)


class Block(eqx.Module):
    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.norms = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((SEQ, SEQ), bool)))
        return x + jax.vmap(lambda t: self.down(jax.nn.gelu(self.up(self.norms[1](t)))))(x)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[1], LAYERS))
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        x = jax.vmap(self.embed)(tokens)
        x = jax.lax.scan(lambda x, block: (eqx.combine(block, rest)(x), None), x, arrays)[0]
        return jax.vmap(self.head)(x)


def loss_fn(model: Model, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@eqx.filter_jit(donate="all-except-first")
def train_step(tokens, model, opt_state):
    parts = tokens.reshape(MICROBATCHES, -1, SEQ + 1)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "data")))
    found = [eqx.filter_value_and_grad(loss_fn)(model, parts[n]) for n in range(MICROBATCHES)]
    grads = jax.tree.map(lambda *g: sum(g) / MICROBATCHES, *(grads for _, grads in found))
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return sum(loss for loss, _ in found) / MICROBATCHES, eqx.apply_updates(model, updates), opt_state


def sharded(model: Model) -> Model:
    """The model with columns of the first products and rows of the second ones divided over the devices."""
    attention = model.blocks.attention
    split = {
        P(None, "model"): [
            *(one.weight for one in (attention.query_proj, attention.key_proj, attention.value_proj)),
            model.blocks.up.weight,
            model.blocks.up.bias,
        ],
        P(None, None, "model"): [attention.output_proj.weight, model.blocks.down.weight],
        P("model"): [model.head.weight],
    }
    specs = {id(x): spec for spec, arrays in split.items() for x in arrays}

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, specs.get(id(x), P()))) if eqx.is_array(x) else x

    return jax.tree.map(put, model)


def main() -> None:
    model = sharded(Model(jax.random.key(0)))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    opt_state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, NamedSharding(mesh, P())), opt_state)
    for n in range(10):
        tokens = jax.random.randint(jax.random.key(n), (ROWS, SEQ + 1), 0, VOCAB)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        loss, model, opt_state = train_step(tokens, model, opt_state)
        print(f"loss {float(loss)!r}", flush=True)


if __name__ == "__main__":
    main()
