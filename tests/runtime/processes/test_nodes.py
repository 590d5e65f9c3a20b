"""Devices that share a node, and processes that pose as nodes."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.processes.nodes import emulated_nodes, gpus_per_node, nodes_of
from dhelix.tests.runtime import job


def test_nodes_are_processes_or_so_many_devices() -> None:
    devices = [SimpleNamespace(id=n, process_index=n // 4) for n in range(8)]
    assert [[d.id for d in node] for node in nodes_of(devices[::-1])] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert len(nodes_of(devices, gpus_per_node=2)) == 4
    one_per_process = [SimpleNamespace(id=n, process_index=n) for n in range(4)]
    assert len(nodes_of(one_per_process, gpus_per_node=4)) == 1
    with pytest.raises(DhelixError, match=r"nodes have \[4, 3\] GPUs"):
        nodes_of(devices[:-1])


def devices(processes: list[int], slices: list[int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(process_index=p, slice_index=s) for p, s in zip(processes, slices, strict=True)]


@pytest.mark.parametrize(
    ("processes", "slices", "expected"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], 2),
        ([0, 1, 2, 3], [0, 0, 1, 1], 2),  # a process for each GPU
        ([0, 0, 1, 1], [0, 0, 0, 0], 0),  # two processes of one host
        ([0, 1, 0, 1], [0, 1, 0, 1], 0),  # the mesh alternates between hosts
        ([0, 0, 1], [0, 0, 1], 0),
        ([], [], 0),
    ],
)
def test_a_job_s_nodes_are_hosts(
    processes: list[int], slices: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert gpus_per_node(devices(processes, slices)) == expected


def test_devices_without_slices_are_told_apart_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert gpus_per_node([SimpleNamespace(process_index=n // 4) for n in range(8)]) == 4


def test_processes_that_pose_as_nodes_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setenv("NCCL_HOSTID", "dhelix-node-1")
    assert gpus_per_node(devices([0, 0, 1, 1], [0, 0, 0, 0])) == 2


def test_nodes_of_gpus_that_need_not_exist() -> None:
    assert gpus_per_node(deviceless.topology("h200", "1x2x4").devices) == 4
    assert gpus_per_node(deviceless.topology("h200", "1x1x4").devices) == 0
    assert gpus_per_node(jax.devices()) == 0, "one process: one node"


_PROCESS = """
import sys
import jax
from dhelix.profiles.hardware import H200
from dhelix.runtime.processes import nodes
from dhelix.runtime.profiling import collective_tables

nodes.emulated_nodes(2, 2, int(sys.argv[2]))[int(sys.argv[1])].initialize()
keys = collective_tables.tables(jax.devices(), kinds=["all-reduce", "collective-permute"], sizes=(1024,))
for program in collective_tables.programs(keys, jax.devices(), H200):
    if program.takes_part:
        tokens = program.lower().compile()(*program.arguments())
        print(program.grouping, [float(s.data[0]) for s in tokens.addressable_shards])
    else:
        print(program.grouping, "not here")
"""


def test_emulated_nodes() -> None:
    nodes = emulated_nodes(2, 2, 1024)
    assert [node.local_device_ids for node in nodes] == [(0, 1), (2, 3)]
    assert len({node.environment["NCCL_HOSTID"] for node in nodes}) == 2
    told = job.outputs(_PROCESS, devices=2, environments=[node.environment for node in nodes])
    first, second = ([li for li in output.splitlines() if "groups=" in li] for output in told)
    where = ["1x2 groups=1", "1x2 groups=2", "2x1 groups=1", "2x1 groups=2", "2x2 groups=1"]
    assert [line.partition(" [")[0] for line in first] == where
    assert second[2] == "2x1 groups=1 not here" and len(second) == 5
