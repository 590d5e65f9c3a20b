"""Collective tables: the measured collectives, that XLA does not change their programs, and the programs' results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective, is_start
from dhelix.passes.hlo import HloModule
from dhelix.profiles import keys as profile_keys
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.profiling import collective_tables
from dhelix.runtime.profiling.collective_tables import Grouping, TableProgram

KIB = 1024
ON_CPU = tuple(kind for kind in collective_tables.KINDS if kind != "collective-broadcast")  # XLA:CPU has none


def _devices(nodes: int, gpus_per_node: int) -> list[Any]:
    return [SimpleNamespace(id=n, process_index=n // gpus_per_node) for n in range(nodes * gpus_per_node)]


def _programs(devices: Any, gpus_per_node: int | None = None, **options: Any) -> list[TableProgram]:
    keys = collective_tables.tables(devices, gpus_per_node, **options)
    return collective_tables.programs(keys, devices, H200, gpus_per_node, budget_seconds=0)


def _device_bytes(compiled: jax.stages.Compiled) -> int:
    stats: Any = compiled.memory_analysis()
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "expected"),
    [
        (1, 2, ["2x1 groups=1"]),
        (1, 4, ["2x1 groups=1", "2x1 groups=2", "4x1 groups=1"]),
        (2, 2, ["2x1 groups=1", "2x1 groups=2", "1x2 groups=1", "1x2 groups=2", "2x2 groups=1"]),
        (3, 1, ["1x3 groups=1"]),
        (1, 6, ["2x1 groups=1", "2x1 groups=3", "3x1 groups=1", "3x1 groups=2", "6x1 groups=1"]),
    ],
)
def test_groupings(nodes: int, gpus_per_node: int, expected: list[str]) -> None:
    assert [str(g) for g in collective_tables.groupings(nodes, gpus_per_node)] == expected


def test_tables_cover_every_kind_size_and_grouping() -> None:
    keys = collective_tables.tables(_devices(1, 4), implementation="symmetric")
    assert len(keys) == len(set(keys)) == 6 * 15 * 3
    assert {key.bytes for key in keys} == {64 * KIB * 2**n for n in range(15)}
    assert {key.implementation for key in keys} == {"symmetric"}
    assert set(collective_tables.KINDS) < set(profile_keys.COLLECTIVE_KINDS)


def test_sizes_that_a_group_cannot_share_are_rounded_down() -> None:
    keys = collective_tables.tables(_devices(1, 3), kinds=["all-gather"], sizes=[16, 100, 110, 64 * KIB])
    assert [key.bytes for key in keys] == [96, 64 * KIB - 16]


def test_bad_input_is_explained() -> None:
    with pytest.raises(DhelixError, match="need at least two GPUs"):
        collective_tables.tables(_devices(1, 1))
    with pytest.raises(DhelixError, match=r"no tables for \['broadcast'\]"):
        collective_tables.tables(_devices(1, 2), kinds=["broadcast", "all-gather"])
    for key in (CollectiveKey("all-reduce", 64 * KIB, 8), CollectiveKey("all-reduce", 64 * KIB, 2, 2, 2)):
        with pytest.raises(DhelixError, match="do not fit: there are 4 GPUs on each of 1 nodes"):
            collective_tables.programs([key], _devices(1, 4), H200)


def test_repeats_keep_to_the_budget_and_skip_nothing() -> None:
    keys = collective_tables.tables(_devices(2, 2))
    slow = replace(H200, inter_bandwidth=1e9)
    plenty = collective_tables.repeats_for(keys, slow, 1e6)
    assert set(plenty.values()) == {collective_tables.MAX_REPEATS}
    some = collective_tables.repeats_for(keys[::-1], slow, 30)
    across = {n: some[CollectiveKey("all-reduce", n, 1, 2)] for n in collective_tables.SIZES}
    assert across[64 * KIB] == collective_tables.MAX_REPEATS > across[1024**3] >= collective_tables.MIN_REPEATS
    assert some == collective_tables.repeats_for(keys, slow, 30)
    none = collective_tables.repeats_for(keys, slow, 0)
    assert set(none) == set(keys) and set(none.values()) == {collective_tables.MIN_REPEATS}


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", ["1x1x4", "1x2x2", "2x1x2"])
def test_programs_on_gpus_hold_exactly_what_the_keys_say(shape: str) -> None:
    """In every grouping. `instances` checks kind, bytes and groups, and that nothing overlaps."""
    devices = deviceless.topology("h200", shape).devices
    programs = _programs(devices, sizes=(64 * KIB, 1024**3))
    assert len(programs) == {"1x1x4": 3}.get(shape, 5)
    for program in programs:
        compiled = deviceless.compile(program.lower())
        module = lowering.compiled_module(compiled)
        assert module.name == f"jit_{program.name}"
        instances = program.instances(module)
        collectives = [i for i in module.schedule[module.entry] if find_collective(i)]
        syncs = [i for i in collectives if i.name not in instances]
        expected = sum(program.repeats.values())
        assert len(instances) == len(set(instances.values())) == expected == len(collectives) - len(syncs)
        assert len(syncs) == expected and all("pmax" in i.op_name for i in syncs)
        assert _device_bytes(compiled) < 3.1 * 1024**3


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "flag",
    [
        "xla_gpu_enable_nccl_user_buffers",
        "xla_gpu_experimental_enable_nccl_symmetric_buffers",
        "xla_gpu_enable_latency_hiding_scheduler",
    ],
)
def test_launch_settings_change_no_collective(flag: str) -> None:
    devices = deviceless.topology("h200", "1x1x4").devices
    for program in _programs(devices, sizes=(64 * KIB, 1024**3)):
        compiled = deviceless.compile(program.lower(), **{flag: True})
        instances = program.instances(lowering.compiled_module(compiled))
        assert len(instances) == sum(program.repeats.values())
        assert _device_bytes(compiled) < 7 * 1024**3


@pytest.mark.deviceless
def test_programs_are_identical_whoever_builds_them() -> None:
    devices = deviceless.topology("h200", "1x2x2").devices
    first, second = (
        [p.lower().as_text() for p in _programs(order, sizes=(64 * KIB,))] for order in (devices, devices[::-1])
    )
    assert first == second


def _small_program() -> tuple[TableProgram, HloModule]:
    devices = deviceless.topology("h200", "1x1x4").devices
    key = CollectiveKey("all-gather", 64 * KIB, 4)
    (program,) = collective_tables.programs([key], devices, H200)
    program = replace(program, repeats={key: 2})
    return program, lowering.compiled_module(deviceless.compile(program.lower()))


@pytest.mark.deviceless
def test_a_changed_program_is_refused() -> None:
    program, module = _small_program()
    key = CollectiveKey("all-gather", 64 * KIB, 4)
    instances = program.instances(module)
    assert sorted(instances.values()) == [(key, 0), (key, 1)]

    with pytest.raises(DhelixError, match="run 2 of all-gather 65536B 4x1 groups=1 nccl is there 0 times"):
        replace(program, repeats={key: 3}).instances(module)
    for other in (replace(key, bytes=128 * KIB), replace(key, kind="all-to-all")):
        with pytest.raises(DhelixError, match=f"is not {other}"):
            replace(program, repeats={other: 2}).instances(module)
    halves = TableProgram(Grouping(2, 1, 2), program.mesh, {replace(key, gpus_per_node=2, groups=2): 2})
    with pytest.raises(DhelixError, match="is not all-gather 65536B 2x1 groups=2"):
        halves.instances(module)

    with pytest.raises(DhelixError, match="is of another program"):
        replace(program, repeats={}).instances(module)

    first = next(i for i in module.entry.instructions if instances.get(i.name) == (key, 0))
    first.proto.metadata.op_name = first.op_name.replace("_0/", "_1/")  # as if run 1 were there twice
    with pytest.raises(DhelixError, match="run 0 of .* is there 0 times; measure without XLA_FLAGS"):
        program.instances(module)


_ASYNC = """
HloModule m, is_scheduled=true, num_partitions=4

ENTRY main {
  p = bf16[8192]{0} parameter(0)
  start = (bf16[8192]{0}, bf16[32768]{0}) all-gather-start(p), dimensions={0}, channel_id=1,
    replica_groups={{0,1,2,3}}, use_global_device_ids=true, metadata={op_name="jit(f)/table_0_0/all_gather"}
  BETWEEN
  ROOT done = bf16[32768]{0} all-gather-done(start)
}
"""


@pytest.mark.deviceless
def test_async_collectives_may_not_overlap() -> None:
    program, _ = _small_program()
    (key,) = program.keys
    program = replace(program, repeats={key: 1})
    alone = HloModule.from_text(_ASYNC.replace("BETWEEN", ""))
    start = next(i for i in alone.entry.instructions if is_start(i))
    assert program.instances(alone) == {start.name: (key, 0)}
    with pytest.raises(DhelixError, match="twice.* overlaps with another"):
        program.instances(HloModule.from_text(_ASYNC.replace("BETWEEN", "twice = bf16[8192]{0} add(p, p)")))


def _first_elements(kind: str, operands: np.ndarray) -> np.ndarray:
    """The first element of each member's result, for operands of shape [members, elements]."""
    size = len(operands)
    scattered = operands[:, :: operands.shape[1] // size]  # each member's share begins here
    return {
        "all-gather": np.full(size, operands[0, 0]),
        "reduce-scatter": scattered.sum(0),
        "all-reduce": np.full(size, operands[:, 0].sum()),
        "all-to-all": scattered[0],
        "collective-permute": np.roll(operands[:, 0], 1),
    }[kind]


def _expected(program: TableProgram, arguments: tuple[jax.Array, ...]) -> np.ndarray:
    groups, size = program.mesh.devices.shape
    operands = {a.size // program.mesh.size: np.asarray(a, np.float32).reshape(groups, size, -1) for a in arguments}
    tokens = np.zeros((groups, size))
    for repeat in range(max(program.repeats.values())):
        for key in (key for key, count in program.repeats.items() if repeat < count):
            tokens[:] = tokens.max()
            elements = key.bytes // 2 // (size if key.kind == "all-gather" else 1)
            tokens += [_first_elements(key.kind, group) for group in operands[elements]]
    return tokens.ravel()


def test_programs_compute_what_the_collectives_should() -> None:
    devices = jax.devices()
    programs = _programs(devices, gpus_per_node=4, kinds=ON_CPU, sizes=(4096,))
    assert {str(p.grouping) for p in programs} >= {"2x1 groups=4", "1x2 groups=4", "2x2 groups=1", "4x2 groups=1"}
    for program in programs:
        program = replace(program, repeats={key: 1 + n % 2 for n, key in enumerate(program.repeats)})
        assert program.takes_part
        arguments = program.arguments()
        assert all(np.std(np.asarray(a, np.float32)) > 0.5 for a in arguments)
        tokens = program.lower().compile()(*arguments)
        # bf16 sums of up to 8 numbers below 1, up to 8 times
        np.testing.assert_allclose(np.asarray(tokens), _expected(program, arguments), atol=0.15)


def test_time_of_a_run_is_that_of_the_gpu_that_came_last_in_the_slowest_group() -> None:
    two = next(p for p in _programs(jax.devices()[:4], sizes=(1024,)) if p.grouping.groups == 2)
    gather, broadcast = (CollectiveKey(kind, 1024, 2, groups=2) for kind in ("all-gather", "collective-broadcast"))
    durations = {0: 5.0, 1: 2.0, 2: 3.0, 3: 9.0}
    assert (two.seconds(gather, durations), two.seconds(broadcast, durations)) == (3.0, 9.0)
    assert two.seconds(gather, {0: 5.0, 1: 2.0}) == 2.0  # a host that sees only one group


def test_groups_across_nodes_take_one_gpu_or_more_of_each() -> None:
    programs = _programs(jax.devices(), gpus_per_node=4, kinds=["all-reduce"], sizes=(1024,))
    groups = {str(p.grouping): p.groups for p in programs}
    assert groups["1x2 groups=4"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups["2x2 groups=2"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert groups["2x1 groups=1"] == ((0, 1),)
