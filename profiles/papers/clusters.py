"""The clusters of the papers that dhelix follows: their hardware, and the numbers that were published about them.

    cluster = clusters.get("dhelix-a800")
    cluster.gpus                                       # 64
    cluster.hardware.inter_bandwidth                   # used to compute costs
    [n for n in cluster.numbers if n.system == "DHelix" and n.unit == "TFLOPS/GPU"]

There are two kinds of bandwidth. `link_bandwidth` and `network_bandwidth` are the bandwidths of the links in one
direction, as the paper or the vendor states them. `hardware.intra_bandwidth` and `hardware.inter_bandwidth` are the bus
bandwidths that NCCL reaches per GPU. They are guesses unless the paper measured them. Vendors and papers add up both
directions of NVLink, so their "400 GB/s" is 200 GB/s in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dhelix.errors import DhelixError
from dhelix.profiles import hardware as gpus
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.papers import published
from dhelix.profiles.papers.published import Published

_GB = 1e9
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Cluster:
    """A cluster: nodes of equal GPUs. Bandwidths are in bytes per second, in one direction.

    Attributes:
      name: the key of the cluster in ALL.
      nodes: number of nodes.
      hardware: description of one GPU, with the bandwidths that collectives reach per GPU.
      link: name of the link between the GPUs of a node.
      link_bandwidth: bandwidth of `link` per GPU.
      network: name of the network between nodes; empty for a single node.
      network_bandwidth: bandwidth of `network` per node; 0 for a single node.
      source: paper and section.
      software: the software that the paper names.
      numbers: the numbers that the paper measured or computed on this cluster.
      notes: remarks on parts of the paper's description that are unclear, misprinted, or taken from elsewhere.
    """

    name: str
    nodes: int
    hardware: Hardware
    link: str
    link_bandwidth: float
    network: str
    network_bandwidth: float
    source: str
    software: tuple[str, ...] = ()
    numbers: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        return self.hardware.gpus_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def network_bandwidth_per_gpu(self) -> float:
        """Bandwidth of the network for one GPU while all GPUs of the node use the network."""
        return self.network_bandwidth / self.gpus_per_node


_DHELIX = "DHelix (arXiv 2411.15871)"
_DHELIX_SOFTWARE = ("Megatron-LM", "CUDA 12.2")
_LAGOM_SOFTWARE = ("Megatron-LM", "PyTorch 2.3.0", "NCCL 2.18.3", "CUDA 12.8", "driver 570.13")

_CLUSTERS = (
    Cluster(
        "dhelix-a40", 8, gpus.A40, "PCIe 4.0", 32 * _GB, "InfiniBand 100 Gb/s", 100 * _GBIT,
        f"{_DHELIX}, section 6.1", _DHELIX_SOFTWARE, published.DHELIX_A40,
        ("section 4.3 misprints the GPU's memory as 40 GB; it is 48 GB, as in 6.1",
         "all figures but 13, 14 and 16 were measured here"),
    ),
    Cluster(
        "dhelix-a800", 8, gpus.A800, "NVLink, 400 GB/s both ways", 200 * _GB,
        "InfiniBand 4 x 200 Gb/s", 800 * _GBIT,
        f"{_DHELIX}, section 6.1", _DHELIX_SOFTWARE, published.DHELIX_A800,
        ("6.1 speaks of NVLink 4.0; the A800, like the A100, has NVLink 3",
         "MFU of the text is throughput over 312 TFLOPS",
         "the abstract's 71 % MFU and 29 % stand in no text of the evaluation but 6.3.3: figure 14, not read off"),
    ),
    Cluster(
        "dhelix-a100", 1, gpus.A100, "NVLink, 600 GB/s both ways", 300 * _GB, "", 0.0,
        f"{_DHELIX}, section 6.1", _DHELIX_SOFTWARE,
        notes=("the paper lists this server and reports nothing of it",),
    ),
    Cluster(
        "dhelix-h100", 4, gpus.H100, "NVLink, 900 GB/s both ways", 450 * _GB,
        "InfiniBand 8 x 400 Gb/s", 3200 * _GBIT,
        f"{_DHELIX}, sections 6.1 and 6.3.3", _DHELIX_SOFTWARE, published.DHELIX_H100,
        ("throughput stands in figure 14 alone and is left out",),
    ),
    Cluster(
        "dhelix-h100-16384", 2048, gpus.H100, "NVLink, 900 GB/s both ways", 450 * _GB,
        "InfiniBand 3200 Gb/s", 3200 * _GBIT,
        f"{_DHELIX}, section 3.1 and table 1", (), published.DHELIX_TABLE_1,
        ("computed by the authors from volumes and peak bandwidths, never run: 450 GB/s per GPU inside a node"
         " and 50 GB/s per GPU across",
         "the column of 8192 GPUs is half of it, 1024 nodes"),
    ),
    Cluster(
        "distfuse-a100", 1, gpus.A100_40GB, "NVLink, 600 GB/s both ways", 300 * _GB, "", 0.0,
        "DistFuse (HotInfra 2024), section 3.3 and table 1",
        ("PyTorch 2.1.2", "CUDA 12.1", "Ubuntu 22.04", "vLLM"), published.DISTFUSE,
        ("the paper says NVLink without a rate; 600 GB/s is NVIDIA's for the A100",
         "one all-reduce of M x N 16-bit values, 16 MiB, in 221 us: 114 GB/s of bus bandwidth",
         "in the row of K 28672 GEMM and all-reduce add up to 755.5 us, and 764.5 us together are printed and used"),
    ),
    Cluster(
        "amsp-a800", 128, gpus.A800, "NVLink, 400 GB/s both ways", 200 * _GB,
        "InfiniBand 4 x 200 Gb/s (HDR, without SHARP)", 800 * _GBIT,
        "AMSP (arXiv 2311.00257), section VI-A", ("PyTorch 2.1", "DeepSpeed", "FlashAttention 2", "bf16"),
        published.AMSP,
        ("the paper says NVLink without a rate; 400 GB/s is NVIDIA's for the A800, and DHelix's section 6.1",
         "factors (s_p, s_g, s_os) of table IV: 7B (1x1, 1x1, 8x1), 13B (4x1, 4x1, 8x1), 30B (8x1, 8x1, 8 and lost)",
         "LLaMA-30B recomputes its activations, the others do not",
         "bandwidths of collectives (figure 3) and memory (figure 13) stand in figures alone and are left out"),
    ),
    Cluster(
        "lagom-a40-nvlink", 2, gpus.A40_NVLINK, "NVLink, 400 Gb/s", 400 * _GBIT,
        "InfiniBand 2 x 400 Gb/s", 800 * _GBIT,
        "Lagom, section 4.1, cluster A", _LAGOM_SOFTWARE, published.LAGOM_NVLINK,
        ("ranges of section 4.2 cover both clusters; which end belongs to which stands in figure 7 alone",),
    ),
    Cluster(
        "lagom-a40-pcie", 2, gpus.A40, "PCIe 4.0", 32 * _GB, "InfiniBand 100 Gb/s", 100 * _GBIT,
        "Lagom, section 4.1, cluster B", _LAGOM_SOFTWARE, published.LAGOM_PCIE,
        ("ranges of section 4.2 cover both clusters; which end belongs to which stands in figure 7 alone",
         "the paper gives no rate of PCIe 4.0; 32 GB/s is that of 16 lanes"),
    ),
)  # fmt: skip

ALL: Mapping[str, Cluster] = MappingProxyType({cluster.name: cluster for cluster in _CLUSTERS})


def get(name: str) -> Cluster:
    """The cluster called `name`.

    Raises:
      DhelixError: the name is not in ALL.
    """
    if name not in ALL:
        raise DhelixError(f"cluster {name!r} is unknown; use one of {', '.join(sorted(ALL))}")
    return ALL[name]
