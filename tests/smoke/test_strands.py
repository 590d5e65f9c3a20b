"""The decorator turns a step with a loop over micro-batches into two strands, with equal results up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix import strand_interleave

pytestmark = pytest.mark.smoke


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, weights)[0] ** 2)

    def micro_batch(carry: tuple[jax.Array, jax.Array], x: jax.Array):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return (carry[0] + value, carry[1] + gradient), None

    (total, gradient), _ = jax.lax.scan(micro_batch, (jnp.zeros(()), jnp.zeros_like(weights)), batch)
    return weights - 0.1 * gradient, total


def test_interleaved_step_is_transformed_and_right() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")), "dp")
    draw = np.random.default_rng(0).standard_normal
    weights = jax.device_put(draw((3, 16, 32), np.float32) / 8, NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(draw((4, 16, 16), np.float32), NamedSharding(mesh, PartitionSpec(None, "dp")))
    interleaved = strand_interleave(train_step)
    plain, strands = jax.jit(train_step), weights
    for _ in range(3):
        weights, expected = plain(weights, batch)
        strands, loss = interleaved(strands, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)  # dhelix sums over replicas only once per step
    np.testing.assert_allclose(weights, strands, rtol=1e-5, atol=1e-6)
    report = interleaved.report(strands, batch)
    changed = ("strand-duplication", "gradient-accumulation", "activation-sharing", "replica-sums")
    assert all(report[name].changed for name in changed)
