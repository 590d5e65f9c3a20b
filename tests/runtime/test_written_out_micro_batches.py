"""Unrolled micro-batches, compiled for 8 devices with FSDP and tensor parallelism: five optimizer steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.runtime.step.strand_interleave import strand_interleave

LAYERS, WIDTH, MICROBATCHES, ROWS = 4, 16, 4, 8
Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    return jnp.mean(jax.lax.scan(layer, x, (params["up"], params["down"]))[0] ** 2)


def updated(params: Params, grads: Params, value: jax.Array) -> tuple[Params, jax.Array]:
    return jax.tree.map(lambda p, g: p - 0.1 * g / MICROBATCHES, params, grads), value / MICROBATCHES


def python_loop(params: Params, batch: jax.Array) -> tuple[Params, jax.Array]:
    grads, value = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    for n in range(MICROBATCHES):
        one, gradient = jax.value_and_grad(loss)(params, batch[:, n])
        grads, value = jax.tree.map(jnp.add, grads, gradient), value + one
    return updated(params, grads, value)


def unrolled_by_two(params: Params, batch: jax.Array) -> tuple[Params, jax.Array]:
    def add(total: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    value, grads = jax.lax.scan(add, start, batch.swapaxes(0, 1), unroll=2)[0]
    return updated(params, grads, value)


@pytest.mark.parametrize("step", [python_loop, unrolled_by_two])
def test_five_steps_are_those_of_jit(step: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    generator = np.random.default_rng(0)

    def array(spec: P, *shape: int) -> jax.Array:
        return jax.device_put(generator.standard_normal(shape).astype(np.float32) / 2, NamedSharding(mesh, spec))

    ours = plain = {
        "up": array(P(None, "fsdp", "tp"), LAYERS, WIDTH, 2 * WIDTH),
        "down": array(P(None, "tp", "fsdp"), LAYERS, 2 * WIDTH, WIDTH),
    }
    run = strand_interleave(step)
    jitted = jax.jit(step)
    for _ in range(5):
        batch = array(P("fsdp"), ROWS, MICROBATCHES, WIDTH)
        (ours, value), (plain, expected) = run(ours, batch), jitted(plain, batch)
        assert np.isfinite(value)
        jax.tree.map(np.testing.assert_array_equal, (ours, value), (plain, expected))
    (note,) = run.report(ours, batch)["strand-duplication"].notes
    assert note.facts["microbatches"] == MICROBATCHES and len(note.facts["merged_loops"]) == 1
