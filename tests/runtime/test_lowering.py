"""A round trip of a lowered program through HLO changes nothing that a user could see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes.hlo import HloModule
from dhelix.runtime import lowering
from tests.runtime.lowering_programs import PROGRAMS, array, keywords, mesh, single_result


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _round_trip(lowered: jax.stages.Lowered, name: str | None = None) -> jax.stages.Lowered:
    return lowering.with_hlo(lowered, lowering.hlo_bytes(lowered), name)


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    stats = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    return {name: getattr(stats, f"{name}_size_in_bytes") for name in names}


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_trip_keeps_results_shardings_donation_and_memory(name: str) -> None:
    jitted, arguments = PROGRAMS[name]()
    plain = jitted.lower(*arguments, **keywords(name))
    before = plain.as_text()
    changed = _round_trip(plain, "jit_step__dhelix_0123456789abcdef")
    assert plain.as_text() == before
    assert changed.args_info == plain.args_info and changed.out_tree == plain.out_tree

    expected_arguments, actual_arguments = _copy(arguments), _copy(arguments)
    compiled, recompiled = plain.compile(), changed.compile()
    expected = compiled(*expected_arguments, **keywords(name))
    actual = recompiled(*actual_arguments, **keywords(name))
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert want.sharding == got.sharding
        assert want.weak_type == got.weak_type
        np.testing.assert_array_equal(want, got)
    assert _memory(recompiled) == _memory(compiled)
    assert recompiled.input_shardings == compiled.input_shardings
    for want, got in zip(jax.tree.leaves(expected_arguments), jax.tree.leaves(actual_arguments), strict=True):
        assert want.is_deleted() == got.is_deleted()
