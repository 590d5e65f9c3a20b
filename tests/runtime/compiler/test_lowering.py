"""A round trip of a lowered program through HLO changes nothing that a user can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.shardy_import import ShardyImportError
from dhelix.runtime.compiler import lowering
from dhelix.tests.runtime.lowering_programs import PROGRAMS, array, keywords, mesh, single_result


@pytest.fixture
def configure() -> Iterator[Callable[[str, Any], None]]:
    """Sets an option of jax.config until the end of the test."""
    before: dict[str, Any] = {}

    def update(name: str, value: Any) -> None:
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


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
    assert lowering.module_name(plain) == HloModule.from_bytes(lowering.hlo_bytes(plain)).name
    changed = _round_trip(plain, "jit_step__dhelix_0123456789abcdef")
    assert lowering.module_name(changed) == "jit_step__dhelix_0123456789abcdef"
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


def test_constants_hoisted_out_of_the_program_stay_with_it(configure: Callable[[str, Any], None]) -> None:
    configure("jax_use_simplified_jaxpr_constants", True)
    table = array(8, 8)
    plain = jax.jit(lambda x: x @ table).lower(array(8, 8))
    np.testing.assert_array_equal(_round_trip(plain).compile()(array(8, 8)), plain.compile()(array(8, 8)))


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_memory_kind_of_results_is_kept(kind: str) -> None:
    sharding = NamedSharding(mesh(), P("dp", "tp"), memory_kind=kind)
    plain = jax.jit(lambda x: x * 2, out_shardings=sharding).lower(array(8, 16))
    assert _round_trip(plain).compile()(array(8, 16)).sharding == sharding


def test_shardy_operations_come_back() -> None:
    jitted, arguments = PROGRAMS["nested_manual"]()
    plain = jitted.lower(*arguments)
    text, once = plain.as_text(), _round_trip(plain).as_text()
    for operation in ("sdy.manual_computation", "sdy.sharding_constraint", "sdy.mesh", "custom_call"):
        assert once.count(operation) == text.count(operation), operation


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_lowered_for_gspmd_keep_their_shardings(name: str, configure: Callable[[str, Any], None]) -> None:
    configure("jax_use_shardy_partitioner", False)
    jitted, arguments = PROGRAMS[name]()
    plain = jitted.lower(*arguments, **keywords(name))
    text, once = plain.as_text(), _round_trip(plain).as_text()
    assert once.count("@Sharding") == text.count("@Sharding")
    assert once.count("mhlo.sharding") >= text.count("@Sharding")


def test_name_of_the_module_is_what_passes_see() -> None:
    jitted, arguments = single_result()
    named = _round_trip(jitted.lower(*arguments), "jit_f__dhelix_1")
    assert HloModule.from_bytes(lowering.hlo_bytes(named)).name == "jit_f__dhelix_1"
    seen: list[str] = []
    xla.register_hlo_module_transformation(
        lambda proto: seen.append(HloModule.from_bytes(proto).name), name="see", platforms="cpu"
    )
    try:
        named.compile()
    finally:
        xla.clear_hlo_module_transformation("see", platforms="cpu")
    assert seen == ["jit_f__dhelix_1"]


def test_name_of_the_module_keys_the_compilation_cache(tmp_path: Path, configure: Callable[[str, Any], None]) -> None:
    configure("jax_compilation_cache_dir", str(tmp_path))
    configure("jax_persistent_cache_min_compile_time_secs", 0)
    configure("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    jitted, arguments = single_result()
    plain = jitted.lower(*arguments)
    for digit in "1", "2", "2":
        _round_trip(plain, f"jit_f__dhelix_{digit}").compile()
    entries = sorted(path.name.partition("-")[0] for path in tmp_path.glob("*-cache"))
    compilation_cache.reset_cache()
    assert entries == ["jit_f__dhelix_1", "jit_f__dhelix_2"]


def test_bytes_that_are_not_a_module_are_refused() -> None:
    jitted, arguments = single_result()
    with pytest.raises(lowering.LoweringError, match="cannot be turned back into StableHLO"):
        lowering.with_hlo(jitted.lower(*arguments), b"not a module")


def test_what_does_not_parse_is_said() -> None:
    scalars = "HloModule m\nENTRY e { a = s32[] parameter(0)\n  ROOT c = s32[2] concatenate(a, a), dimensions={0} }"
    jitted, arguments = single_result()
    with pytest.raises(lowering.LoweringError, match="rank-0 values cannot be concatenated"):
        lowering.with_hlo(jitted.lower(*arguments), HloModule.from_text(scalars).to_bytes())


def test_changed_signature_is_refused() -> None:
    other = jax.jit(lambda x: (x, x)).lower(array(8, 8))
    jitted, arguments = single_result()
    with pytest.raises(lowering.LoweringError, match="changed the signature"):
        lowering.with_hlo(jitted.lower(*arguments), lowering.hlo_bytes(other))


def test_what_is_not_lowered_is_refused() -> None:
    with pytest.raises(DhelixError, match=r"expected the result of jax.jit\(f\).lower"):
        lowering.hlo_bytes(jax.jit(jnp.tanh))  # pyright: ignore[reportArgumentType]


def test_manual_computation_that_a_pass_took_apart_is_refused() -> None:
    jitted, arguments = PROGRAMS["manual_step"]()
    plain = jitted.lower(*arguments)
    broken = lowering.hlo_bytes(plain).replace(b"xla.sdy.GlobalToLocalShape", b"xla.sdy.GlobalToOtherShape")
    with pytest.raises(ShardyImportError, match="separated the shard_map"):
        lowering.with_hlo(plain, broken)
