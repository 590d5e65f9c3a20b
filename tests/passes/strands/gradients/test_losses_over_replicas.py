"""Losses whose gradients are more than one product per layer are still summed over replicas once per step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad
from dhelix.passes.framework.report import CHANGED
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.tests.passes.strands.gradients.reductions import reduced_in_loops
from dhelix.tests.quick import slow_but

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS = 6, 8, 32, 4, 5
TOLERANCE = 5e-6  # relative: additions of float32 in another order, five steps
OPTIONS = {"xla_backend_optimization_level": 0}  # compiles fast


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"], None


def layers(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(jax.checkpoint(layer), x, w)[0]


def plain(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(layers(w, x) ** 2)


def twice(w: Any, x: jax.Array) -> jax.Array:
    return plain(w, layers(w, x))


def decayed(w: Any, x: jax.Array) -> jax.Array:
    return plain(w, x) + 1e-2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w))


def in_groups(w: Any, x: jax.Array) -> jax.Array:
    grouped = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), w)
    group = jax.checkpoint(lambda x, w: (layers(w, x), None))
    return jnp.mean(jax.lax.scan(group, x, grouped)[0] ** 2)


def by_value_and_grad(loss: Any, **options: Any) -> Any:
    def step(w: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(loss, **options)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


def by_own_loop(change: Any) -> Any:
    def step(w: Any, x: jax.Array) -> Any:
        def one(total: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(plain)(w, x)
            return jax.tree.map(jnp.add, total, change(value, grads)), value

        grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, w), micro_batches(x))
        return jax.tree.map(lambda p, g: p - 0.1 * g / MICROBATCHES, w, grads), values.mean()

    return step


def micro_batches(x: jax.Array) -> jax.Array:
    return x.reshape(-1, MICROBATCHES, WIDTH).swapaxes(0, 1)


def positive(w: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(x[:, 0] > 0)


def skipped(value: jax.Array, grads: Any) -> Any:
    """Zeros instead of gradients, if the micro-batch's loss is not finite."""
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(value), g, 0), grads)


def clipped(value: jax.Array, grads: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.5 / norm), grads)


def nesterov(w: Any, x: jax.Array) -> Any:
    """After the micro-batches, the gradient sum is added to a value that depends on it."""
    value, grads = value_and_grad(plain)(w, x)
    momentum = jax.tree.map(lambda g, p: g + 0.9 * p, grads, w)
    return jax.tree.map(lambda p, g, m: p - 0.1 * (g + 0.9 * m), w, grads, momentum), value


def in_constrained_groups(w: Any, x: jax.Array) -> Any:
    def one(total: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(in_groups)(w, x)
        grads = jax.tree.map(lambda g, p: g + 0.01 * p, grads, w)
        grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(lambda _: NamedSharding(mesh(), P()), w))
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, w), micro_batches(x))
    return jax.tree.map(lambda p, g: p - 0.1 * g / MICROBATCHES, w, grads), values.mean()


def sums_of_sums(w: Any, x: jax.Array) -> Any:
    def one(sums: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(plain)(w, x)
        total, mean = sums
        return (jax.tree.map(lambda *terms: sum(terms), total, grads, mean), jax.tree.map(jnp.add, mean, grads)), value

    zeros = jax.tree.map(jnp.zeros_like, w)
    (total, _), values = jax.lax.scan(one, (zeros, zeros), micro_batches(x))
    return jax.tree.map(lambda p, g: p - 0.02 * g, w, total), values.mean()


STEPS_BY_KIND = {
    "weighted mean": by_value_and_grad(plain, reduce="weighted", weights=positive),
    "layers applied twice": by_value_and_grad(twice),
    "weight decay in the loss": by_value_and_grad(decayed),
    "groups of layers, checkpointed": by_value_and_grad(in_groups),
    "micro-batches left out": by_own_loop(skipped),
    "Nesterov's momentum": nesterov,
    "groups of layers, constrained": in_constrained_groups,
    "sums of sums": sums_of_sums,
}


SLOW = {"groups of layers, constrained", "layers applied twice"}  # like those checkpointed, and weight decay


@pytest.mark.parametrize("kind", slow_but(STEPS_BY_KIND.keys() - SLOW, STEPS_BY_KIND))
def test_five_steps_are_the_plain_steps_and_reduced_once(kind: str) -> None:
    ours, w, x = train(STEPS_BY_KIND[kind])
    entry = ours.report(w, x)["replica-sums"]
    assert entry.outcome == CHANGED and len(entry.notes) == 1, entry.notes
    assert entry.notes[0].facts["accumulators"] == 3
    assert not reduced_in_loops(compiled_module(ours.lower(w, x).compile()), mesh())


def test_gradients_that_are_read_in_each_micro_batch_are_reduced_there() -> None:
    train(by_own_loop(clipped))


def train(step: Any) -> tuple[Any, Any, jax.Array]:
    """Compares five steps with the steps without passes. Returns the step, its parameters and the last batch."""
    own = "by_own_loop" in step.__qualname__ or step in (in_constrained_groups, sums_of_sums)
    microbatches = None if own else MICROBATCHES
    ours = strand_interleave(step, microbatches=microbatches, compiler_options=OPTIONS)
    without = strand_interleave(step, microbatches=microbatches, compiler_options=OPTIONS, passes=())
    random = np.random.default_rng(0)
    sizes = {"up": (LAYERS, WIDTH, WIDTH), "down": (LAYERS, WIDTH, WIDTH), "bias": (LAYERS, WIDTH)}
    w = {name: 0.3 * random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    w = want = jax.device_put(w, NamedSharding(mesh(), P()))
    for _ in range(STEPS):
        x = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
        x = jax.device_put(x, NamedSharding(mesh(), P("dp")))
        (w, value), (want, expected) = ours(w, x), without(want, x)
        np.testing.assert_allclose(value, expected, rtol=TOLERANCE)
    for got, leaf in zip(jax.tree.leaves(w), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, leaf, rtol=TOLERANCE, atol=TOLERANCE)
    return ours, w, x


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), "dp")
