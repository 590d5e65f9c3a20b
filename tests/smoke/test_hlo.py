"""The HLO library reads, checks and writes modules of this jaxlib, and XLA reads them again."""

import jax
import jax.numpy as jnp
import pytest

from dhelix.passes.hlo import HloModule, WhileLoop, verify
from dhelix.runtime.compiler import lowering

pytestmark = pytest.mark.smoke


def _layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0].sum()


@pytest.fixture(scope="module")
def lowered() -> jax.stages.Lowered:
    return jax.jit(jax.grad(_layers)).lower(jnp.zeros((5, 8, 8)), jnp.zeros((4, 8)))


def test_an_unchanged_module_keeps_its_bytes(lowered: jax.stages.Lowered) -> None:
    serialized = lowering.hlo_bytes(lowered)
    module = HloModule.from_bytes(serialized)
    verify(module)
    assert module.to_bytes() == serialized


def test_loops_have_their_trip_counts(lowered: jax.stages.Lowered) -> None:
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    loops = [WhileLoop(i) for c in module.computations for i in c.instructions if i.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [5, 5]


def test_text_and_bytes_say_the_same(lowered: jax.stages.Lowered) -> None:
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    again = HloModule.from_text(module.to_text())
    verify(again)
    assert again.instruction_count == module.instruction_count
    assert {i.opcode for c in again.computations for i in c.instructions} == {
        i.opcode for c in module.computations for i in c.instructions
    }
