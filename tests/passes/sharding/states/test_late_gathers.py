"""Parameters that stay split are gathered where layers compute with them, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.tests.passes.sharding.states import manual_steps, programs
from dhelix.tests.passes.sharding.states.manual_steps import Loss, P, depth, in_groups, program, sharded, whole_stacks
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH


@pytest.mark.parametrize("spec", [P(None, "dp"), P(None, None, "dp")], ids=["rows", "columns"])
def test_each_layer_is_gathered_in_forward_and_backward(spec: P) -> None:
    before, given = program(spec=spec)
    after = sharded(before)
    assert programs.sizes(after, "all-gather") == [[WIDTH, WIDTH]] * 2
    assert depth(after, "all-gather") == [2, 2], "in a loop over layers, in the loop over micro-batches"
    assert whole_stacks(after) == 0
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def recomputed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Backward computes forward again."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None))
    return jnp.sum(lax.scan(layer, x, w)[0])


def test_with_recomputation_backward_gathers_once() -> None:
    before, given = program(recomputed)
    after = sharded(before)
    assert depth(after, "all-gather") == [2, 2]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def in_bfloat16(x: jax.Array, w: jax.Array) -> jax.Array:
    layer = lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None)  # noqa: E731
    return jnp.sum(lax.scan(layer, x.astype(jnp.bfloat16), w)[0].astype(jnp.float32))


def once_in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return in_bfloat16(x, w) + jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])


def test_each_reader_gathers_in_its_own_type() -> None:
    """All convert: once, in front of everything. Otherwise, each layer that converts gathers what it has converted.

    JAX keeps what a layer has converted for backward. These are shards, too.
    """
    before, given = program(in_bfloat16)
    after = sharded(before)
    assert {i.shape.element_type for i in programs.instructions(after, "all-gather")} == {shapes.BF16}
    assert depth(after, "all-gather") == [2, 2] and whole_stacks(after, shapes.BF16) == 0
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)
    before, given = program(once_in_float32)
    after = sharded(before)
    types = [i.shape.element_type for i in programs.instructions(after, "all-gather")]
    assert sorted(map(types.count, (shapes.BF16, shapes.F32))) == [2, 2] and whole_stacks(after) == 0
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_layers_in_groups() -> None:
    before, given = program(in_groups)
    after = sharded(before)
    assert depth(after, "all-gather") == [3, 3] and whole_stacks(after) == 0
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
    for n in range(LAYERS):
        x = jnp.tanh(x @ w[n])
    return jnp.sum(x)


def test_unrolled_layers_are_gathered_one_by_one() -> None:
    before, given = program(unrolled)
    after = sharded(before)
    assert programs.sizes(after, "all-gather") == [[WIDTH, WIDTH]] * LAYERS and depth(after, "all-gather") == [1] * 4
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def all_layers_at_once(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.einsum("bi,lij->blj", x, w)))


def changed_in_the_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(carry: tuple[jax.Array, jax.Array], n: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, w = carry
        return (jnp.tanh(x @ w[n]), w * 1.5), None

    return jnp.sum(lax.scan(layer, (x, w), jnp.arange(LAYERS))[0][0])


@pytest.mark.parametrize("loss", [all_layers_at_once, changed_in_the_loop], ids=lambda loss: loss.__name__)
def test_what_is_read_whole_is_gathered_in_each_micro_batch(loss: Loss) -> None:
    before, given = program(loss)
    after = sharded(before)
    assert programs.sizes(after, "all-gather") == [manual_steps.STACK] and depth(after, "all-gather") == [1]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-5)


@pytest.mark.parametrize("loss", [programs.stack, in_bfloat16], ids=["float32", "bfloat16"])
def test_under_automatic_sharding_a_constraint_gathers_each_layer(loss: Loss) -> None:
    before, given = program(loss, manual=False)
    after = sharded(before)
    compiled = programs.partitioned(after).computations
    gathered = [list(i.shape.dimensions) for c in compiled for i in c.instructions if i.opcode == "all-gather"]
    assert gathered and manual_steps.STACK not in gathered
    constraints = [i for i in programs.instructions(after, "custom-call") if is_sharding_constraint(i)]
    found = [split.over for i in constraints if len(i.shape.dimensions) == 2 and (split := stated(i))]
    assert found == [[("dp",), ()], [(), ()]] * 2, "forward and backward: a shard, and the whole layer"
    programs.same(before.compile()(*given), after.compile()(*given), 1e-5)
