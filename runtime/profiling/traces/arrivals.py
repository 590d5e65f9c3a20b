"""Compares the GPUs of a trace: who arrives last at collectives, how long others wait, and how fast the data then move.

A collective moves data once its last GPU has arrived. The kernels of the others run from their own arrival, and wait:

    GPU 0   ██████████████████      waits 6 ms
    GPU 1         ████████████      arrives last; the data need 12 ms
                  ^ latest start

So the time of a kernel does not tell how fast the link is, and the GPU with the longest kernels is not the slow one.
Kernels end at about the same time on all GPUs of a group. The clocks of two hosts differ, so collectives of several
hosts align them (`clock_offsets`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dhelix.runtime.profiling.traces.executions import Execution


@dataclass(frozen=True)
class GroupRuns:
    """The executions of one collective in one group of GPUs. Times are in seconds.

    Attributes:
      gpus: the GPUs of the group.
      transfers: of each execution, the time from the latest start to the latest end.
      skews: of each execution, the time from the earliest start to the latest start.
      waits: of each GPU, the time that it waited for others, summed over all executions.
      delays: of each GPU, the time that the others waited while only it was missing.
      last: of each execution, the part on the GPU that arrived last, which waits for nobody.
    """

    gpus: tuple[int, ...]
    transfers: tuple[float, ...]
    skews: tuple[float, ...]
    waits: Mapping[int, float]
    delays: Mapping[int, float]
    last: tuple[Execution, ...]

    @property
    def transfer(self) -> float:
        return statistics.median(self.transfers)

    @property
    def skew(self) -> float:
        return statistics.fmean(self.skews)


def group_runs(found: Mapping[int, Sequence[Execution]], groups: Iterable[Sequence[int]]) -> list[GroupRuns]:
    """Compares the executions of one collective on the GPUs of each group.

    A group is left out if one of its GPUs was not recorded, or if its GPUs ran the collective a different number of
    times: the trace then cuts an execution, or the profiler lost some.

    Args:
      found: the executions of each GPU, in order.
      groups: GPUs that communicate with each other.
    """
    result = []
    for group in groups:
        counts = {len(found.get(gpu, ())) for gpu in group}
        if len(counts) != 1 or 0 in counts or len(group) < 2:
            continue
        waits, delays = dict.fromkeys(group, 0.0), dict.fromkeys(group, 0.0)
        transfers, skews, last = [], [], []
        for together in zip(*(found[gpu] for gpu in group), strict=True):
            starts = [execution.start for execution in together]
            second, latest = sorted(starts)[-2:]
            transfers.append(max(execution.end for execution in together) - latest)
            skews.append(latest - min(starts))
            for gpu, start in zip(group, starts, strict=True):
                waits[gpu] += latest - start
            last.append(together[starts.index(latest)])
            delays[group[starts.index(latest)]] += (latest - second) * (len(group) - 1)
        result.append(GroupRuns(tuple(group), tuple(transfers), tuple(skews), waits, delays, tuple(last)))
    return result


def connected(groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Joins groups that share a GPU, as the pairs of a permute do."""
    joined: list[set[int]] = []
    for group in groups:
        apart = [other for other in joined if other.isdisjoint(group)]
        joined = [*apart, set(group).union(*(other for other in joined if not other.isdisjoint(group)))]
    return sorted(tuple(sorted(group)) for group in joined)


def clock_offsets(
    hosts: Mapping[int, str], collectives: Iterable[tuple[Mapping[int, Sequence[Execution]], Sequence[Sequence[int]]]]
) -> dict[str, float]:
    """How far each host's clock is ahead of the first host's, in seconds, from the ends of collectives of both.

    A host without a collective that it shares with the first host, or with a host that does, has no offset.

    Args:
      hosts: the host of each GPU.
      collectives: for each collective, its executions by GPU, and its groups.
    """
    ahead: dict[tuple[str, str], list[float]] = defaultdict(list)
    for found, groups in collectives:
        for group in groups:
            by_host: dict[str, list[Sequence[Execution]]] = defaultdict(list)
            for gpu in group:
                if gpu in hosts and found.get(gpu):
                    by_host[hosts[gpu]].append(found[gpu])
            for one in by_host:
                for other in by_host:
                    if one == other or len({len(runs) for runs in by_host[one] + by_host[other]}) != 1:
                        continue
                    ends = [[max(e.end for e in each) for each in zip(*by_host[h], strict=True)] for h in (one, other)]
                    ahead[one, other] += [b - a for a, b in zip(*ends, strict=True)]
    offsets = {next(iter(hosts.values())): 0.0} if hosts else {}
    waiting = dict.fromkeys(hosts.values())
    while reached := [(a, b) for a, b in ahead if a in offsets and b in waiting and b not in offsets]:
        one, other = reached[0]
        offsets[other] = offsets[one] + statistics.median(ahead[one, other])
    return offsets
