"""A train step that passes through dhelix's HLO library gives bitwise the same numbers as before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.passes.hlo import Builder, HloModule, verify
from dhelix.runtime.compiler import lowering

pytestmark = pytest.mark.smoke


def _train_step(mesh: Mesh, micro_batches: int):
    """SGD over micro-batches, tensor parallel over `tp` and data parallel over `dp`; the state is donated."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return carry + jax.lax.psum(jnp.tanh(carry @ w) @ w.T, "tp"), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    def local_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def micro_batch(carry: tuple[jax.Array, jax.Array], x: jax.Array):
            value, gradient = jax.value_and_grad(loss)(weights, x)
            return (carry[0] + value, carry[1] + gradient), None

        start = (jnp.zeros(()), jnp.zeros_like(weights))
        (total, gradient), _ = jax.lax.scan(micro_batch, start, batch)
        gradient = jax.lax.pmean(gradient, "dp") / micro_batches
        return weights - 0.1 * gradient, jax.lax.pmean(total, "dp") / micro_batches

    weights, batch = PartitionSpec(None, None, "tp"), PartitionSpec(None, "dp", None)
    scalar = PartitionSpec()
    step = jax.shard_map(local_step, mesh=mesh, in_specs=(weights, batch), out_specs=(weights, scalar), check_vma=False)
    return partial(jax.jit, donate_argnums=0)(step), NamedSharding(mesh, weights), NamedSharding(mesh, batch)


def test_a_round_trip_through_hlo_changes_no_bit() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), devices=jax.devices("cpu"))
    step, weights_sharding, batch_sharding = _train_step(mesh, micro_batches=3)
    draw = np.random.default_rng(0).standard_normal
    weights = draw((4, 16, 32), dtype=np.float32) * np.float32(0.1)
    batches = draw((5, 3, 8, 16), dtype=np.float32)

    def run(compiled: jax.stages.Compiled) -> tuple[list[float], np.ndarray]:
        state, losses = jax.device_put(weights, weights_sharding), []
        for batch in batches:
            state, loss = compiled(state, jax.device_put(batch, batch_sharding))
            losses.append(float(loss))
        return losses, np.asarray(state)

    lowered = step.lower(jax.device_put(weights, weights_sharding), jax.device_put(batches[0], batch_sharding))
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    _add_something_unused(module)
    changed = lowering.with_hlo(lowered, module.to_bytes(), module_name="smoke")

    plain_losses, plain_state = run(lowered.compile())
    losses, state = run(changed.compile())
    assert losses == plain_losses and losses[-1] < losses[0]
    np.testing.assert_array_equal(state, plain_state)


def _add_something_unused(module: HloModule) -> None:
    """Adds an unused instruction, so the module is serialized anew instead of returned unchanged."""
    builder = Builder(module.entry)
    parameter = module.entry.parameters[0]
    builder.tuple([parameter])
    verify(module)
