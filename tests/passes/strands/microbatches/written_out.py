"""Train steps with unrolled micro-batches, unrolled by Python or by `unroll=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.tests.passes.interpreter import interpret

LAYERS, ROWS, WIDTH = 3, 2, 4
Array = jax.Array
Loss = Callable[..., Any]


def same_bits(step: Callable[..., Any], microbatches: int) -> list[int]:
    """Numbers of micro-batches of the strand loops. Checks that the loops compute the same bits as the step."""
    values = arguments(microbatches)
    lowered = jax.jit(step, keep_unused=True).lower(*values)
    changed, report = PassManager([StrandDuplication()]).run(Stage.LOWERED, hlo_bytes(lowered))
    assert changed is not None, report
    both = interpret(lowered, values), interpret(with_hlo(lowered, changed), values)
    for before, after in zip(*both, strict=True):
        np.testing.assert_array_equal(before, after)
    return [
        note.facts["microbatches"] for entry in report.passes for note in entry.notes if "microbatches" in note.facts
    ]


def scanned(w: Array, x: Array) -> Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2)


def written_out(w: Array, x: Array) -> Array:
    """Layers that are unrolled by a Python loop."""
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ w[layer])
    return jnp.mean(x**2)


def with_dropout(w: Array, x: Array, key: Array) -> Array:
    return scanned(w, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0))


def arguments(microbatches: int) -> tuple[Array, Array]:
    x = jax.random.normal(jax.random.key(1), (microbatches, ROWS, WIDTH))
    return jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 2, x


def updated(w: Array, grads: Any) -> Array:
    return w - 0.1 * grads


def from_zeros(w: Array, batch: Array, loss: Loss = scanned) -> Any:
    grads, value = jnp.zeros_like(w), 0.0
    for x in batch:
        one, gradient = jax.value_and_grad(loss)(w, x)
        grads, value = grads + gradient, value + one
    return updated(w, grads / len(batch)), value / len(batch)


def from_the_first(w: Array, batch: Array) -> Any:
    """Accumulates from the first gradient on, and returns the loss of the last micro-batch only."""
    grads, one = None, None
    for x in batch:
        one, gradient = jax.value_and_grad(scanned)(w, x)
        grads = gradient if grads is None else gradient + grads
    return updated(w, grads), one


def own_mean(w: Array, batch: Array) -> Any:
    return updated(w, sum(jax.grad(scanned)(w, x) / len(batch) for x in batch)), batch.sum()


def rows_of_a_batch(w: Array, batch: Array) -> Any:
    rows = batch.reshape(-1, WIDTH)
    parts = [jax.value_and_grad(scanned)(w, rows[n : n + ROWS]) for n in range(0, len(rows), ROWS)]
    losses, grads = zip(*parts, strict=True)
    return updated(w, sum(grads)), jnp.stack(losses).mean(), losses[1]


def auxiliary_outputs(w: Array, batch: Array) -> Any:
    def loss(w: Array, x: Array) -> Any:
        value = scanned(w, x)
        return value, {"most": jnp.max(x @ w[0]), "rows": (x[:, 0] > 0).sum(), "finite": jnp.isfinite(value)}

    total, grads = None, jnp.zeros_like(w)
    for x in batch:
        (_, aux), gradient = jax.value_and_grad(loss, has_aux=True)(w, x)
        grads = grads + gradient
        total = total or aux
        if total is not aux:
            total = {
                "most": jnp.maximum(total["most"], aux["most"]),
                "rows": total["rows"] + aux["rows"],
                "finite": total["finite"] & aux["finite"],
            }
    return updated(w, grads), total


def dropout(keys: str) -> Callable[..., Any]:
    def step(w: Array, batch: Array) -> Any:
        key = jax.random.key(jnp.uint32(batch[0, 0, 0] * 1000))
        split = jax.random.split(key, len(batch))
        grads = jnp.zeros_like(w)
        for n, x in enumerate(batch):
            if keys == "a chain":
                key, own = jax.random.split(key)
            else:
                own = jax.random.fold_in(key, n) if keys == "folded in" else split[n]
            grads = grads + jax.grad(with_dropout)(w, x, own)
        return updated(w, grads), grads

    return step


def jitted_gradient(w: Array, batch: Array) -> Any:
    gradient = jax.jit(jax.value_and_grad(scanned))
    parts = [gradient(w, x) for x in batch]
    return updated(w, sum(grads for _, grads in parts)), parts[-1][0]


def jitted_loop(w: Array, batch: Array) -> Any:
    return jax.jit(from_zeros)(w, batch)


def jitted_addition(w: Array, batch: Array) -> Any:
    add = jax.jit(lambda total, x: total + jax.grad(scanned)(w, x))
    total = jnp.zeros_like(w)
    for x in batch:
        total = add(total, x)
    return updated(w, total), total


def named_scopes(w: Array, batch: Array) -> Any:
    grads = jnp.zeros_like(w)
    for n, x in enumerate(batch):
        with jax.named_scope(f"microbatch_{n}"):
            grads = grads + jax.grad(scanned)(w, x)
    return updated(w, grads), grads


def written_out_layers(w: Array, batch: Array) -> Any:
    return from_zeros(w, batch, written_out)


def norms(w: Array, batch: Array) -> Any:
    """Uses the gradient's norm, which is not linear in the gradient, and returns all norms."""
    grads, found = jnp.zeros_like(w), []
    for x in batch:
        gradient = jax.grad(scanned)(w, x)
        found.append(jnp.linalg.norm(gradient))
        grads = grads + gradient / (1 + found[-1])
    return updated(w, grads), jnp.stack(found)


def unrolled_scan(unroll: int | bool, layers: int = 1) -> Callable[..., Any]:
    """Micro-batches in a scan with `unroll`; each iteration of the layer loop holds `layers` layers."""

    def loss(w: Array, x: Array) -> Array:
        body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, x, w, unroll=layers)[0] ** 2)

    def step(w: Array, batch: Array) -> Any:
        def one(total: Array, x: Array) -> Any:
            value, grads = jax.value_and_grad(loss)(w, x)
            return total + grads, value

        grads, values = jax.lax.scan(one, jnp.zeros_like(w), batch, unroll=unroll)
        return updated(w, grads), values.mean(), values

    return step


def unrolled_fori(w: Array, batch: Array) -> Any:
    def body(n: Any, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(scanned)(w, batch[n]))

    value, grads = jax.lax.fori_loop(0, len(batch), body, (0.0, jnp.zeros_like(w)), unroll=2)
    return updated(w, grads), value


def carried_keys(w: Array, batch: Array) -> Any:
    def one(carry: Any, x: Array) -> Any:
        key, own = jax.random.split(carry[0])
        return (key, carry[1] + jax.grad(with_dropout)(w, x, own)), None

    start = jax.random.key(3), jnp.zeros_like(w)
    key, grads = jax.lax.scan(one, start, batch, unroll=2)[0]
    return updated(w, grads), jax.random.key_data(key)


def first_one_apart(w: Array, batch: Array) -> Any:
    def one(total: Any, x: Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(scanned)(w, x)), None

    value, grads = jax.lax.scan(one, jax.value_and_grad(scanned)(w, batch[0]), batch[1:])[0]
    return updated(w, grads), value


def steps_of_written_out(w: Array, batch: Array) -> Any:
    return jax.lax.scan(lambda w, _: from_zeros(w, batch), w, None, length=2)
