"""Descriptions of GPUs and their networks, for the roofline (`estimates/roofline.py`) and the simulated timeline.

Peaks are the numbers of the vendors. Efficiencies are the fractions of the peaks that Transformer operators of
favourable sizes reach. The H200's efficiencies are fitted to measured steps, plain and with two strands. The steps have
Llama-8B layer shapes and TP = SP = 4. Other GPUs use the same efficiencies, but for matrix products where the fastest
one is published (stas00/ml-engineering, compute/accelerator, 2026-08-22: 86.9 % of the peak on an A100, 80.3 % on an
H100 or H200, 77.6 % on a B200, 72.9 % on a GB200). These products keep the H200's ratio of 0.7 to 80.3 %. The A100's
attention is FlashAttention-2's (arXiv 2307.08691: about 190 TFLOP/s, forward and backward, causal). All these are
guesses until a profile of the GPU is measured.

While a collective runs, compute and the collective slow each other down (by default to rates of 0.8 and 0.3). Then both
together take only about a tenth less time than one after the other. So the fraction of hidden communication does not
measure speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in its cluster. Times are in seconds, sizes in bytes, and rates per second.

    Attributes:
      peak_flops: dense bf16 tensor-core operations per second; other types scale by their width.
      memory_bandwidth: bandwidth of device memory.
      memory_bytes: size of device memory.
      gemm_efficiency, attention_efficiency: fraction of `peak_flops` that matrix products and attention reach.
      memory_efficiency: fraction of `memory_bandwidth` that memory-bound operators reach.
      kernel_seconds: fixed cost of a kernel: launch, ramp-up and ramp-down.
      intra_bandwidth: bus bandwidth (NCCL's busbw) per GPU that a collective reaches inside a node.
      inter_bandwidth: bus bandwidth per GPU that a collective reaches across nodes. A group with k GPUs on each node
        uses k network cards on each node.
      intra_latency, inter_latency: start-up time of a collective inside a node and across nodes.
      nodes_per_leaf: number of nodes under one leaf switch; 0 if all nodes are under one.
      oversubscription: how many times more bandwidth a leaf switch has to its nodes than to its spines.
      host_bandwidth: bandwidth of copies between device memory and pinned host memory, in each direction.
      gpus_per_node: number n of GPUs in a node. Devices 0 .. n-1 are node 0, devices n .. 2n-1 are node 1, and so on.
      compute_rate: speed of compute while a collective runs; 1 is the speed without a collective.
      communication_rate: speed of a collective while compute runs; 1 is the speed without compute.
      inter_compute_rate, inter_communication_rate: the same two rates for a collective between nodes. Such a collective
        mostly waits for the network and occupies few SMs. So both slow each other down only a little
        (docs/research_log.md, two H100s over sockets).
      sms: number of streaming multiprocessors.
      like: name of another GPU with the same number and kind of cores, the same clock and the same links. Measured
        times of the other GPU replace missing times of this GPU (`alike`). Empty if there is no such GPU.
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    intra_bandwidth: float
    inter_bandwidth: float
    gpus_per_node: int = 8
    gemm_efficiency: float = 0.7
    attention_efficiency: float = 0.55
    memory_efficiency: float = 0.8
    kernel_seconds: float = 3e-6
    intra_latency: float = 8e-6
    inter_latency: float = 20e-6
    compute_rate: float = 0.8
    communication_rate: float = 0.3
    inter_compute_rate: float = 0.9
    inter_communication_rate: float = 0.95
    sms: int = 132
    like: str = ""
    nodes_per_leaf: int = 0
    oversubscription: float = 1.0
    host_bandwidth: float = 55e9  # PCIe 5.0 x16: 63 GB/s, minus the overhead of packets

    def rates(self, between_nodes: bool) -> tuple[float, float]:
        """The rates of compute and of a collective that run at once, for a pair without similar measured pairs."""
        if between_nodes:
            return self.inter_compute_rate, self.inter_communication_rate
        return self.compute_rate, self.communication_rate


SLOW_LINK: Mapping[str, float] = {"compute_rate": 0.9, "communication_rate": 0.8}
"""Rates beside a collective inside a node whose links are slow: it mostly waits for them.

Under 1 to 8 channels over NVLink, with kernels in launch order, H200s had medians of 0.81 to 0.99 and 0.74 to 0.90 for
collectives that start first beside products and attention (benchmarks/results/costs_h200x2_channels*).
"""

SYMMETRIC_RATE = 0.75
"""Rate of a collective on symmetric memory beside compute, inside a node: copy engines and these kernels need few SMs.

If all pairs are taken out of the profile, 8 recorded steps with strands are then predicted 0.1 to 2.8 % too fast, and
with the 0.3 of NCCL's other kernels 2.0 to 6.9 % too slow.
"""


def with_links(hardware: Hardware, bandwidth: float) -> Hardware:
    """`hardware` with slower links inside a node, and with the rates of such links.

    Beside compute, NCCL's kernels move as many bytes a second as over the usual links (0.3 x 330 GB/s on an H100), as
    long as these are at most 0.8 of what the link carries. On an H200, they were 0.8 x 122 GB/s over 8 channels. The
    rate of compute between both ends is a guess.
    """
    usual = hardware.communication_rate * hardware.intra_bandwidth
    slow, rate = SLOW_LINK["communication_rate"], min(SLOW_LINK["communication_rate"], usual / bandwidth)
    part = (slow - rate) / (slow - hardware.communication_rate) if slow > hardware.communication_rate else 1.0
    compute = SLOW_LINK["compute_rate"] + part * (hardware.compute_rate - SLOW_LINK["compute_rate"])
    return replace(hardware, intra_bandwidth=bandwidth, compute_rate=compute, communication_rate=rate)


# NVLink 4 with 18 links has 450 GB/s each way, and NCCL reaches about 330 GB/s. The network has 400 Gb/s per GPU.
H200 = Hardware("H200", 989e12, 4.8e12, 141e9, 330e9, 45e9)
H100 = Hardware("H100", 989e12, 3.35e12, 80e9, 330e9, 45e9, like="H200")  # SXM; differs from the H200 only in memory
H800 = replace(H100, name="H800", intra_bandwidth=147e9, like="")  # an H100 with NVLink of 200 GB/s each way
# NVLink 5 with 18 links has 900 GB/s each way. NCCL is assumed to reach the same fraction of its bandwidth as on an
# H100. The network has 400 Gb/s per GPU. Peaks are for HGX B200 and GB200 NVL72 without sparsity. In a GB200 NVL72,
# NVLink joins 72 GPUs.
B200 = Hardware("B200", 2250e12, 8e12, 180e9, 660e9, 45e9, gemm_efficiency=0.68, sms=148)
GB200 = Hardware("GB200", 2500e12, 8e12, 186e9, 660e9, 45e9, gpus_per_node=72, gemm_efficiency=0.64, sms=152)
# NVLink 3 with 12 links has 300 GB/s each way. The network has 200 Gb/s per GPU (DGX A100, AMSP III-A).
_PCIE4 = 25e9  # what copies reach of the 31.5 GB/s of PCIe 4.0 x16
A100 = Hardware(
    "A100",
    312e12,
    2.04e12,
    80e9,
    230e9,
    22e9,
    gemm_efficiency=0.76,
    attention_efficiency=0.6,
    sms=108,
    host_bandwidth=_PCIE4,
)
# A server with four GPUs, the A100's NVLink and no network. The only published time of a collective is 221 us, for
# NCCL's all-reduce of 16 MiB (DistFuse table 1). The 120 GB/s follow from this time, and 0.7 from that of its products.
A100_40GB = replace(
    A100,
    name="A100-40GB",
    memory_bandwidth=1.555e12,
    memory_bytes=40e9,
    intra_bandwidth=120e9,
    gemm_efficiency=0.7,
    gpus_per_node=4,
)
# An A100 whose NVLink has 400 GB/s (200 each way). The network has 4 x 200 Gb/s per node of 8 (DHelix 6, AMSP VI).
A800 = replace(A100, name="A800", intra_bandwidth=150e9, inter_bandwidth=11e9)
# PCIe 4.0 has 32 GB/s each way. NCCL is assumed to reach the same fraction of it as of an H100's NVLink. A node of 8
# has one network card of 100 Gb/s (DHelix section 6).
A40 = Hardware(
    "A40",
    149.7e12,
    0.696e12,
    48e9,
    23.5e9,
    1.4e9,
    intra_latency=15e-6,
    compute_rate=0.9,
    communication_rate=0.8,
    sms=84,
    host_bandwidth=_PCIE4,
)
# NVLink has 400 Gb/s inside a node, and the network has 2 x 400 Gb/s per node of 8 (Lagom 4.1, cluster A).
A40_NVLINK = replace(A40, name="A40-nvlink", intra_bandwidth=40e9, inter_bandwidth=11e9, intra_latency=8e-6)
# Ada and Ampere PCIe cards with the A40's links and network. Peaks are NVIDIA's, without sparsity (A10G: AWS G5).
L40S = replace(A40, name="L40S", sms=142, peak_flops=362e12, memory_bandwidth=0.864e12, memory_bytes=48e9)
L4 = replace(A40, name="L4", sms=58, peak_flops=121e12, memory_bandwidth=0.3e12, memory_bytes=24e9)
A10G = replace(A40, name="A10G", sms=80, peak_flops=70e12, memory_bandwidth=0.6e12, memory_bytes=24e9)


def _no_p2p(gpu: Hardware) -> Hardware:
    """`gpu` in a server without peer-to-peer access (`NCCL_P2P_DISABLE=1`). Collectives go through host memory."""
    name = f"{gpu.name}-no-p2p"
    return replace(gpu, name=name, intra_bandwidth=27e9, **SLOW_LINK)


def _two_nodes(gpu: Hardware) -> Hardware:
    """`gpu` in a server that emulates two nodes, with loopback sockets between them (docs/research_log.md)."""
    return replace(gpu, name=f"{gpu.name}-two-nodes", inter_bandwidth=4.5e9, gpus_per_node=2)


H200_NO_P2P, H100_NO_P2P = _no_p2p(H200), _no_p2p(H100)
H200_TWO_NODES, H100_TWO_NODES = _two_nodes(H200), _two_nodes(H100)

_ALL = (
    *(H200, H200_NO_P2P, H200_TWO_NODES, H100, H100_NO_P2P, H100_TWO_NODES, H800, B200, GB200),
    *(A100, A100_40GB, A800, A40, A40_NVLINK, L40S, L4, A10G),
)
ALL: dict[str, Hardware] = {h.name: h for h in _ALL}

LINKS = ("nvlink", "no-p2p", "two-nodes")
"""Names of links. A link says how the GPUs of one server reach each other.

`nvlink` is NVLink, or another direct link. With `no-p2p`, they use only host memory (`NCCL_P2P_DISABLE=1`). With
`two-nodes`, two processes, which NCCL treats as two nodes, use sockets.
"""
GPUS = sorted(name for name in ALL if not name.endswith(tuple(f"-{link}" for link in LINKS)))
"""The names in `ALL` that do not end in the name of a link."""


def gpu_name(device_kind: str) -> str:
    """The name of a GPU in profiles, from JAX's device kind.

    `NVIDIA H200` becomes `H200`. A variant with fewer cores or other links keeps a suffix, such as `H100-PCIe`. The
    name of an unknown GPU is its kind without `NVIDIA`, with dashes between the words.
    """
    words = device_kind.replace("-", " ").split()
    known = [name for name in ALL if "-" not in name and name in words]
    if not known:
        return "-".join(w for w in words if w != "NVIDIA") or "unknown"
    return "-".join(known[:1] + [w for w in words if w.lower() in _VARIANTS])


_VARIANTS = ("pcie", "nvl", "mig")  # words for cards that differ from the described GPU of the same name


def describe(name: str, link: str = "nvlink", gpus_per_node: int = 0, inter_bandwidth: float = 0.0) -> Hardware:
    """The description of a GPU with a link.

    If `ALL` does not contain the GPU, such as `H100-PCIe`, the first word of its name counts (`H100`). If `ALL` does
    not contain this word either, the result is the description of an H100 with the name `name`.

    Args:
      name: name of a GPU, as `gpu_name` returns it.
      link: one of LINKS.
      gpus_per_node: number of GPUs in a node; 0 stands for the value in `ALL`.
      inter_bandwidth: bus bandwidth per GPU between nodes, in bytes per second; 0 stands for the value in `ALL`.
    """
    known = ALL.get(f"{name}-{link}") or ALL.get(name)
    found = known or replace(ALL.get(name.partition("-")[0], H100), name=name, like="")
    given = {"gpus_per_node": gpus_per_node, "inter_bandwidth": inter_bandwidth}
    told = {name: value for name, value in given.items() if value}
    return replace(found, **told) if told else found
