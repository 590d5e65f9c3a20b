"""Searches for the environment of a process under which a step is fastest: NCCL's buffers, channels and threads.

    found = search(evaluate, fixed={"NCCL_NTHREADS"})      # evaluate(environment) -> seconds of a step

NCCL reads these variables once, so each candidate needs a process of its own. Coordinate descent: one variable after
the other takes the value that is fastest with the others as they are. Variables that the launch setting sets, or the
user, stay as they are.

Cost: at most one process for each value, and one for the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "NCCL_BUFFSIZE": ("262144", "1048576"),  # bytes of each channel's buffer; NCCL's default is 4 MiB
    "NCCL_MIN_NCHANNELS": ("8", "16", "32"),
    "NCCL_NTHREADS": ("256",),
})  # fmt: skip

_FASTER = 0.005
"""A step must be faster by this fraction. Each process is measured once, so less may be chance."""


@dataclass(frozen=True)
class ProcessFound:
    """What the search found.

    Attributes:
      environment: the variables that are set.
      seconds: of a step under them.
      tried: every environment that was tried, with the seconds of a step.
    """

    environment: Mapping[str, str]
    seconds: float
    tried: tuple[tuple[Mapping[str, str], float], ...]


def search(evaluate: Callable[[Mapping[str, str]], float], fixed: Collection[str] = ()) -> ProcessFound:
    """Runs the search.

    Args:
      evaluate: the seconds of a step in a process with these variables; infinity if it fails. It may raise
        StopIteration if the time is over.
      fixed: variables that stay as they are.
    """
    tried: list[tuple[Mapping[str, str], float]] = []
    best: dict[str, str] = {}
    least = math.inf

    def attempt(environment: dict[str, str]) -> None:
        nonlocal best, least
        seconds = evaluate(environment)
        tried.append((environment, seconds))
        if seconds < least * (1.0 - _FASTER) or not math.isfinite(least):
            best, least = environment, seconds

    try:
        attempt({})
        for name, values in VARIABLES.items():
            for value in () if name in fixed else values:
                attempt({**best, name: value})
    except StopIteration:
        pass
    return ProcessFound(MappingProxyType(dict(sorted(best.items()))), least, tuple(tried))
