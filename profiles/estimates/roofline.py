"""The roofline: estimates times of operators and collectives from numbers of operations and bytes.

The time of a kernel is a fixed cost plus the longer of two times: the time of the arithmetic at tensor-core speed, and
the time of the memory traffic at memory bandwidth. The time of a collective has three parts: a fixed latency, a latency
for each step of the ring, and the number of bytes that each device sends, divided by the link's bus bandwidth. This is
the usual alpha-beta model. The bus bandwidth, as NCCL defines it, is the same for all kinds of collectives.

All functions for times return seconds.
"""

import math

from dhelix.profiles.hardware import Hardware


def memory_seconds(bytes_moved: float, hardware: Hardware) -> float:
    """Time of a memory-bound kernel that reads and writes `bytes_moved` bytes of device memory."""
    return bytes_moved / (hardware.memory_bandwidth * hardware.memory_efficiency) + hardware.kernel_seconds


def gemm_seconds(flops: float, bytes_moved: float, hardware: Hardware, bits: int = 16) -> float:
    """Time of a matrix product. `bits` is the width of its inputs: half the bits are twice as fast. 32 means TF32."""
    arithmetic = flops / (hardware.peak_flops * hardware.gemm_efficiency * 16 / bits)
    return max(arithmetic + hardware.kernel_seconds, memory_seconds(bytes_moved, hardware))


_HEAD = 64
"""Fused attention computes heads in multiples of so many elements. With cuDNN, heads of 80 and 128 take equal times,
and heads of 64 about two thirds (docs/research_log.md, "Head sizes of attention")."""


def executed(head: int, skips: bool = True) -> float:
    """Operations that fused attention executes for each one that counts.

    Args:
      head: elements of a head; 0 if unknown.
      skips: whether it skips what a causal mask hides. With addends to the scores, such as a mask of documents, cuDNN
        does not (docs/research_log.md, "Masks of documents").
    """
    return (math.ceil(head / _HEAD) * _HEAD / head if head else 1.0) * (1.0 if skips else 2.0)


def attention_seconds(flops: float, bytes_moved: float, hardware: Hardware, executed: float = 1.0) -> float:
    """Time of fused attention.

    Args:
      flops: without masked operations. A causal mask masks half of the operations.
      executed: see `executed`.
    """
    arithmetic = executed * flops / (hardware.peak_flops * hardware.attention_efficiency)
    return max(arithmetic + hardware.kernel_seconds, memory_seconds(bytes_moved, hardware))


def host_seconds(bytes_moved: float, hardware: Hardware) -> float:
    """Time of a copy between device memory and host memory by a copy engine; 0 if there are no bytes to copy."""
    return bytes_moved / hardware.host_bandwidth + hardware.kernel_seconds if bytes_moved else 0.0


def wire_bytes(kind: str, size: float, group: int) -> float:
    """Number of bytes that each device of a collective sends.

    Args:
      kind: HLO's name of the collective, such as `all-gather`.
      size: size of the whole buffer on one device, in bytes: the result of an all-gather, or the operand of a
        reduction.
      group: number of devices in the group.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    share = (group - 1) / group if group > 1 else 0.0
    return size * share * (2 if kind == "all-reduce" else 1)


def collective_seconds(kind: str, size: float, group: int, nodes: int, hardware: Hardware) -> float:
    """Time of a collective that runs alone.

    A group with k devices on each node uses k network cards per node at once. But it is not faster than the links
    inside a node. An all-to-all sends to all nodes alike, so much of it crosses the spines, which may be
    oversubscribed. Rings and trees go from leaf to leaf, so they cross the spines a few times only.

    Args:
      kind, size, group: as in `wire_bytes`.
      nodes: number of nodes that the group spans.
    """
    steps = 1 if kind in ("collective-permute", "collective-broadcast") else max(group - 1, 1)
    if nodes > 1:
        per_node = max(group // nodes, 1)
        network = hardware.inter_bandwidth * per_node / (_crowding(nodes, hardware) if kind in _TO_ALL else 1.0)
        bandwidth = min(hardware.intra_bandwidth, network)
        latency = hardware.inter_latency * (1 + nodes / 8) + 1e-6 * steps
    else:
        bandwidth = hardware.intra_bandwidth
        latency = hardware.intra_latency + 1e-6 * steps
    return wire_bytes(kind, size, group) / bandwidth + latency


_TO_ALL = ("all-to-all", "ragged-all-to-all")


def _crowding(nodes: int, hardware: Hardware) -> float:
    """How many times longer the spines take than the leaves, for equal messages between all `nodes`; at least 1."""
    leaf = hardware.nodes_per_leaf
    if not leaf or nodes <= leaf:
        return 1.0
    return max(1.0, hardware.oversubscription * (1.0 - leaf / nodes))
