"""Gives collectives between nodes a communication stream of their own.

Before, as XLA compiles it:                          After:
    a = all-gather-start(x)     in each node             a = all-gather-start(x)     stream 0
    b = all-to-all-start(y)     between nodes            b = all-to-all-start(y)     stream 1

    stream 0   aaaaaaaabbbbbbbbbbbb                      stream 0   aaaaaaaa
                                                         stream 1   bbbbbbbbbbbb

XLA runs all asynchronous collectives on one stream, so they run one after the other, even if they use different links.
DHelix (arXiv 2411.15871, sections 1 and 5) runs computation, communication in a node and communication between nodes
at once. The searches for an order then pair collectives of both streams with each other and with compute.

Contract
    Consumes  a scheduled module, before its order is searched.
    Makes     a stream annotation on each collective that XLA launches asynchronously (`passes/analysis/streams.py`).
    Leaves    programs whose collectives are all in a node, or all between nodes: collectives that use the same links
              would only slow each other. A collective between nodes also stays on stream 0 if one of its groups shares
              more than one device with a group in a node.

Why it is legal: a reader waits for the end of a collective, whatever its stream is. Processes cannot deadlock:
  1. All devices launch the same collectives in the same order, and each stream keeps that order.
  2. Take the first collective in launch order that has not ended. On each of its devices, everything before it on its
     stream has ended, so it is the head of its stream. The device has enough multiprocessors for one collective of
     each stream, as soon as the compute kernels that occupy them end.
  3. After a compute kernel has begun, it waits for no collective. The exception are Mosaic kernels that wait for other
     devices. The pass `exclusive-kernels` keeps them apart from collectives.
  So that collective runs on all its devices, and it ends. tests/passes/communication/test_stream_assignment.py checks
  all interleavings on small meshes.
Cost: while two collectives run, both hold multiprocessors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import Collective, Groups, find_collective, is_start
from dhelix.passes.analysis.streams import put_on_stream
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.hardware import H200, Hardware

_SHARED = 1
"""Largest number of devices that two groups may share if their collectives run at the same time.

Groups along two different mesh axes share at most one device.
"""


@dataclass(frozen=True)
class StreamAssignment:
    """Puts collectives between nodes on stream 1.

    Attributes:
      hardware: says how many GPUs a node has.
    """

    hardware: Hardware = H200

    name = "stream-assignment"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        inside, between = _by_link(module, self.hardware.gpus_per_node)
        if not inside or not between:
            return False
        apart = {groups: _apart(groups, set(inside.values())) for groups in set(between.values())}
        second = [start for start, groups in between.items() if apart[groups]]
        stay = len(between) - len(second)
        if stay:
            context.note("left alone: groups between nodes share several devices with groups in a node", count=stay)
        if second:
            for start in (*inside, *between):
                put_on_stream(start, 0)
            for start in second:
                put_on_stream(start, 1)
            counts = {"inside": len(inside), "between": len(second)}
            context.note("collectives in a node and between nodes run at the same time", **counts)
        return bool(second)


def _by_link(module: HloModule, gpus_per_node: int) -> tuple[dict[Instruction, Groups], dict[Instruction, Groups]]:
    """Maps asynchronous collectives to their groups: one map for collectives in a node, one for those between nodes."""
    inside: dict[Instruction, Groups] = {}
    between: dict[Instruction, Groups] = {}
    for start in (i for computation in module.computations for i in computation.instructions if is_start(i)):
        if (found := find_collective(start)) is not None:
            parts = (found, *found.others)
            crosses = any(part.nodes(gpus_per_node) > 1 or not part.groups for part in parts)
            (between if crosses else inside)[start] = _groups(parts)
    return inside, between


def _groups(parts: Iterable[Collective]) -> Groups:
    """The groups of a collective. Pairs of a permute that form a chain or a ring count as one group."""
    found: list[tuple[int, ...]] = []
    for part in parts:
        if part.kind != "collective-permute":
            found += part.groups
            continue
        rings: list[set[int]] = []
        for pair in part.groups:
            touched = [ring for ring in rings if ring & set(pair)]
            rings = [ring for ring in rings if ring not in touched] + [set(pair).union(*touched)]
        found += [tuple(sorted(ring)) for ring in rings]
    return tuple(found)


def _apart(groups: Groups, others: set[Groups]) -> bool:
    """Whether each group of `groups` shares at most `_SHARED` devices with each group in `others`.

    Empty `groups` mean one group of all devices, so the result is False.
    """
    each = {group for other in others for group in other}
    return bool(groups) and all(len(set(a) & set(b)) <= _SHARED for a in groups for b in each)
