"""Placement: orders of nodes and GPUs that keep groups within switches, CPUs and NVLink (AMSP section V-D).

A factor with s1 > 1 makes groups of s1 nodes that follow each other in the mesh. Traffic between two leaf switches
crosses the spine, which all jobs of the cluster share. So the s1 nodes of a group should have one leaf switch.

    topology     {"nodes": [{"name": "node-0", "leaf": "leaf-0"}, {"name": "node-1", "leaf": "leaf-1"}, ...]}
    leaves       A: 0 2 4    B: 1 3 5          groups of 2
    as listed    (0 1) (2 3) (4 5)             each group crosses the spine
    placed       (0 2) (1 3) (4 5)             one group does

Within a node, the same holds for GPUs. Those of a partial factor, such as 4x1, should share NVLink, or else a CPU and a
PCIe switch (`nccl_topology.py`). Domains contain each other: a CPU has several switches.

Whole groups come first: each domain gives as many as it has, and those of its inner domains first. What is left over is
put together, the largest rests first. Groups of different states contain each other, because each factor divides the
next. So the same is done with the smaller groups of what is left over. Groups of parameters may have factors of their
own. One mesh carries all of them out, so these groups contain each other, too (`axis_sizes`). `spine_bytes` and
`node_bytes` count what a step sends over slow links in an order.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.nccl_topology import NodeTopology
from dhelix.passes.sharding.step_times import Sent
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

    @property
    def domains(self) -> Mapping[str, tuple[str, ...]]:
        """What each node is part of, for `place`: its leaf switch."""
        return {name: (leaf,) for name, leaf in self.leaves.items()}

    def leaf(self, node: str) -> str:
        """The leaf switch of a node. Raises ShardingError if the node is unknown."""
        _check_known(node, self.leaves)
        return self.leaves[node]


def _check_known(name: Hashable, topology: Iterable[Hashable]) -> None:
    known = list(topology)
    if name not in known:
        has = ", ".join(map(str, known[:5]))
        raise ShardingError(f"node {name!r} is not in the topology, which has {has}, ...; add it there")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def group_sizes(*each: Factors) -> list[int]:
    """The numbers of nodes of the groups that span some nodes and not all, from large to small.

    Args:
      *each: the factors of all groups of parameters, on one mesh.
    """
    return _partial((factor.nodes for factors in each for _, factor in factors.states()), each[0].mesh.nodes)


def gpu_group_sizes(*each: Factors) -> list[int]:
    """The numbers of GPUs of a node in the groups that have some of them and not all, from large to small.

    Args:
      *each: as for `group_sizes`.
    """
    return _partial((factor.gpus for factors in each for _, factor in factors.states()), each[0].mesh.gpus)


def _partial(sizes: Iterable[int], whole: int) -> list[int]:
    return sorted({size for size in sizes if 1 < size < whole}, reverse=True)


def place[N: Hashable](
    domains: Mapping[N, tuple[str, ...]], sizes: Iterable[int], names: Sequence[N] | None = None
) -> tuple[N, ...]:
    """An order in which as many groups as possible lie in one domain.

    Args:
      domains: for each name, the domains that it is part of, the largest first: `Topology.domains`, or those of GPUs.
      sizes: numbers of members of groups. Each divides the larger ones.
      names: what to place; None: all.

    Raises:
      ShardingError: a name is unknown, or a size does not divide the number of names or the next size.
    """
    chosen = list(domains) if names is None else list(names)
    larger = len(chosen)
    wanted = sorted(set(sizes), reverse=True)
    for size in wanted:
        if size < 1 or larger % size:
            raise ShardingError(f"groups of {size} do not divide {larger}; use the sizes of factors of this mesh")
        larger = size
    for name in chosen:
        _check_known(name, domains)
    return tuple(_ordered(domains, chosen, 0, [*wanted, 1]))


def _ordered[N: Hashable](
    domains: Mapping[N, tuple[str, ...]], names: list[N], level: int, sizes: list[int]
) -> list[N]:
    """`names` in order. `level` says which of their domains they do not all share."""
    if all(len(domains[name]) <= level for name in names):
        return names
    under: dict[str, list[N]] = {}
    for name in names:
        under.setdefault("/".join(domains[name][level : level + 1]), []).append(name)
    order: list[N] = []
    for number, size in enumerate(sizes):
        rests = sorted(under.items(), key=lambda item: -len(item[1]))  # stable: equal rests keep the given order
        for domain, rest in rests:
            inside = _ordered(domains, rest, level + 1, sizes[number:])
            whole = len(rest) // size * size
            order += inside[:whole]
            under[domain] = inside[whole:]
    return order


def spine_bytes(topology: Topology, order: Sequence[str], sent: Iterable[Sent], mesh: Factor) -> float:
    """Bytes that a step sends over the spine, both directions of a link counted once.

    A group is a ring over its nodes in their order, and back to the first.

    Args:
      order: nodes in the order of the mesh.
      sent: the step's collectives, `StepTimes.sent`.
      mesh: all devices.
    """
    leaves, total = [topology.leaf(name) for name in order], 0.0
    for one in sent:
        crossings = 0
        for ring in _groups(leaves, one.inner.nodes, one.group.nodes):
            crossings += sum(here != there for here, there in pairwise([*ring, ring[0]]))
        siblings = mesh.gpus // one.group.gpus
        total += one.count * crossings * siblings * roofline.wire_bytes(one.op, one.size, one.group.size)
    return total


def node_bytes(node: NodeTopology, order: Sequence[int], sent: Iterable[Sent]) -> dict[str, float]:
    """Bytes that a step sends over the slow links of one node, by the kind of link (`NodeTopology.parts`).

    NCCL finds the best ring within a node. So the ring of a group crosses a slow link once for each part of the group;
    if the group spans nodes, it leaves the node between two parts.

    Args:
      order: numbers of GPUs in the order of the mesh.
      sent: the step's collectives, `StepTimes.sent`.
    """
    total: dict[str, float] = dict.fromkeys(node.parts(list(order)), 0.0)
    for one in sent:
        wire = one.count * roofline.wire_bytes(one.op, one.size, one.group.size)
        for group in _groups(order, one.inner.gpus, one.group.gpus):
            for kind, parts in node.parts(group).items():
                crossings = parts - 1 if one.group.nodes > 1 else parts if parts > 1 else 0
                total[kind] += wire * crossings
    return total


def _groups[N](order: Sequence[N], inner: int, count: int) -> Iterator[list[N]]:
    """The groups of `count` members that are `inner` apart."""
    for start in range(0, len(order), inner * count):
        block = order[start : start + inner * count]
        yield from (list(block[first::inner]) for first in range(inner))


def spine_share(topology: Topology, order: Sequence[str], size: int) -> float:
    """Share of the groups of `size` nodes that have more than one leaf switch."""
    groups = list(_groups([topology.leaf(name) for name in order], 1, size))
    return sum(len(set(group)) > 1 for group in groups) / len(groups)
