"""Says in which pauses a GPU does nothing, and why.

    found = idle.pauses(kernels, launched, starts_of_steps)
    found[Cause.HOST].seconds, found[Cause.HOST].longest_before

A pause ends with the start of a kernel. The first cause that fits is taken:

    BETWEEN_STEPS   the kernel is the first of a step
    DATA            the kernel or the one before it copies from or to the host's memory
    HOST            the host's call that launched the kernel ended after the pause had begun
    SHORT           the pause is shorter than 20 µs, as GPUs need between kernels that depend on each other
    UNKNOWN         none of these
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dhelix.runtime.profiling.traces.trace import Kernel

_SHORT = 0.02  # ms
_NOTHING = 1e-6  # ms; a shorter pause comes from rounding


class Cause(StrEnum):
    BETWEEN_STEPS = "between steps"
    DATA = "copies from or to the host's memory"
    HOST = "the host launches late"
    SHORT = "short pauses between kernels"
    UNKNOWN = "longer pauses of unknown cause"


@dataclass(frozen=True)
class Pauses:
    """The pauses of one GPU that have the same cause. Times are in milliseconds.

    Attributes:
      longest_before: name of the instruction or kernel that ran after the longest of them.
    """

    count: int
    ms: float
    longest_ms: float
    longest_before: str


def pauses(kernels: Sequence[Kernel], launched: Mapping[str, float], steps: Sequence[float]) -> dict[Cause, Pauses]:
    """The pauses of one GPU by their causes, those with the most time first.

    Args:
      kernels: all kernels of the GPU.
      launched: when the host's calls ended; see `recording.Gpu`.
      steps: when the steps began, in milliseconds, sorted.
    """
    found: dict[Cause, Pauses] = {}
    before: Kernel | None = None  # the kernel that ended last
    for kernel in sorted(kernels, key=lambda k: (k.start, k.end)):
        if before is not None and kernel.start - before.end > _NOTHING:
            cause, length = _cause(before, kernel, launched, steps), kernel.start - before.end
            old = found.get(cause, Pauses(0, 0.0, 0.0, ""))
            longest = max((length, kernel.instruction or kernel.event), (old.longest_ms, old.longest_before))
            found[cause] = Pauses(old.count + 1, old.ms + length, *longest)
        if before is None or kernel.end > before.end:
            before = kernel
    return dict(sorted(found.items(), key=lambda item: (-item[1].ms, item[0])))


def _cause(before: Kernel, after: Kernel, launched: Mapping[str, float], steps: Sequence[float]) -> Cause:
    if bisect.bisect_right(steps, after.start) > bisect.bisect_right(steps, before.end):
        return Cause.BETWEEN_STEPS
    if before.is_copy_of_host or after.is_copy_of_host:
        return Cause.DATA
    if launched.get(after.launch, before.end) > before.end:
        return Cause.HOST
    return Cause.SHORT if after.start - before.end < _SHORT else Cause.UNKNOWN
