"""The quick look at a program: steps of one micro-batch, and steps of several in every form that becomes strands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dhelix.passes import jax_compat
from dhelix.runtime.undecorated.micro_batches import may_hold
from dhelix.tests.quick import slow_after

M, LAYERS, WIDTH = 3, 3, 8
PARAMETERS = {name: jnp.ones((LAYERS, WIDTH, WIDTH)) for name in ("q", "k", "v", "out")}
BATCHES = jnp.ones((M, 2, 4, WIDTH))
KINDS = ("scanned", "rematerialised", "in a function of their own")


def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    def norm(y: jax.Array) -> jax.Array:
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)

    q = norm(norm(x) @ p["q"])
    k = norm(norm(x) @ p["k"])
    v = x @ p["v"]
    return x + jax.nn.softmax(q @ k.mT) @ v @ p["out"], None


def gradients(*kinds: str) -> Callable[..., Any]:
    block = jax.checkpoint(layer) if "rematerialised" in kinds else layer

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        if "scanned" in kinds:
            x = jax.lax.scan(block, x, parameters)[0]
        else:
            for number in range(LAYERS):
                x = block(x, jax.tree.map(lambda w, n=number: w[n], parameters))[0]
        return jnp.mean((x @ parameters["out"][0]) ** 2)

    found = jax.value_and_grad(loss)
    return jax.jit(found) if "in a function of their own" in kinds else found


def scanned(take: Callable[..., Any]) -> Callable[..., Any]:
    def step(parameters: Any, batches: jax.Array) -> Any:
        def turn(total: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            loss, grads = take(parameters, x)
            return jax.tree.map(jnp.add, total, grads), loss

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, parameters), batches)

    return step


def counted(take: Callable[..., Any]) -> Callable[..., Any]:
    def step(parameters: Any, batches: jax.Array) -> Any:
        def turn(n: jax.Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, take(parameters, batches[n])[1])

        return jax.lax.fori_loop(0, M, turn, jax.tree.map(jnp.zeros_like, parameters))

    return step


def written_out(take: Callable[..., Any]) -> Callable[..., Any]:
    def step(parameters: Any, batches: jax.Array) -> Any:
        total = jax.tree.map(jnp.zeros_like, parameters)
        for n in range(M):
            total = jax.tree.map(jnp.add, total, take(parameters, batches[n])[1])
        return total

    return step


def looked_at(step: Callable[..., Any], *arguments: Any) -> bool:
    return may_hold(jax_compat.debug_text(jax.jit(step).lower(*arguments)))


@pytest.mark.parametrize("kinds", slow_after(3, [c for n in range(4) for c in itertools.combinations(KINDS, n)]))
def test_several_micro_batches_are_never_missed(kinds: tuple[str, ...]) -> None:
    take = gradients(*kinds)
    assert not looked_at(take, PARAMETERS, BATCHES[0])
    for form in (scanned, counted, written_out):
        assert looked_at(form(take), PARAMETERS, BATCHES), form.__name__


def test_micro_batches_in_a_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))

    def mapped(step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)

    take = gradients()
    assert not looked_at(mapped(take), PARAMETERS, BATCHES[0])
    for form in (scanned, counted, written_out):
        assert looked_at(mapped(form(take)), PARAMETERS, BATCHES), form.__name__


def test_random_numbers_do_not_chain_micro_batches() -> None:
    def step(parameters: Any, batches: jax.Array, key: jax.Array) -> Any:
        total = jax.tree.map(jnp.zeros_like, parameters)
        for n in range(M):
            key, own = jax.random.split(key)
            grads = gradients()(parameters, batches[n] * jax.random.bernoulli(own, 0.9, batches[n].shape))[1]
            total = jax.tree.map(jnp.add, total, grads)
        return total

    assert looked_at(step, PARAMETERS, BATCHES, jax.random.key(0))
