"""Nodes: which devices share one, and one machine that poses as several.

NCCL tells hosts apart by NCCL_HOSTID. Processes with different ones do not use NVLink, peer-to-peer access or
shared memory between them, so that sockets are left (NCCL_IB_DISABLE: where there is a fast network too), here of
the loopback device. JAX takes every process for a host anyway:

    for node in emulated_nodes(2, 2, port):                     # two nodes of two GPUs, out of four of one machine
        Popen([...], env={**os.environ, **node.environment})    # in it: node.initialize(), then as on any cluster

Nothing else differs from real nodes. There the job's launcher names the coordinator, and sets none of these
variables. On a server of H200s, steps spent on 2x2 groups what 9 GB/s per GPU would: to the collective tables,
`dataclasses.replace(H200, inter_bandwidth=4.5e9)` describes it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from dhelix.errors import DhelixError

_POSED_AS = "NCCL_HOSTID"


def nodes_of(devices: Sequence[Any], gpus_per_node: int | None = None) -> list[list[Any]]:
    """The devices node by node.

    Args:
      devices: as of `jax.devices()`, in any order.
      gpus_per_node: None if each process is a node, as with the usual one process per host and with
        `emulated_nodes`; otherwise so many devices after each other are one.

    Raises:
      DhelixError: nodes of different size.
    """
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    if gpus_per_node is None:
        nodes = [list(node) for _, node in itertools.groupby(ordered, lambda d: d.process_index)]
    else:
        nodes = [list(node) for node in itertools.batched(ordered, gpus_per_node)]
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        raise DhelixError(f"nodes have {sizes} GPUs; use the same number of GPUs on each")
    return nodes


def gpus_per_node(devices: Sequence[Any]) -> int:
    """GPUs of each of several nodes that a program's devices stand on, node by node in the program's order. 0: they are
    of one node, or stand otherwise.

    In a job of several processes JAX calls a host's GPUs a slice. Processes that pose as nodes share their host, and of
    GPUs that need not exist (`deviceless`) all hosts may be one slice: there each process is a node.
    """
    of_job = jax.process_count() > 1 and _POSED_AS not in os.environ
    # Devices that are no GPUs may have no slices.
    nodes = [getattr(d, "slice_index", d.process_index) if of_job else d.process_index for d in devices]
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    several = len(runs) == len(set(nodes)) > 1
    return runs[0] if several and len(set(runs)) == 1 else 0


@dataclass(frozen=True)
class NodeProcess:
    """One process of several that pose as nodes.

    Attributes:
      environment: to be set before the process starts.
      local_device_ids: the GPUs of this machine that are this node's.
    """

    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...]
    environment: Mapping[str, str]

    def initialize(self) -> None:
        """In the process itself, before JAX looks for devices."""
        jax.distributed.initialize(
            self.coordinator, self.processes, self.process, local_device_ids=list(self.local_device_ids)
        )


def emulated_nodes(nodes: int, gpus_per_node: int, port: int) -> list[NodeProcess]:
    """How to start processes on one machine that NCCL takes for nodes, so that traffic between them is TCP.

    Args:
      port: a free one of this machine, for the processes to find each other.
    """
    return [
        NodeProcess(
            coordinator=f"127.0.0.1:{port}",
            processes=nodes,
            process=node,
            local_device_ids=tuple(range(node * gpus_per_node, (node + 1) * gpus_per_node)),
            environment=MappingProxyType({
                _POSED_AS: f"dhelix-node-{node}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
            }),
        )
        for node in range(nodes)
    ]  # fmt: skip
