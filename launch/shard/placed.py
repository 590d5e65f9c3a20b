"""Placement for `dhelix shard --topology`: orders of nodes and GPUs, and what a step sends over slow links in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.nccl_topology import NodeTopology
from dhelix.passes.sharding.placement import (
    Topology,
    gpu_group_sizes,
    group_sizes,
    node_bytes,
    place,
    spine_bytes,
    spine_share,
)
from dhelix.passes.sharding.step_times import Sent


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step sends over slow links: in the order of the file, and in the order of the placement."""

    links: str
    listed: float
    placed: float


@dataclass(frozen=True)
class Placed:
    """Orders of nodes and of the GPUs in each node.

    Attributes:
      order: names of nodes in the order of the mesh; None if no leaf switches are known.
      shares: for each number of nodes of a group, the share of groups under more than one leaf switch: of the order in
        the file, and of `order`.
      gpu_order: numbers of GPUs in the order of the mesh; None if any order will do.
      traffic: what a step sends over each kind of slow link.
      notes: why an order is missing.
    """

    order: tuple[str, ...] | None = None
    shares: tuple[tuple[int, float, float], ...] = ()
    gpu_order: tuple[int, ...] | None = None
    traffic: tuple[Traffic, ...] = ()
    notes: tuple[str, ...] = ()


def placed_by(files: Sequence[str], each: Sequence[Factors], sent: Sequence[Sent]) -> Placed:
    """The placement for the shown factors.

    Args:
      files: topology files: JSON with leaf switches, or NCCL's dumps of nodes.
      each: the factors of each group of parameters, on one mesh.
      sent: the collectives of a step, those of all groups.

    Raises:
      ShardingError: a file is no topology, there are too few nodes, or nodes differ.
    """
    dumps = [file for file in files if _is_xml(file)]
    leaves = [file for file in files if file not in dumps]
    if len(leaves) > 1:
        raise ShardingError(f"--topology {','.join(leaves)}: leaf switches stand in one JSON file; give one")
    nodes = _nodes(Topology.load(leaves[0]), each, sent) if leaves else Placed()
    gpus = _gpus(dumps, each, sent) if dumps else Placed()
    return Placed(nodes.order, nodes.shares, gpus.gpu_order, nodes.traffic + gpus.traffic, nodes.notes + gpus.notes)


def _is_xml(file: str) -> bool:
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as stream:
            return stream.read(64).lstrip().startswith("<")
    except OSError as error:
        raise ShardingError(f"{file}: cannot be read ({error.strerror}): check the path") from None


def _nodes(topology: Topology, each: Sequence[Factors], sent: Sequence[Sent]) -> Placed:
    known, mesh = list(topology.leaves), each[0].mesh
    if len(known) < mesh.nodes:
        raise ShardingError(f"the topology has {len(known)} nodes, and {mesh.nodes} are needed; add the others")
    sizes = group_sizes(*each)
    listed = tuple(known[: mesh.nodes])
    order = place(topology.domains, sizes, listed)
    shares = ((size, spine_share(topology, listed, size), spine_share(topology, order, size)) for size in sizes)
    before, after = (spine_bytes(topology, names, sent, mesh) for names in (listed, order))
    as_good = not sizes and before == after  # even a ring over all nodes may cross the spine less often
    notes = ("No group spans some nodes and not all, and the order of the file is as good.",) if as_good else ()
    if len(known) > mesh.nodes:
        notes = (f"The file has {len(known)} nodes; the first {mesh.nodes} of them are ordered.", *notes)
    return Placed(order, tuple(shares), traffic=(Traffic("over the spine", before, after),), notes=notes)


def _gpus(files: Sequence[str], each: Sequence[Factors], sent: Sequence[Sent]) -> Placed:
    mesh, sizes = each[0].mesh, gpu_group_sizes(*each)
    found = [NodeTopology.load(file) for file in files]
    for file, node in zip(files, found, strict=True):
        _check_size(file, node, mesh)
        if node != found[0]:
            raise ShardingError(f"{file}: this node differs from that of {files[0]}; plan for nodes that are alike")
    node, listed = found[0], tuple(range(mesh.gpus))
    if node.joined or not sizes:
        why = "NVLink joins all GPUs of a node" if node.joined else "No group has some GPUs of a node and not all"
        return Placed(notes=(f"{why}, so any order of GPUs will do.",))
    order = place(node.domains, sizes)
    before, after = (node_bytes(node, numbers, sent) for numbers in (listed, order))
    traffic = (Traffic(f"{kind} in each node", before[kind], after[kind]) for kind in before)
    return Placed(gpu_order=order, traffic=tuple(traffic))


def _check_size(file: str, node: NodeTopology, mesh: Factor) -> None:
    if len(node.gpus) != mesh.gpus:
        raise ShardingError(
            f"{file}: the node has {len(node.gpus)} GPUs, and those of the mesh have {mesh.gpus}; give --gpus_per_node "
            f"{len(node.gpus)}, or a dump of such a node"
        )
