"""What a layer needs first is gathered while the layer before it runs: the same numbers, and no other gather moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.sharding.states.parameter_prefetch import ParameterPrefetch
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.manual_steps import Loss, at_once, depth, program, sharded
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

ANY = ParameterPrefetch(least=0)


def test_under_automatic_sharding_too() -> None:
    lowered, given = program(manual=False)
    after, report = programs.changed(sharded(lowered), ANY)
    assert [note.facts["gathers"] for note in report.notes] == [1, 1]
    compiled = programs.partitioned(after).computations
    gathers = [i for c in compiled for i in c.instructions if i.opcode == "all-gather"]
    assert len(gathers) == 4 and all(i.shape.dimensions[-2:] == [WIDTH, WIDTH] for i in gathers)
    programs.same(lowered.compile()(*given), after.compile()(*given), 1e-5)


def backwards(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, reverse=True)[0]))


@pytest.mark.parametrize("loss", [programs.stack, backwards], ids=["forwards", "backwards"])
def test_each_layer_is_gathered_while_the_one_before_it_runs(loss: Loss) -> None:
    """In forward and in backward. The first layers are gathered before the loops."""
    lowered, given = program(loss)
    split = sharded(lowered)
    after, report = programs.changed(split, ANY)
    assert [note.message for note in report.notes] == ["parameters gathered a layer ahead"] * 2
    assert depth(after, "all-gather") == [1, 1, 2, 2]
    for product in programs.instructions(after, "dot"):
        assert not any(operand.opcode == "all-gather" for operand in product.operands), "it reads what the loop carries"
    programs.same(split.compile()(*given), after.compile()(*given))
    programs.same(lowered.compile()(*given), after.compile()(*given), 1e-6)


def test_what_a_product_hides_is_gathered_in_its_own_layer() -> None:
    def layer(x: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(layer, x, w.reshape(LAYERS // 2, 2, WIDTH, WIDTH))[0])

    lowered, given = program(loss, at_once)
    split = sharded(lowered)
    after, report = programs.changed(split, ANY)
    assert report.outcome == CHANGED
    assert depth(split, "all-gather") == [1] * 4, "two layers in each loop"
    assert depth(after, "all-gather") == [0, 0, *[1] * 4], "one of both, in each loop"
    programs.same(split.compile()(*given), after.compile()(*given))


def test_small_layers_stay() -> None:
    split = sharded(program()[0])
    size = 4 * WIDTH * WIDTH
    assert programs.changed(split, ParameterPrefetch(least=size + 1))[1].outcome == UNCHANGED
    assert programs.changed(split, ParameterPrefetch(least=size))[1].outcome == CHANGED


def every_second(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda x, n: (jnp.tanh(x @ w[2 * n]), None), x, jnp.arange(LAYERS // 2))[0])


def by_the_data(x: jax.Array, w: jax.Array) -> jax.Array:
    """Which layer comes next depends on the batch."""
    layer = lambda x, _: (jnp.tanh(x @ w[jnp.int32(jnp.abs(x[0, 0]) * LAYERS)]), None)  # noqa: E731
    return jnp.sum(lax.scan(layer, x, None, length=LAYERS)[0])


@pytest.mark.parametrize("loss", [every_second, by_the_data], ids=lambda loss: loss.__name__)
def test_layers_in_another_order_are_gathered_when_they_are_needed(loss: Loss) -> None:
    """In forward. For backward, JAX keeps what forward has read, in order."""
    after, _ = programs.changed(sharded(program(loss, at_once)[0]), ANY)
    assert depth(after, "all-gather") == [0, 1, 1]


def test_whole_stacks_have_nothing_to_prefetch() -> None:
    assert programs.changed(sharded(program()[0], gradients=("dp",)), ANY)[1].outcome == UNCHANGED
