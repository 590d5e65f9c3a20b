"""Sharded states: train under ZeRO-1, evaluate, save, and resume under ZeRO-3.

The step is written for plain data parallelism. The plan decides what each device holds, and who updates what.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import gather_state, shard_state, state_shardings, strand_interleave, value_and_grad

LAYERS, WIDTH, HIDDEN, ROWS = 4, 64, 256, 64
mesh = jax.make_mesh((len(jax.devices()),), ("dp",), axis_types=(AxisType.Auto,))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))  # ZeRO-3: gather weights, not rows
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    params, opt_state = state
    loss, grads = value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def trained(state: Any, x: jax.Array, plan: str) -> Any:
    """The state after five steps under a plan. `state` must be placed under this plan."""
    step = strand_interleave(train_step, microbatches=4, donate_argnums=0, sharding=plan)
    for _ in range(5):
        state, loss = step(state, x)
        print(f"loss {loss:.4f}")
    step.report(state, x).print()
    return state


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    x = jax.device_put(jax.random.normal(keys[2], (ROWS, WIDTH)), NamedSharding(mesh, P("dp")))
    state = trained(shard_state((params, optimizer.init(params)), "zero1", mesh), x, "zero1")
    part = state[0]["up"].addressable_shards[0].data
    print(f"a device holds {part.size / state[0]['up'].size:.3f} of the parameters between steps")

    whole, _ = gather_state(state, "zero1")
    print(f"evaluated: {jax.jit(loss_fn)(whole, x):.4f}")

    with tempfile.TemporaryDirectory() as folder, orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        placed = state_shardings(state, "zero3")
        like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, placed)
        state = checkpointer.restore(Path(folder) / "state", like)
    trained(state, x, "zero3")


if __name__ == "__main__":
    main()
