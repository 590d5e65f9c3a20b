"""Cuts two operator sequences into segments and pairs the segments: equation 2 of DHelix section 4.2.

This is dynamic programming. T(i, j) is the least time of the first i operators of one strand and the first j operators
of the other strand. P is the time of two segments that run together. The cuts are part of the search: the minimum is
over all lengths a and b of the two last segments. One of these segments may be empty.

    T(i, j) = min over a, b of T(i - a, j - b) + P(first[i - a : i], second[j - b : j])

If one segment is empty, the other segment runs alone. The compute of a segment may also hide collectives of the same
segment (the paper's dual-coloured blocks).

Cost: proportional to (operators of one) x (operators of the other) x (longest segment + 1) squared.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.ordering.strand_sequences import Operator

SegmentCost = Callable[[Sequence[Operator], Sequence[Operator]], float]


@dataclass(frozen=True)
class SegmentPair:
    """Two segments that run together, and the `seconds` that they take.

    The segment of the first strand holds its operators `first[0]` to `first[1] - 1`. The same holds for `second`.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    seconds: float


@dataclass(frozen=True)
class Pairing:
    """Segment pairs in the order in which they run. `seconds` is their total time, with a barrier after each pair."""

    seconds: float
    segments: tuple[SegmentPair, ...]


def pair(
    first: Sequence[Operator],
    second: Sequence[Operator],
    cost: SegmentCost,
    max_segment: int,
    allowed: Callable[[int, int], bool] = lambda i, j: True,
    less_than: float = math.inf,
) -> Pairing | None:
    """Finds the fastest way to cut two sequences into segments and to pair the segments (equation 2).

    Args:
      cost: seconds of two segments that run together. One of the two may be empty. The cost must not be less than the
        time for which both segments occupy any single lane, because the search skips segments by that bound.
      max_segment: the largest number of operators of one strand in a segment.
      allowed: whether a barrier may follow the first i operators of one sequence and the first j of the other.
      less_than: limit in seconds; the plan must be faster.

    Returns:
      The plan, or None if no plan satisfies `allowed` and `less_than`.
    """
    bounds = _Bounds(first, second)
    best: dict[tuple[int, int], tuple[float, SegmentPair | None]] = {(0, 0): (0.0, None)}
    shapes = [(a, b) for a in range(max_segment + 1) for b in range(max_segment + 1) if a + b]
    for i in range(len(first) + 1):
        for j in range(len(second) + 1):
            if not (i or j) or not allowed(i, j):
                continue
            found: tuple[float, SegmentPair | None] | None = None
            enough = less_than - bounds.busy(i, len(first), j, len(second))
            tries = [
                (best[i - a, j - b][0] + bounds.busy(i - a, i, j - b, j), a + b, a)
                for a, b in shapes
                if (i - a, j - b) in best
            ]
            for least, size, a in sorted(tries):
                if least >= (enough if found is None else found[0]):
                    break
                b = size - a
                seconds = cost(first[i - a : i], second[j - b : j])
                until = best[i - a, j - b][0] + seconds
                if until < (enough if found is None else found[0]):
                    found = until, SegmentPair((i - a, i), (j - b, j), seconds)
            if found is not None:
                best[i, j] = found
    return _plan(best, len(first), len(second))


def _plan(best: Mapping[tuple[int, int], tuple[float, SegmentPair | None]], i: int, j: int) -> Pairing | None:
    if (i, j) not in best:
        return None
    seconds, segment = best[i, j]
    segments: list[SegmentPair] = []
    while segment is not None:
        segments.append(segment)
        segment = best[segment.first[0], segment.second[0]][1]
    return Pairing(seconds, tuple(reversed(segments)))


class _Bounds:
    """Lower bounds on the time of two segments: the busy time of their busiest lane."""

    def __init__(self, first: Sequence[Operator], second: Sequence[Operator]) -> None:
        lanes = ([_running_sums(o.busy(lane) for o in strand) for strand in (first, second)] for lane in Lane)
        self.lanes = [lane for lane in lanes if any(sums[-1] for sums in lane)]

    def busy(self, i: int, i_end: int, j: int, j_end: int) -> float:
        most = 0.0
        for first, second in self.lanes:
            seconds = first[i_end] - first[i] + second[j_end] - second[j]
            if seconds > most:
                most = seconds
        return most


def _running_sums(values: Iterator[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
