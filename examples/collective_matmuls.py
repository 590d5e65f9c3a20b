"""A hand-written tensor-parallel layer whose matmuls overlap with their all-gather and reduce-scatter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dhelix import collective_matmul

WIDTH, HIDDEN, ROWS = 128, 512, 64
mesh = jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(AxisType.Auto,))


@jax.jit
@partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("tp"), P(None, "tp"), P(None, "tp"), P("tp")),
    out_specs=P("tp"),
    check_vma=False,
)
def mlp(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> Any:
    """x: rows / n on each device; w_gate, w_up: columns / n; w_down: rows / n."""
    gate, up = collective_matmul.all_gather_matmul(x, (w_gate, w_up), "tp")  # one gather for both
    return collective_matmul.matmul_reduce_scatter(jax.nn.silu(gate) * up, w_down, "tp")


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (ROWS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    x, w_gate, w_up, w_down = (0.1 * jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))
    found, expected = mlp(x, w_gate, w_up, w_down), (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down
    print(f"largest difference to one device: {jnp.max(jnp.abs(found - expected)):.1e}")


if __name__ == "__main__":
    main()
