"""Plays NCCL for the tuner plugin: makes communicators, asks about collectives, and chooses by the table of costs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhelix.profiles.channels.nccl_setting import ALGORITHMS, PROTOCOLS
from dhelix.runtime.tuning.plugin import FUNCTIONS

_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT = ctypes.POINTER(_P)
_INIT = {
    3: ctypes.CFUNCTYPE(_I, _S, _S, _P, _OUT),
    5: ctypes.CFUNCTYPE(_I, _OUT, ctypes.c_uint64, _S, _S, _P, _P, _P),
}
_ASK = {
    3: ctypes.CFUNCTYPE(_I, _P, _I, _S, _I, _P, _I, _I, ctypes.POINTER(_I)),
    4: ctypes.CFUNCTYPE(_I, _P, _I, _S, _I, _P, _I, _I, _I, ctypes.POINTER(_I)),
}
_END = ctypes.CFUNCTYPE(_I, _P)
_CHUNK = ctypes.CFUNCTYPE(_I, _P, _I, _S, _I, _I, _I, ctypes.POINTER(_S))

USUAL = ("ring", "simple", 24)
"""What NCCL chooses by itself."""


@dataclass(frozen=True)
class Chosen:
    """How a collective runs."""

    algorithm: str
    protocol: str
    channels: int
    chunk: int = 0


class Communicator:
    """One GPU's part of a communicator, under an interface of 3 to 6. It runs NVLS only if that is its usual choice.

    Attributes:
      usual: algorithm, protocol and channels that NCCL chooses by itself.
    """

    def __init__(
        self,
        library: Path,
        interface: int = 5,
        ranks: int = 2,
        nodes: int = 1,
        usual: tuple[str, str, int] = USUAL,
    ) -> None:
        self.usual = usual

        class Interface(ctypes.Structure):
            _fields_ = (
                ("name", ctypes.c_char_p),
                ("init", _INIT[3 if interface < 5 else 5]),
                ("ask", _ASK[3 if interface < 4 else 4]),
                ("end", _END),
                *([("chunk", _CHUNK)] if interface == 6 else []),
            )

        self._plugin: Any = Interface.in_dll(ctypes.CDLL(str(library)), f"ncclTunerPlugin_v{interface}")
        self._interface, self._context = interface, ctypes.c_void_p()
        out = ctypes.byref(self._context)
        done = (
            self._plugin.init(ranks, nodes, None, out)
            if interface < 5
            else self._plugin.init(out, 7, ranks, nodes, None, None, None)
        )
        assert done == 0 and self._plugin.name == b"dhelix"

    def ask(self, kind: str, size: int) -> Chosen:
        """Launches a collective."""
        costs = np.full((len(ALGORITHMS), len(PROTOCOLS)), 9.0, np.float32)
        costs[ALGORITHMS.index("nvls")] = -1.0
        algorithm, protocol, own = self.usual
        costs[ALGORITHMS.index(algorithm), PROTOCOLS.index(protocol)] = 5.0
        channels = ctypes.c_int(0)
        function = FUNCTIONS.index(kind)
        more = () if self._interface < 4 else (0,)
        size_of_table = costs.shape
        asked = (function, size, 1, costs.ctypes.data, *size_of_table, *more, ctypes.byref(channels))
        assert self._plugin.ask(self._context, *asked) == 0
        possible = np.where(costs < 0.0, np.inf, costs)
        chosen, by = map(int, np.unravel_index(possible.argmin(), costs.shape))
        chunk = ctypes.c_size_t(0)
        if self._interface == 6:
            self._plugin.chunk(self._context, function, size, chosen, by, 1, ctypes.byref(chunk))
        return Chosen(ALGORITHMS[chosen], PROTOCOLS[by], channels.value or own, chunk.value)

    def end(self) -> None:
        assert self._plugin.end(self._context) == 0
