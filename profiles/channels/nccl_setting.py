"""How NCCL runs one collective: algorithm, protocol, channels and chunks.

    NcclSetting("ring", "simple", channels=4).text      "ring/simple channels=4"
    NcclSetting().text                                  "", as NCCL has it
    NcclSetting.parse("ring/simple channels=4")

A setting is part of the key of a collective (`profiles/keys.py`), because it decides the collective's time. Plans hold
the settings of a program's collectives (`passes/tuning/collective_settings.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dhelix.errors import DhelixError

ALGORITHMS = ("tree", "ring", "collnet-direct", "collnet-chain", "nvls", "nvls-tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
MOST_CHANNELS = 64
LEAST_CHUNK = 1920
"""Bytes: NCCL stops the process if a chunk is smaller than the largest grain of its protocols."""

TEXT = rf"(?:({'|'.join(ALGORITHMS)})/({'|'.join(PROTOCOLS)}))?(?: ?channels=(\d+))?(?: ?chunk=(\d+))?"
"""Pattern of a setting's text, with the groups algorithm, protocol, channels and chunk."""


class ChannelError(DhelixError):
    """An overlap, a setting or a measurement makes no sense."""


@dataclass(frozen=True, order=True)
class NcclSetting:
    """How NCCL runs one collective. The defaults leave everything to NCCL.

    Attributes:
      algorithm, protocol: of ALGORITHMS and PROTOCOLS; both are given, or neither.
      channels: number of channels. NCCL takes fewer if the communicator has fewer. Where it would not (CollNet, and
        NVLS over several nodes), the plugin leaves the number to NCCL.
      chunk: bytes that a channel moves at a time. NCCL before 2.30 ignores it.

    Raises:
      ChannelError: a value is impossible.
    """

    algorithm: str = ""
    protocol: str = ""
    channels: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if bool(self.algorithm) != bool(self.protocol):
            raise ChannelError(f"algorithm {self.algorithm!r} and protocol {self.protocol!r} are given together")
        for name, value, known in (("algorithm", self.algorithm, ALGORITHMS), ("protocol", self.protocol, PROTOCOLS)):
            if value and value not in known:
                raise ChannelError(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
        if not 0 <= self.channels <= MOST_CHANNELS:
            raise ChannelError(f"{self.channels} channels are impossible; give 1 to {MOST_CHANNELS}, or 0 for NCCL's")
        if self.chunk and self.chunk < LEAST_CHUNK:
            raise ChannelError(f"chunks of {self.chunk} bytes are too small; give at least {LEAST_CHUNK}, or 0")

    def __str__(self) -> str:
        channels = f"{self.channels} channels" if self.channels else ""
        chunk = f"chunks of {self.chunk / 1024:,.0f} KiB" if self.chunk else ""
        kind = f"{self.algorithm} {self.protocol}".strip()
        return ", ".join(filter(None, (kind, channels, chunk))) or "as NCCL has it"

    @property
    def text(self) -> str:
        """The setting as short text without ambiguity, for keys; "" if everything is left to NCCL."""
        kind = f"{self.algorithm}/{self.protocol}" if self.algorithm else ""
        channels = f"channels={self.channels}" if self.channels else ""
        return " ".join(filter(None, (kind, channels, f"chunk={self.chunk}" if self.chunk else "")))

    @classmethod
    def parse(cls, text: str) -> NcclSetting:
        """The setting whose `text` is `text`. Raises ChannelError if there is none."""
        found = re.fullmatch(TEXT, text)
        if found is None:
            raise ChannelError(f"{text[:100]!r} is not the setting of a collective")
        algorithm, protocol, channels, chunk = found.groups()
        return cls(algorithm or "", protocol or "", int(channels or 0), int(chunk or 0))


AS_NCCL_HAS_IT = NcclSetting()
