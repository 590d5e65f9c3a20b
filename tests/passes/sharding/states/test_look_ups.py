"""Which tables a step only looks up, and how many rows it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from dhelix.passes.hlo import HloModule
from dhelix.passes.sharding.states.look_ups import rows_read
from dhelix.passes.sharding.states.updates import find_states
from dhelix.runtime.compiler import lowering
from dhelix.tests.runtime.sharding.training import mesh

VOCABULARY, WIDTH, WORDS = 64, 16, 24


def rows(loss: Callable[..., jax.Array], micro_batches: int = 1) -> dict[int, int]:
    """What `rows_read` finds in a step with a table, a head, and words; the table is argument 0."""

    def step(table: jax.Array, head: jax.Array, words: jax.Array) -> Any:
        def body(total: Any, part: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss, (0, 1))(table, head, part)), None

        zeros = (jnp.zeros_like(table), jnp.zeros_like(head))
        (first, second), _ = jax.lax.scan(body, zeros, words.reshape(micro_batches, -1))
        return table - 0.1 * (first + 0.01 * table), head - 0.1 * second

    shapes = (jnp.ones((VOCABULARY, WIDTH)), jnp.ones((WIDTH, VOCABULARY)), jnp.ones(WORDS, jnp.int32))
    module = HloModule.from_bytes(lowering.hlo_bytes(jax.jit(step).lower(*shapes)))
    find_states(module)
    return rows_read(module)


def look_up(table: jax.Array, head: jax.Array, words: jax.Array) -> jax.Array:
    return jnp.sum((table.astype(jnp.bfloat16)[words] @ head.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_all_rows_of_a_step_count(micro_batches: int) -> None:
    assert rows(look_up, micro_batches) == {0: WORDS}


def test_a_table_that_also_multiplies_is_none() -> None:
    def tied(table: jax.Array, head: jax.Array, words: jax.Array) -> jax.Array:
        return look_up(table, head + table.T, words)

    assert rows(tied) == {}


def test_columns_are_no_rows() -> None:
    def columns(table: jax.Array, head: jax.Array, words: jax.Array) -> jax.Array:
        return jnp.sum(table[:, words % WIDTH]) + jnp.sum(head)

    assert rows(columns) == {}


def test_a_shard_map_gathers_what_it_takes_in() -> None:
    def manual(table: jax.Array, head: jax.Array, words: jax.Array) -> jax.Array:
        def local(*args: jax.Array) -> jax.Array:
            return jax.lax.psum(look_up(*args), "dp")

        return jax.shard_map(local, mesh=mesh(dp=8), in_specs=(P(), P(), P("dp")), out_specs=P())(table, head, words)

    assert rows(manual) == {}
