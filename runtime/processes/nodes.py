"""Finds which devices share a node, and emulates several nodes on one machine.

For the emulation, each process poses as a node. NCCL distinguishes hosts by NCCL_HOSTID. Between processes with
different IDs, NCCL does not use NVLink, peer-to-peer access or shared memory. So it uses sockets, here of the loopback
device. NCCL_IB_DISABLE forces sockets even if the machine has a fast network. JAX treats every process as a host
anyway. This example starts the processes:

    for node in emulated_nodes(2, 2, port):                     # two nodes of two GPUs, on a machine of four
        Popen([...], env={**os.environ, **node.environment})    # runs node.initialize(), then as on any cluster

On real nodes, the job's launcher names the coordinator and sets none of these variables. The program is the same.
`profiles.hardware` describes a machine with two emulated nodes as "<GPU>-two-nodes".
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
    """Groups devices by node.

    Args:
      devices: devices such as `jax.devices()`, in any order.
      gpus_per_node: number of GPUs per node. Devices are ordered by process and id, and each group of this many
        consecutive devices is a node. None: each process is a node, as in jobs with one process per host and with
        `emulated_nodes`.

    Raises:
      DhelixError: the nodes have different sizes.
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
    """Returns the number of GPUs per node, if the devices of a program span several nodes evenly; otherwise 0.

    Evenly means that the devices are ordered node by node, with equal numbers of GPUs per node.

    In a job of several processes, JAX calls the GPUs of one host a slice, so each slice is a node. In two cases, one
    slice may hold several nodes, so each process is a node instead: emulated nodes, which share one host, and GPUs that
    are not attached (`deviceless`).
    """
    of_job = jax.process_count() > 1 and _POSED_AS not in os.environ
    # Devices other than GPUs may lack `slice_index`.
    nodes = [getattr(d, "slice_index", d.process_index) if of_job else d.process_index for d in devices]
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    several = len(runs) == len(set(nodes)) > 1
    return runs[0] if several and len(set(runs)) == 1 else 0


@dataclass(frozen=True)
class NodeProcess:
    """One of several processes on one machine. Each of these processes poses as a node.

    Attributes:
      coordinator: address of the coordinator.
      processes: number of processes in the job.
      process: number of this process.
      environment: variables to set before the process starts.
      local_device_ids: the GPUs of this machine that belong to this node.
    """

    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...]
    environment: Mapping[str, str]

    def initialize(self) -> None:
        """Joins the job. The started process must call this method before JAX looks for devices."""
        jax.distributed.initialize(
            self.coordinator, self.processes, self.process, local_device_ids=list(self.local_device_ids)
        )


def emulated_nodes(nodes: int, gpus_per_node: int, port: int) -> list[NodeProcess]:
    """Describes the processes to start on one machine so that NCCL treats each process as a node.

    Traffic between these processes uses TCP.

    Args:
      nodes: number of nodes; each node is one process.
      gpus_per_node: GPUs of each node.
      port: a free port of this machine, for the coordinator.
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
