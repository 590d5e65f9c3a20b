"""A cluster: nodes of equal GPUs, their links, and where each number about them comes from.

    cluster = known.find("h100-infiniband")            # shipped, of a paper, or a file (`cluster_file.py`)
    cluster.gpus                                       # 64
    cluster.with_nodes(2048)                           # the same with another number of nodes
    cluster.with_constants({"between_gb_per_second": 22}, "--constants")
    cluster.origins()                                  # each constant with its value and its source

Devices are numbered node by node, and nodes leaf by leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from dhelix.profiles.clusters.constants import CONSTANTS, ClusterError, constant
from dhelix.profiles.hardware import SLOW_LINK, Hardware, with_links

MOST_GPUS = 2**20
_SLOWER = "for slower links: measured on H200s under limits on channels (profiles/hardware.py)"


@dataclass(frozen=True)
class Origin:
    """Where the value of a constant comes from. `value` is in the unit of `name`."""

    name: str
    value: float
    source: str
    given: bool


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
      name: for tables.
      gpu: name of the GPU in profiles and targets, such as `H100`.
      nodes: number of nodes.
      hardware: one GPU and the bandwidths that its collectives reach; `hardware.gpus_per_node` GPUs are a node.
      link: link of the profile that has measured times of such nodes, one of `hardware.LINKS`; "" if there is none.
      inside, between: the links inside a node and between nodes in words.
      sources: where the constants come from that are not those of `profiles/hardware.py`, by their names.
      notes: what else a reader should know.

    Raises:
      ClusterError: there are no nodes, or more than a million GPUs.
    """

    name: str
    gpu: str
    nodes: int
    hardware: Hardware
    link: str = ""
    inside: str = ""
    between: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ClusterError(
                f"{self.name}: {self.nodes} nodes of {self.gpus_per_node} GPUs are no cluster; give at least one each"
            )
        if self.gpus > MOST_GPUS:
            raise ClusterError(f"{self.name}: {self.gpus} GPUs are more than {MOST_GPUS}; check the number of nodes")

    @property
    def gpus_per_node(self) -> int:
        return self.hardware.gpus_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def with_nodes(self, nodes: int) -> Self:
        """The same cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    def with_constants(self, values: Mapping[str, float], where: str) -> Self:
        """The same cluster with other constants, in the units of their names.

        Slower links inside a node come with the rates of slower links (`with_links`).

        Args:
          where: the file or flag with the values. It becomes their source.

        Raises:
          ClusterError: a constant is unknown, or a value is impossible.
        """
        fields = {}
        for name, value in values.items():
            one = constant(name, where)
            fields[one.field] = one.checked(name, value, where)
        if "sms" in fields:
            fields["sms"] = int(fields["sms"])
        sources = {**self.sources, **dict.fromkeys(values, where)}
        hardware = self.hardware
        if fields.get("intra_bandwidth", math.inf) < hardware.intra_bandwidth:
            hardware = with_links(hardware, fields["intra_bandwidth"])
            sources |= {name: _SLOWER for name in SLOW_LINK if name not in values}
        return replace(self, hardware=replace(hardware, **fields), sources=sources)

    def origins(self) -> Iterator[Origin]:
        """Each constant with its value and its source, in the order of CONSTANTS."""
        for name, one in CONSTANTS.items():
            given = name in self.sources
            yield Origin(name, one.of(self.hardware), self.sources.get(name, one.usual), given)

    def words(self) -> str:
        """The cluster in one line."""
        links = [f"{self.inside} inside"] if self.inside else []
        links += [f"{self.between} between"] if self.between and self.nodes > 1 else []
        count = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.gpus_per_node} {self.gpu}"
        return f"{self.name}: {count}" + (f"; {', '.join(links)}" if links else "")
