"""Time of a collective over a part of the mesh: t(o, v, p0 x p1) of AMSP section IV-A.

    times = MeasuredTimes(profile_times, hardware)        # a profile's table, else scaled, else a guess
    times = LinkTimes(Links(within=150e9, between=88e9))  # a formula from bandwidths and latencies
    times.of(ALL_REDUCE, 256e6, Factor(1, 128), mesh=Factor(8, 128)).seconds

`v` is the whole buffer: the gathered one of an all-gather, and the operand of a reduction. A group of one GPU needs no
time.

**All sibling groups run at once.** A group of p0 GPUs in each of p1 nodes leaves mesh / group siblings. Those that span
nodes share the network cards of their nodes: with p0 = 1 and 8 GPUs per node, eight groups do. The paper does not say
whether its tables were measured so. `Links(siblings=False)` means one group alone.

The formula is a ring: each of p GPUs sends v (p - 1) / p bytes for an all-gather or a reduce-scatter, twice that for an
all-reduce, and v for a broadcast. The slowest link decides. A message passes p - 1 links one after the other, and this
latency is paid once in each direction. Across nodes, an all-reduce may use a tree of nodes instead, as NCCL does
from version 2.4: its latency grows with log2(nodes). The paper calls such formulas too inaccurate, so they count as
guesses.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dhelix.passes.sharding.factors import Factor, ShardingError
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.interpolation import CollectiveCurves
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Timing

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = "all-gather", "reduce-scatter", "all-reduce", "collective-broadcast"
OPS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST)
"""The four collectives of the planner: AG, RS, AR and BC of the paper."""


class Basis(enum.Enum):
    """Where a time comes from, the most reliable basis first."""

    MEASURED = "measured"
    """Measured for this collective on this mesh, and interpolated in bytes."""
    SCALED = "scaled"
    """Measured for another collective, mesh or size, and scaled by the ratio of the formula's times."""
    GUESSED = "guessed"
    """From the formula alone."""


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a collective in seconds, and where it comes from."""

    seconds: float
    basis: Basis


class CollectiveTimes(Protocol):
    """Says how long a collective takes that all sibling groups of a mesh run at once."""

    def of(self, op: str, size: float, group: Factor, mesh: Factor, together: int = 1) -> Time:
        """The time of a collective.

        Args:
          op: one of `OPS`.
          size: bytes of the whole buffer.
          group: the devices of one group.
          mesh: all devices.
          together: how many equal collectives of a group are launched as one. The time is that of all of them.
        """
        ...


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second and latencies in seconds, as collectives reach them.

    Attributes:
      within: bandwidth of one GPU inside its node (NCCL's busbw).
      between: bandwidth of one node to other nodes, all GPUs together.
      within_latency, between_latency: time of a message over one link.
      siblings: whether groups that span nodes share `between` with their siblings.
      tree: whether an all-reduce across nodes has the latency of a tree.
    """

    within: float
    between: float
    within_latency: float = 3e-6
    between_latency: float = 10e-6
    siblings: bool = True
    tree: bool = True

    def __post_init__(self) -> None:
        if not (self.within > 0.0 and self.between > 0.0):
            raise ShardingError("bandwidths are above 0")

    @classmethod
    def of(cls, hardware: Hardware) -> Links:
        """The links of a GPU's description. `inter_bandwidth` is that of one GPU, so a node has that of all."""
        return cls(hardware.intra_bandwidth, hardware.inter_bandwidth * hardware.gpus_per_node)


class LinkTimes:
    """Times from bandwidths and latencies. All of them are guesses."""

    def __init__(self, links: Links) -> None:
        self.links = links

    def of(self, op: str, size: float, group: Factor, mesh: Factor, together: int = 1) -> Time:
        """See `CollectiveTimes.of`. Broadcasts that are launched together pay the latency once."""
        return Time(self.seconds(op, size, group, mesh, together), Basis.GUESSED)

    def seconds(self, op: str, size: float, group: Factor, mesh: Factor, together: int = 1) -> float:
        """The time in seconds."""
        if group.size == 1 or size <= 0.0 or together < 1:
            return 0.0
        wire = roofline.wire_bytes(op, size * together, group.size)
        seconds = wire / self.links.within if group.gpus > 1 else 0.0
        if group.nodes > 1:
            sharing = (mesh / group).gpus if self.links.siblings else 1
            seconds = max(seconds, sharing * wire / self.links.between)
        return seconds + self._latency(op, group) * (1 if op == BROADCAST else together)

    def _latency(self, op: str, group: Factor) -> float:
        links, directions = self.links, 2 if op == ALL_REDUCE else 1
        if op == ALL_REDUCE and links.tree and group.nodes > 1:
            hops = math.ceil(math.log2(group.nodes))
            return directions * (hops * links.between_latency + (group.gpus - 1) * links.within_latency)
        inside = group.size - group.nodes
        return directions * ((group.nodes - 1) * links.between_latency + inside * links.within_latency)


class MeasuredTimes:
    """Times from a table of measured collectives, interpolated on log-log axes (`CollectiveCurves`).

    A mesh that was not measured takes the nearest measured one that also crosses nodes, or also does not. Its times
    are scaled by the ratio of the roofline's. If there is none, the time is that of the hardware's links, a guess.
    """

    def __init__(self, times: Mapping[CollectiveKey, Timing], hardware: Hardware, links: Links | None = None) -> None:
        self._curves = CollectiveCurves(times, hardware)
        self._links = LinkTimes(links or Links.of(hardware))
        self._found: dict[CollectiveKey, Time] = {}

    def of(self, op: str, size: float, group: Factor, mesh: Factor, together: int = 1) -> Time:
        """See `CollectiveTimes.of`. A table knows single collectives, so several take their sum."""
        if group.size == 1 or size <= 0.0 or together < 1:
            return Time(0.0, Basis.MEASURED)
        key = CollectiveKey(op, max(round(size), 1), group.gpus, group.nodes, (mesh / group).size)
        if key not in self._found:
            self._found[key] = self._find(key, group, mesh)
        one = self._found[key]
        return Time(one.seconds * together, one.basis)

    def _find(self, key: CollectiveKey, group: Factor, mesh: Factor) -> Time:
        found = self._curves.at(key)
        if found is None:
            return self._links.of(key.kind, key.bytes, group, mesh)
        return Time(found.seconds, Basis.MEASURED if found.near else Basis.SCALED)


def times_of(measured: Mapping[CollectiveKey, Timing] | None, hardware: Hardware) -> CollectiveTimes:
    """Measured times where there are some, else those of the hardware's links."""
    links = Links.of(hardware)
    return MeasuredTimes(measured, hardware, links) if measured else LinkTimes(links)
