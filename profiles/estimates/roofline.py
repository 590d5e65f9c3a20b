"""Seconds from counted operations and bytes: the analytic costs used where nothing was measured.

A kernel takes the longer of its arithmetic at the tensor cores' speed and its traffic at the memory's, and a
fixed part for being launched. A collective takes its wire traffic at the link's bus bandwidth and a latency
per step of its ring (the usual alpha-beta model; NCCL's "bus bandwidth" makes the bandwidth term alike for
all kinds).
"""

from dhelix.profiles.hardware import Hardware


def memory_seconds(bytes_moved: float, hardware: Hardware) -> float:
    """A kernel that reads and writes `bytes_moved` of device memory and computes next to nothing."""
    return bytes_moved / (hardware.memory_bandwidth * hardware.memory_efficiency) + hardware.kernel_seconds


def gemm_seconds(flops: float, bytes_moved: float, hardware: Hardware, bits: int = 16) -> float:
    """A matrix product; `bits` is the width of its inputs (8 is twice as fast as 16, 32 runs as TF32)."""
    arithmetic = flops / (hardware.peak_flops * hardware.gemm_efficiency * 16 / bits)
    return max(arithmetic + hardware.kernel_seconds, memory_seconds(bytes_moved, hardware))


def attention_seconds(flops: float, bytes_moved: float, hardware: Hardware) -> float:
    """Fused attention. `flops` counts only what the mask leaves: half for a causal one."""
    arithmetic = flops / (hardware.peak_flops * hardware.attention_efficiency)
    return max(arithmetic + hardware.kernel_seconds, memory_seconds(bytes_moved, hardware))


def host_seconds(bytes_moved: float, hardware: Hardware) -> float:
    """A copy between device memory and the host's, by a copy engine; nothing for no bytes."""
    return bytes_moved / hardware.host_bandwidth + hardware.kernel_seconds if bytes_moved else 0.0


def wire_bytes(kind: str, size: float, group: int) -> float:
    """Bytes that each device sends.

    Args:
      kind: HLO's name of the collective, such as `all-gather`.
      size: bytes of the whole buffer on one device: gathered, or before it is reduced.
      group: how many devices take part.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    share = (group - 1) / group if group > 1 else 0.0
    return size * share * (2 if kind == "all-reduce" else 1)


def collective_seconds(kind: str, size: float, group: int, nodes: int, hardware: Hardware) -> float:
    """A collective that runs alone; `size` and `group` as in `wire_bytes`, `nodes` is how many it spans.

    Across nodes, a group with k devices on each uses k network cards at once, up to the speed of the links
    inside.
    """
    steps = 1 if kind in ("collective-permute", "collective-broadcast") else max(group - 1, 1)
    if nodes > 1:
        per_node = max(group // nodes, 1)
        bandwidth = min(hardware.intra_bandwidth, hardware.inter_bandwidth * per_node)
        latency = hardware.inter_latency * (1 + nodes / 8) + 1e-6 * steps
    else:
        bandwidth = hardware.intra_bandwidth
        latency = hardware.intra_latency + 1e-6 * steps
    return wire_bytes(kind, size, group) / bandwidth + latency
