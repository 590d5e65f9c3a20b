"""The settings that a collective may have, and the steps between them.

space = Space(channels=(1, 2, 4, 8, 16), chunks=(65536, 262144, 1048576))
space.smallest                              # 1 channel, chunks of 64 KiB
space.neighbours(ChannelSetting(4, 262144)) # one place up or down, channels and chunks apart
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from dhelix.profiles.channels.channel_model import ChannelSetting
from dhelix.profiles.channels.nccl_setting import ChannelError

type Settings = tuple[ChannelSetting, ...]
"""One setting for each collective of an overlap."""


@dataclass(frozen=True)
class Space:
    """Admissible channels and chunks, ascending. A chunk that cannot be set is the only one."""

    channels: tuple[int, ...]
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (("channels", self.channels), ("chunks", self.chunks)):
            if not values or values[0] < 1 or any(a >= b for a, b in pairwise(values)):
                raise ChannelError(f"{name} must be positive and ascending, not {values}")

    @property
    def smallest(self) -> ChannelSetting:
        """The setting that takes least from computation."""
        return ChannelSetting(self.channels[0], self.chunks[0])

    @property
    def largest(self) -> ChannelSetting:
        return ChannelSetting(self.channels[-1], self.chunks[-1])

    def all(self) -> list[ChannelSetting]:
        return [ChannelSetting(*one) for one in product(self.channels, self.chunks)]

    def at(self, channels: float, chunks: float) -> ChannelSetting:
        """The setting at a place of the grid. A place is from 0, the smallest, to 1, the largest."""
        return ChannelSetting(_place(self.channels, channels), _place(self.chunks, chunks))

    def neighbours(self, setting: ChannelSetting) -> Iterator[ChannelSetting]:
        """Settings that differ by one place of the grid, in channels or in chunks."""
        n, c = self.channels.index(setting.channels), self.chunks.index(setting.chunk)
        for step in (1, -1):
            if 0 <= n + step < len(self.channels):
                yield ChannelSetting(self.channels[n + step], setting.chunk)
        for step in (1, -1):
            if 0 <= c + step < len(self.chunks):
                yield ChannelSetting(setting.channels, self.chunks[c + step])

    def grown(self, setting: ChannelSetting, rate: float) -> ChannelSetting:
        """The step of algorithm 2: more channels and larger chunks, both by the factor 1 + rate.

        Returns `setting` if nothing larger is admissible.
        """
        channels = max(setting.channels + 1, setting.channels * (1.0 + rate))
        return ChannelSetting(_next(self.channels, channels), _next(self.chunks, setting.chunk * (1.0 + rate)))


def neighbours(settings: Settings, space: Space) -> Iterator[Settings]:
    """Settings of an overlap that differ in one place of one collective."""
    for j, one in enumerate(settings):
        for other in space.neighbours(one):
            yield (*settings[:j], other, *settings[j + 1 :])


def _place(values: tuple[int, ...], place: float) -> int:
    return values[round(place * (len(values) - 1))]


def _next(values: tuple[int, ...], least: float) -> int:
    return next((value for value in values if value >= least), values[-1])
