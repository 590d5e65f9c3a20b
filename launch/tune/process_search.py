"""Searches for the environment of a process under which a step is fastest: NCCL's buffers, channels and threads.

    found = search(evaluate, fixed={"NCCL_NTHREADS"})      # evaluate(environment) -> seconds of a step

NCCL reads these variables once, so each candidate needs a process of its own. Buffers and channels belong together:
without peer-to-peer, smaller buffers alone were slower, more channels alone too, and both together faster
(docs/results/tuning.md).

    1  the process as it is
    2  variables one by one                larger chunks of sends, the place of shared memory; kept if faster
    3  pairs of buffers and channels       all with the same bytes together
    4  descent from the fastest pair       buffers and channels apart, buffers also two places down
    5  threads                             with the fastest pair, or without one if none is faster

Variables that the launch setting sets, or the user, stay as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dhelix.passes.tuning.measurements import LimitReached

BUFFER, THREADS = "NCCL_BUFFSIZE", "NCCL_NTHREADS"
CHANNELS, PEER_CHANNELS = "NCCL_MIN_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS"
CHUNK, NET_CHUNK = "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_NET_CHUNKSIZE"
PLACE = "NCCL_SHM_LOCALITY"
VARIABLES = (BUFFER, CHANNELS, PEER_CHANNELS, THREADS, CHUNK, NET_CHUNK, PLACE)

_BUFFERS = (None, *(1 << n for n in range(21, 16, -1)))  # bytes of each channel's buffer; NCCL's own are 4 MiB
_CHANNELS = (None, 8, 16, 32)
_MOST_CHANNELS = 32
_TOGETHER = 16 << 20
"""Bytes of all buffers together, in step 3: as NCCL has them without peer-to-peer, 4 channels of 4 MiB."""

_CHUNK_OF_BUFFER = str(1 << 19)
"""An eighth of NCCL's own buffer, which is the largest chunk of a send. NCCL has a quarter of that."""

FASTER = 0.005
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


def single(link: str, sends: bool) -> tuple[Mapping[str, str], ...]:
    """The variables of step 2.

    Args:
      link: between the GPUs.
      sends: whether the step has all-to-alls or permutes. NCCL runs these as sends.
    """
    chunk = {"no-p2p": CHUNK, "two-nodes": NET_CHUNK}.get(link)
    chunks = ({chunk: _CHUNK_OF_BUFFER},) if sends and chunk else ()
    return (*chunks, {PLACE: "1"}) if link == "no-p2p" else chunks


def search(
    evaluate: Callable[[Mapping[str, str]], float],
    fixed: Collection[str] = (),
    first: Callable[[], Iterable[Mapping[str, str]]] = tuple,
) -> ProcessFound:
    """Runs the search.

    Args:
      evaluate: the seconds of a step in a process with these variables; infinity if it fails. It may raise
        LimitReached if the time is over.
      fixed: variables that stay as they are.
      first: gives the variables of step 2, each with its value. It is called after step 1.
    """
    made = _Search(evaluate, fixed, first)
    with contextlib.suppress(LimitReached):
        made.run()
    return made.found


class _Search:
    """One search. A place of the grid is a pair of indices: of a buffer, and of a number of channels."""

    def __init__(
        self,
        evaluate: Callable[[Mapping[str, str]], float],
        fixed: Collection[str],
        first: Callable[[], Iterable[Mapping[str, str]]],
    ) -> None:
        self._evaluate, self._fixed, self._first = evaluate, frozenset(fixed), first
        self._kept = dict[str, str]()  # of step 2; everything later has them
        self._buffers = _BUFFERS[:1] if BUFFER in fixed else _BUFFERS
        self._channels = _CHANNELS[:1] if {CHANNELS, PEER_CHANNELS} & set(fixed) else _CHANNELS
        self._known: dict[tuple[int, int], float] = {}
        self._best, self._least = dict[str, str](), math.inf
        self._tried: list[tuple[Mapping[str, str], float]] = []

    @property
    def found(self) -> ProcessFound:
        return ProcessFound(MappingProxyType(dict(sorted(self._best.items()))), self._least, tuple(self._tried))

    def run(self) -> None:
        self._at((0, 0))
        # Step 2.
        for variables in self._first():
            if not self._fixed & set(variables):
                self._attempt({**self._kept, **variables})
                self._kept = self._best
        # Step 3.
        starts = [place for place in self._grid() if self._is_start(place)]
        for place in starts:
            self._at(place)
        # Step 4.
        place = min(starts, key=self._at, default=None)
        while place is not None:
            place = self._better(place)
        # Step 5.
        if THREADS not in self._fixed:
            self._attempt({**self._best, THREADS: "256"})

    @property
    def _gained(self) -> float:
        return 1.0 - FASTER

    def _grid(self) -> list[tuple[int, int]]:
        return [(b, c) for b in range(len(self._buffers)) for c in range(len(self._channels))]

    def _is_start(self, place: tuple[int, int]) -> bool:
        buffer, channels = self._buffers[place[0]], self._channels[place[1]]
        if len(self._buffers) == 1 or len(self._channels) == 1:
            return place != (0, 0)
        return buffer is not None and channels is not None and buffer * channels == _TOGETHER

    def _near(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """The neighbours of a place that were not tried yet."""
        b, c = place
        near = [(b + 1, c), (b + 2, c), (b - 1, c), (b, c + 1), (b, c - 1)]
        return [one for one in near if one in self._grid() and one not in self._known]

    def _better(self, place: tuple[int, int]) -> tuple[int, int] | None:
        """The first neighbour that is faster by more than chance."""
        for near in self._near(place):
            if self._at(near) < self._at(place) * self._gained:
                return near
        return None

    def _at(self, place: tuple[int, int]) -> float:
        if place not in self._known:
            self._known[place] = self._attempt(self._environment(place))
        return self._known[place]

    def _environment(self, place: tuple[int, int]) -> dict[str, str]:
        buffer, channels = self._buffers[place[0]], self._channels[place[1]]
        found = {**self._kept, **({} if buffer is None else {BUFFER: str(buffer)})}
        if channels is not None:
            found |= {CHANNELS: str(channels), PEER_CHANNELS: str(min(2 * channels, _MOST_CHANNELS))}
        return found

    def _attempt(self, environment: dict[str, str]) -> float:
        seconds = self._evaluate(environment)
        self._tried.append((environment, seconds))
        if seconds < self._least * self._gained or not math.isfinite(self._least):
            self._best, self._least = environment, seconds
        return seconds
