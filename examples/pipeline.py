"""A folded model in two pipeline stages: every stage overlaps one micro-batch's forward with another's backward."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import Fold, strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, WORDS = 6, 64, 128, 256
mesh = jax.make_mesh((2, len(jax.devices()) // 2), ("pp", "tp"), axis_types=(AxisType.Auto,) * 2)
fold = Fold(stages=2, layers=LAYERS, mesh=mesh)
optimizer = optax.adam(1e-3)


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """An embedding, a scan over equal layers, and a head."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()


@strand_interleave(microbatches=4, pipeline=fold, donate_argnums=0)
def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    params, opt_state = state
    loss, grads = value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    ends = {name: 0.1 * jax.random.normal(key, size) for name, key, size in (
        ("embedding", keys[2], (WORDS, WIDTH)), ("head", keys[3], (WIDTH, WORDS)),
    )}  # fmt: skip
    specs = {"embedding": P(), "head": P(), "layers": {"up": P(None, None, "tp"), "down": P(None, "tp")}}
    params = jax.device_put({**ends, "layers": layers}, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    state = fold.fold((params, optimizer.init(params)))  # once: puts the layers into the order of the stages
    tokens = jax.random.randint(jax.random.key(1), (16, 33), 0, WORDS)
    for _ in range(10):
        state, loss = train_step(state, tokens)
        print(f"loss {loss:.4f}")
    train_step.report(state, tokens).print()


if __name__ == "__main__":
    main()
