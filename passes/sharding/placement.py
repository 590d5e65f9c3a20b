"""Placement: an order of nodes that keeps groups over several nodes under few leaf switches (AMSP section V-D).

A factor with s1 > 1 makes groups of s1 nodes that follow each other in the mesh. Traffic between two leaf switches
crosses the spine, which all jobs of the cluster share. So the s1 nodes of a group should have one leaf switch.

    topology     {"nodes": [{"name": "node-0", "leaf": "leaf-0"}, {"name": "node-1", "leaf": "leaf-1"}, ...]}
    leaves       A: 0 2 4    B: 1 3 5          groups of 2
    as listed    (0 1) (2 3) (4 5)             each group crosses the spine
    placed       (0 2) (1 3) (4 5)             one group does

Whole groups come first: each leaf gives as many as it has. What is left over is put together, the largest rests first.
Groups of different states contain each other, because each factor divides the next. So the same is done with the
smaller groups of what is left over. `spine_bytes` counts what an order sends over the spine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.profiles.estimates import roofline


@dataclass(frozen=True)
class Topology:
    """The leaf switch of each node. The order of `leaves` is that of the file.

    Attributes:
      leaves: the name of the leaf switch by the name of the node.
    """

    leaves: Mapping[str, str]

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Reads a topology file.

        Raises:
          ShardingError: the file cannot be read, or is no topology. The message says what is wrong.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ShardingError(f"{path}: cannot be read ({error.strerror}): check the path") from None
        except ValueError as error:
            raise ShardingError(f"{path}: no JSON ({error}): correct it") from None
        return cls.of(data, str(path))

    @classmethod
    def of(cls, data: Any, origin: str = "topology") -> Topology:
        """The topology in JSON values. Raises ShardingError if they are none."""
        nodes = data.get("nodes") if isinstance(data, dict) and set(data) == {"nodes"} else None
        if not isinstance(nodes, list) or not nodes:
            raise ShardingError(f'{origin}: expected {{"nodes": [{{"name": ..., "leaf": ...}}, ...]}}')
        leaves: dict[str, str] = {}
        for number, node in enumerate(nodes):
            if not isinstance(node, dict) or set(node) != {"name", "leaf"} or not all(map(_is_name, node.values())):
                raise ShardingError(f"{origin}: node {number} needs a name and a leaf, both texts, and nothing else")
            if node["name"] in leaves:
                raise ShardingError(f"{origin}: node {node['name']!r} occurs twice; name each node once")
            leaves[node["name"]] = node["leaf"]
        return cls(leaves)

    def leaf(self, node: str) -> str:
        """The leaf switch of a node. Raises ShardingError if the node is unknown."""
        if node not in self.leaves:
            known = ", ".join(list(self.leaves)[:5])
            raise ShardingError(f"node {node!r} is not in the topology, which has {known}, ...; add it there")
        return self.leaves[node]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def group_sizes(factors: Factors) -> list[int]:
    """The numbers of nodes of the groups that span some nodes and not all, from large to small."""
    found = {factor.nodes for _, factor in factors.states()}
    return sorted((size for size in found if 1 < size < factors.mesh.nodes), reverse=True)


def place(topology: Topology, sizes: Iterable[int], nodes: Sequence[str] | None = None) -> tuple[str, ...]:
    """An order of nodes in which as many groups as possible have one leaf switch.

    Args:
      sizes: numbers of nodes of groups. Each divides the larger ones.
      nodes: names of the nodes to place; None: all of the topology.

    Raises:
      ShardingError: a node is unknown, or a size does not divide the number of nodes or the next size.
    """
    names = list(topology.leaves) if nodes is None else list(nodes)
    larger = len(names)
    wanted = sorted(set(sizes), reverse=True)
    for size in wanted:
        if size < 1 or larger % size:
            raise ShardingError(f"groups of {size} nodes do not divide {larger}; use the sizes of factors of this mesh")
        larger = size
    under: dict[str, list[str]] = {}
    for name in names:
        under.setdefault(topology.leaf(name), []).append(name)
    order: list[str] = []
    for size in [*wanted, 1]:
        rests = sorted(under.items(), key=lambda item: -len(item[1]))  # stable: equal rests keep the order of the file
        for leaf, rest in rests:
            whole = len(rest) // size * size
            order += rest[:whole]
            under[leaf] = rest[whole:]
    return tuple(order)


def spine_bytes(topology: Topology, order: Sequence[str], group: Factor, op: str, size: float, mesh: Factor) -> float:
    """Bytes that a collective of all groups sends over the spine, both directions of a link counted once.

    Each group is a ring over its nodes in their order, and back to the first.

    Args:
      order: nodes in the order of the mesh.
      group: a group's devices. It has `group.nodes` nodes that follow each other.
      op: one of `collective_times.OPS`.
      size: bytes of the whole buffer.
      mesh: all devices.
    """
    if group.nodes == 1:
        return 0.0
    leaves = [topology.leaf(name) for name in order]
    crossings = 0
    for start in range(0, len(leaves), group.nodes):
        ring = leaves[start : start + group.nodes]
        crossings += sum(here != there for here, there in zip(ring, ring[1:] + ring[:1], strict=True))
    return crossings * (mesh / group).gpus * roofline.wire_bytes(op, size, group.size)


def spine_share(topology: Topology, order: Sequence[str], size: int) -> float:
    """Share of the groups of `size` nodes that have more than one leaf switch."""
    leaves = [topology.leaf(name) for name in order]
    groups = [leaves[start : start + size] for start in range(0, len(leaves), size)]
    return sum(len(set(group)) > 1 for group in groups) / len(groups)
