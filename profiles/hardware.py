"""Descriptions of GPUs and their networks: what the roofline in `roofline.py` and the timeline need.

Peaks are the vendors'; efficiencies are what well-shaped operators of a Transformer reach of them. H200's are
fitted to measured steps (Llama-8B layer shapes, 8 layers, TP = SP = 4, M = 16; times in ms):

    program          step   without communication   compute beside NCCL   collective time under compute
    plain            1075   894                     915                   46 %
    two strands      1025   880                     973                   90 %

Collective time is stretched where it lies under compute: strands expose 50 = 10 % of it, so it totals 500, of
which the 450 under compute cost compute 93 (rate 0.8) and did the work of about 130 alone (rate 0.3). That
both proceed and gain a tenth together, no more, is why the share of hidden communication is no measure of
speed. The other GPUs take the same fractions of their own peaks: guesses until a profile is measured there.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in its cluster. Seconds, bytes, operations per second, bytes per second.

    Attributes:
      peak_flops: dense bf16 tensor-core operations per second; other types scale by their width.
      memory_bandwidth: of device memory; `memory_bytes` is its size.
      gemm_efficiency, attention_efficiency, memory_efficiency: share of the peak that operators reach.
      kernel_seconds: what a kernel costs beside its work: launch, ramp up and down.
      intra_bandwidth: bus bandwidth that one collective reaches per GPU inside a node (NCCL's busbw).
      inter_bandwidth: the same per GPU across nodes; a group with k GPUs on each node has k network cards.
      intra_latency, inter_latency: start-up of a collective, for the kernel and per step of its ring.
      host_bandwidth: of copies between device memory and pinned memory of the host, each way.
      gpus_per_node: devices 0 .. n-1 are node 0, and so on.
      compute_rate: how fast compute proceeds while a collective runs beside it; 1 is undisturbed.
      communication_rate: how fast the collective proceeds meanwhile.
      inter_compute_rate, inter_communication_rate: the same beside a collective between nodes. What waits for a network
        holds few SMs and loses little (over sockets: docs/benchmarks.md, two H100s).
      like: a GPU with as many cores of the same kind, the same clock and the same links, whose measured times stand in
        where this one has none (`alike`).
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
    like: str = ""
    host_bandwidth: float = 55e9  # PCIe 5.0 x16: 63 GB/s, less what packets take

    def rates(self, between_nodes: bool) -> tuple[float, float]:
        """Of compute and of a collective beside each other, where nothing like them was measured."""
        if between_nodes:
            return self.inter_compute_rate, self.inter_communication_rate
        return self.compute_rate, self.communication_rate


# NVLink 4, 18 links: 450 GB/s each way, of which NCCL reaches about 330; 400 Gb/s of network per GPU.
H200 = Hardware("H200", 989e12, 4.8e12, 141e9, 330e9, 45e9)
H100 = Hardware("H100", 989e12, 3.35e12, 80e9, 330e9, 45e9, like="H200")  # the SXM card; memory alone is another
H800 = replace(H100, name="H800", intra_bandwidth=147e9, like="")  # H100 with NVLink cut to 400 GB/s (200 each way)
# NVLink 5, 18 links: 900 GB/s each way, of which the share that NCCL reaches is taken to be H100's. 400 Gb/s of network
# per GPU. Peaks of HGX B200 and of GB200 NVL72 without sparsity; in the latter, NVLink joins 72 GPUs.
B200 = Hardware("B200", 2250e12, 8e12, 180e9, 660e9, 45e9)
GB200 = Hardware("GB200", 2500e12, 8e12, 186e9, 660e9, 45e9, gpus_per_node=72)
# NVLink 3, 12 links: 300 GB/s each way; 200 Gb/s of network per GPU (DGX A100, AMSP III-A).
_PCIE4 = 25e9  # of 31.5 GB/s
A100 = Hardware("A100", 312e12, 2.04e12, 80e9, 230e9, 22e9, host_bandwidth=_PCIE4)
# A server of four without a network. Its NVLink is the A100's; NCCL's all-reduce of 16 MiB, the one collective
# that is published, takes 221 us (DistFuse table 1), and 120 GB/s follow from that.
A100_40GB = replace(
    A100, name="A100-40GB", memory_bandwidth=1.555e12, memory_bytes=40e9, intra_bandwidth=120e9, gpus_per_node=4
)
# A100 with NVLink cut to 400 GB/s (200 each way); 4 x 200 Gb/s per node of 8 (DHelix 6, AMSP VI).
A800 = replace(A100, name="A800", intra_bandwidth=150e9, inter_bandwidth=11e9)
# PCIe 4.0, shared by the node; one 100 Gb/s card per node of 8 (DHelix section 6).
A40 = Hardware(
    "A40",
    149.7e12,
    0.696e12,
    48e9,
    16e9,
    1.4e9,
    intra_latency=15e-6,
    compute_rate=0.9,
    communication_rate=0.8,
    host_bandwidth=_PCIE4,
)
# NVLink of 400 Gb/s inside a node; 2 x 400 Gb/s per node of 8 (Lagom 4.1, cluster A).
A40_NVLINK = replace(A40, name="A40-nvlink", intra_bandwidth=40e9, inter_bandwidth=11e9, intra_latency=8e-6)
# Ada and Ampere cards for PCIe, links and network as of A40: NVIDIA's peaks without sparsity (A10G: AWS's G5).
L40S = replace(A40, name="L40S", peak_flops=362e12, memory_bandwidth=0.864e12, memory_bytes=48e9)
L4 = replace(A40, name="L4", peak_flops=121e12, memory_bandwidth=0.3e12, memory_bytes=24e9)
A10G = replace(A40, name="A10G", peak_flops=70e12, memory_bandwidth=0.6e12, memory_bytes=24e9)


def _no_p2p(gpu: Hardware) -> Hardware:
    """Without peer-to-peer access (`NCCL_P2P_DISABLE=1`) collectives go through host memory, a PCIe-class network."""
    name = f"{gpu.name}-no-p2p"
    return replace(gpu, name=name, intra_bandwidth=27e9, communication_rate=0.8, compute_rate=0.9)


def _two_nodes(gpu: Hardware) -> Hardware:
    """Two processes of one server that NCCL takes for nodes: sockets of the loopback device (facts in
    docs/profiles.md)."""
    return replace(gpu, name=f"{gpu.name}-two-nodes", inter_bandwidth=4.5e9, gpus_per_node=2)


H200_NO_P2P, H100_NO_P2P = _no_p2p(H200), _no_p2p(H100)
H200_TWO_NODES, H100_TWO_NODES = _two_nodes(H200), _two_nodes(H100)

_ALL = (
    *(H200, H200_NO_P2P, H200_TWO_NODES, H100, H100_NO_P2P, H100_TWO_NODES, H800, B200, GB200),
    *(A100, A100_40GB, A800, A40, A40_NVLINK, L40S, L4, A10G),
)
ALL: dict[str, Hardware] = {h.name: h for h in _ALL}

LINKS = ("nvlink", "no-p2p", "two-nodes")
"""How GPUs of a node reach each other: NVLink or what else the node has; through host memory only
(`NCCL_P2P_DISABLE=1`); over sockets, as two processes that pose as nodes."""
GPUS = sorted(name for name in ALL if not name.endswith(tuple(f"-{link}" for link in LINKS)))
"""Names of `ALL` without those of links."""


def gpu_name(device_kind: str) -> str:
    """The name under which profiles know a GPU: `H200` for `NVIDIA H200`, `H100-PCIe` for a card of that name with
    fewer cores or other links; of an unknown one the kind, in one word."""
    words = device_kind.replace("-", " ").split()
    known = [name for name in ALL if "-" not in name and name in words]
    if not known:
        return "-".join(w for w in words if w != "NVIDIA") or "unknown"
    return "-".join(known[:1] + [w for w in words if w.lower() in _VARIANTS])


_VARIANTS = ("pcie", "nvl", "mig")  # cards that share a name with the ones above, and no more


def describe(name: str, link: str = "nvlink", gpus_per_node: int = 0, inter_bandwidth: float = 0.0) -> Hardware:
    """The description of a GPU over a link, in nodes of the usual size or of `gpus_per_node`, with the usual bandwidth
    between nodes or with `inter_bandwidth`. One that nobody described counts as the one that it shares a name with, or
    as an H100, until it is measured."""
    known = ALL.get(f"{name}-{link}") or ALL.get(name)
    found = known or replace(ALL.get(name.partition("-")[0], H100), name=name, like="")
    given = {"gpus_per_node": gpus_per_node, "inter_bandwidth": inter_bandwidth}
    told = {name: value for name, value in given.items() if value}
    return replace(found, **told) if told else found
