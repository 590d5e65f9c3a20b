"""Source locations of instructions in the user's program."""

import jax
import jax.numpy as jnp

from dhelix.passes.analysis.source import source_of
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler.lowering import hlo_bytes


def doubled_three_times(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, x)


def test_a_loop_is_named_by_file_line_and_function() -> None:
    module = HloModule.from_bytes(hlo_bytes(jax.jit(doubled_three_times).lower(jnp.ones(4))))
    (loop,) = [i for i in module.entry.instructions if i.opcode == "while"]
    line = doubled_three_times.__code__.co_firstlineno + 1
    assert source_of(loop) == f"test_source.py:{line} (doubled_three_times)"


def test_nothing_is_said_where_nothing_is_known() -> None:
    module = HloModule.from_text("HloModule m\nENTRY e { ROOT x = f32[4] parameter(0) }")
    assert source_of(module.entry.root) == ""
