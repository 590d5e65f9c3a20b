"""Parameters that all readers convert are converted before they are gathered, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

type Loss = Callable[[jax.Array, jax.Array], jax.Array]


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w.astype(jnp.bfloat16)), None


def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each layer converts its parameter."""
    return jnp.sum(lax.scan(layer, x.astype(jnp.bfloat16), w)[0].astype(jnp.float32))


def program(loss: Loss, manual: bool = False) -> tuple[jax.stages.Lowered, tuple[jax.Array, ...]]:
    on = programs.mesh(dp=8)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(jax.grad(loss, argnums=1)(x, w), "dp")

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        if not manual:
            return programs.momentum(w, m, jax.grad(loss, argnums=1)(x, w))
        mapped = jax.shard_map(local, mesh=on, in_specs=(P("dp"), P()), out_specs=P(), check_vma=False)
        return programs.momentum(w, m, mapped(x, w))

    size, spec = (LAYERS, WIDTH, WIDTH), P(None, "dp")
    state = programs.placed(on, spec, *size), programs.placed(on, spec, *size, seed=1)
    given = *state, programs.placed(on, P("dp"), 8, WIDTH, seed=2)
    return jax.jit(step).lower(*given), given


def gathered_types(lowered: jax.stages.Lowered) -> list[int]:
    """The element types of constraints that gather a parameter."""
    found = [i for i in programs.module(lowered).entry.instructions if is_sharding_constraint(i)]
    whole = [i for i in found if (split := stated(i)) and not any(split.axes)]
    return [i.shape.element_type for i in whole if i.operands[0].opcode != "get-tuple-element"]  # not accumulators


def test_a_parameter_that_layers_convert_is_gathered_in_their_type() -> None:
    lowered, given = program(narrow)
    after, _ = programs.changed(lowered, programs.state_sharding())
    assert gathered_types(after) == [shapes.BF16]
    results = after.compile()(*given)
    assert [r.dtype for r in results] == [jnp.float32] * 2, "the state keeps its type"
    programs.same(lowered.compile()(*given), results, 1e-2)  # replicas add up bf16 in another order


def test_a_shard_map_gathers_in_the_type_of_its_readers() -> None:
    lowered, given = program(narrow, manual=True)
    after, _ = programs.changed(lowered, programs.state_sharding())
    (gather,) = programs.instructions(after, "all-gather")
    assert gather.shape.element_type == shapes.BF16 and list(gather.shape.dimensions) == [LAYERS, WIDTH, WIDTH]
    programs.same(lowered.compile()(*given), after.compile()(*given), 1e-6)


def also_read_whole(x: jax.Array, w: jax.Array) -> jax.Array:
    return narrow(x, w) + jnp.sum(jnp.sin(x @ w[0]))


def not_converted(x: jax.Array, w: jax.Array) -> jax.Array:
    return programs.stack(x, w)


def converted_to_two_types(x: jax.Array, w: jax.Array) -> jax.Array:
    half = jnp.float16
    return narrow(x, w) + jnp.sum(jnp.sin(x.astype(half) @ w[0].astype(half)).astype(jnp.float32))


def computed_first(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda x, w: layer(x, jnp.exp(w)), x.astype(jnp.bfloat16), w)[0].astype(jnp.float32))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "shard_map"])
@pytest.mark.parametrize(
    "loss", [also_read_whole, not_converted, converted_to_two_types, computed_first], ids=lambda f: f.__name__
)
def test_a_parameter_that_is_read_in_float32_stays(loss: Loss, manual: bool) -> None:
    after, _ = programs.changed(program(loss, manual)[0], programs.state_sharding())
    types = [i.shape.element_type for i in programs.instructions(after, "all-gather")]
    assert (types if manual else gathered_types(after)) == [shapes.F32]


def test_unrolled_layers_too() -> None:
    def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        for n in range(LAYERS):
            x, _ = layer(x, w[n])
        return jnp.sum(x.astype(jnp.float32))

    after, _ = programs.changed(program(unrolled)[0], programs.state_sharding())
    assert gathered_types(after) == [shapes.BF16]
