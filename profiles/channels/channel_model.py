"""Times of an overlap by the channels and chunks of its collectives (Lagom sections 3.1 and 3.2).

An overlap is a sequence of computations on one stream beside a sequence of collectives on another. Both streams start
together. A channel is a thread block of a collective, so it occupies an SM. A chunk is the piece that a channel moves
at a time, so chunks in flight take memory bandwidth.

    collectives    |--- x_1 ---|------ x_2 ------|                   X = x_1 + x_2
    computations   |-- y_1 --|----- y_2 -----|---- y_3 ----|         Y = y_1 + y_2 + y_3
                                                                     Z = max(X, Y), the time of the overlap

The paper gives no formula for a collective's time, nor for the bandwidth that it takes. This model assumes, for NC
channels, chunks of C bytes and a volume of v bytes:

    x = v / rate + alpha v / (NC C) + beta NC                        start of each chunk, start of each channel
    rate = (link^-4 + (NC r C / (C + c0))^-4)^(-1/4)                 the smaller of both, rounded at the corner
    u = limit w / (limit + w),  w = NC k C / (C + c1)                share of the memory bandwidth that is taken

As long as computation runs beside it, a collective takes 1 + s times as long. Without s, few channels would seem slower
and many faster than they are: collectives of few channels outlast the computation, so they are slowed for less of their
time (docs/design/tuning.md).

NC is the number of channels that run. NCCL opens some for a communicator, and a collective that asks for more gets
these: 4 between two GPUs without peer-to-peer, where 4, 8, 16 and 24 channels take equal times (`Links.most`).

Each type of collective is a kernel of its own. One that reduces also reads and adds, so r and c0 differ: a channel of a
reduce-scatter moved 10 GB/s, one of an all-gather 13. Links and starts are those of the machine, and are shared.

Beside a collective, a computation has lambda - NC of the GPU's lambda SMs, and 1 - u of its memory bandwidth. If it
has `waves` waves of thread blocks with all SMs, it then has ceil(waves lambda / (lambda - NC)) of them. A part m of its
time alone is the time of memory accesses:

    f = alone ((1 - m) g + m g (1 - NC / lambda) / (1 - u))          g = waves beside the collective / waves alone

Equation 6 of the paper becomes this form if the time of a wave's arithmetic and that of its bytes are written as parts
of the time alone. A computation that lies beside several collectives advances at the rate of each in turn (equation 4).

Cost: an overlap of M computations and N collectives takes M N steps of NumPy for any number of settings at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dhelix.profiles.channels.nccl_setting import ChannelError

type Array = np.ndarray

_CORNER = 4.0
"""How sharp the corner of a collective's rate is. With infinity, the rate is the minimum."""


@dataclass(frozen=True, order=True)
class ChannelSetting:
    """How a collective runs.

    Attributes:
      channels: its number of channels.
      chunk: bytes that a channel moves at a time.
    """

    channels: int
    chunk: int

    def __post_init__(self) -> None:
        if self.channels < 1 or self.chunk < 1:
            raise ChannelError(f"a collective needs at least 1 channel and chunks of 1 byte, not {self}")

    def __str__(self) -> str:
        return f"{self.channels} channels of {self.chunk / 1024:,.0f} KiB"


@dataclass(frozen=True)
class Overlap:
    """What an overlap consists of.

    Attributes:
      volumes: bytes that each collective moves over a GPU's links, in order.
      waves: waves of thread blocks of each computation on a whole GPU, in order. Blocks / (blocks per SM x SMs), not
        rounded. Infinity if the launch is not known: then the computation has no steps.
      sms: number of SMs of the GPU.
      kinds: type of each collective, such as "all-gather". () if all are of one type.
    """

    volumes: tuple[float, ...]
    waves: tuple[float, ...]
    sms: int
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.volumes or not self.waves:
            raise ChannelError("an overlap needs at least one collective and one computation")
        if min(self.volumes) <= 0 or min(self.waves) <= 0 or self.sms < 2:
            raise ChannelError("the volumes, waves and SMs of an overlap must be positive")
        if self.kinds and len(self.kinds) != len(self.volumes):
            raise ChannelError(f"{len(self.volumes)} collectives cannot have {len(self.kinds)} types; give each one")


@dataclass(frozen=True)
class Links:
    """A collective's time: the parameters of x.

    Attributes:
      link: bytes per second of the links.
      channel: bytes per second of one channel with large chunks, r.
      half_chunk: bytes of the chunk with which a channel reaches half of that, c0.
      per_chunk: seconds for which each chunk of a channel waits, alpha.
      per_channel: seconds that each channel adds, beta.
      most: channels of the communicator. Collectives that ask for more run with these.
      slowed: how much longer a collective takes beside computation, as a part of its time alone, s.
    """

    link: float
    channel: float
    half_chunk: float
    per_chunk: float
    per_channel: float
    most: float = math.inf
    slowed: float = 0.0

    def seconds(
        self, volume: float | Array, channels: Array, chunk: Array, rate: float | Array = 1.0, half: float | Array = 1.0
    ) -> Array:
        """Seconds of a collective of `volume` bytes alone, for arrays of channels and chunks of equal shape.

        `rate` and `half` are factors of r and c0 for the collective's type.
        """
        channels = np.minimum(channels, self.most)
        several = channels * (self.channel * rate) * chunk / (chunk + self.half_chunk * half)
        together = (self.link**-_CORNER + several**-_CORNER) ** (-1.0 / _CORNER)
        return volume / together + self.per_chunk * volume / (channels * chunk) + self.per_channel * channels


@dataclass(frozen=True)
class Bandwidth:
    """The share of the memory bandwidth that a collective takes: the parameters of u.

    Attributes:
      channel: share that one channel takes with large chunks, k.
      half_chunk: bytes of the chunk with which a channel takes half of that, c1.
      limit: the share is below this number.
    """

    channel: float
    half_chunk: float
    limit: float

    def share(self, channels: Array, chunk: Array) -> Array:
        """Shares, for arrays of channels and chunks of equal shape."""
        taken = channels * self.channel * chunk / (chunk + self.half_chunk)
        return self.limit * taken / (self.limit + taken)


@dataclass(frozen=True)
class ChannelModel:
    """The times of an overlap.

    Attributes:
      overlap: what it consists of.
      links: how long collectives take.
      bandwidth: what collectives take from computations.
      alone: seconds of each computation with no collective beside it.
      memory: the part of this time that is memory access, m, from 0 to 1.
      factors: r and c0 of each collective's type, over those of `links`. () if all are of one type.
    """

    overlap: Overlap
    links: Links
    bandwidth: Bandwidth
    alone: tuple[float, ...]
    memory: tuple[float, ...]
    factors: tuple[tuple[float, float], ...] = ()

    def collectives(self, channels: Array, chunk: Array) -> Array:
        """Seconds of each collective with nothing beside it, [collectives, settings], for arrays of that shape."""
        rate, half = np.array(self.factors or ((1.0, 1.0),)).T[:, :, None]
        return self.links.seconds(np.reshape(self.overlap.volumes, (-1, 1)), channels, chunk, rate, half)

    def beside(self, channels: Array, chunk: Array) -> Array:
        """Seconds of each computation that has a collective of these settings beside it all the time.

        Args:
          channels, chunk: arrays of equal shape.

        Returns:
          An array of shape [computations, *that shape].
        """
        each = (-1, *(1,) * channels.ndim)
        channels = np.minimum(channels, self.links.most)
        alone, memory = np.reshape(self.alone, each), np.reshape(self.memory, each)
        sms, waves = self.overlap.sms, np.reshape(self.overlap.waves, each)
        left = sms - channels
        known = np.isfinite(waves)
        whole = np.where(known, waves, 1.0)
        more = np.where(known, np.ceil(whole * sms / left) / np.ceil(whole), sms / left)
        waits = more * (left / sms) / (1.0 - self.bandwidth.share(channels, chunk))
        return alone * ((1.0 - memory) * more + memory * waits)

    def times(self, channels: Array, chunk: Array) -> tuple[Array, Array]:
        """Seconds of each collective and of each computation.

        Args:
          channels, chunk: arrays of shape [collectives, settings].

        Returns:
          Arrays of shape [collectives, settings] and [computations, settings].
        """
        x, beside = self.collectives(channels, chunk), self.beside(channels, chunk)
        if self.links.slowed:
            # If collectives outlast computation, all of it has them beside it. Otherwise all of them are slowed.
            computing = played(self.alone, beside, x * (1.0 + self.links.slowed)).sum(axis=0)
            x = _slowed(x, computing, self.links.slowed)
        return x, played(self.alone, beside, x)


def _slowed(x: Array, computing: Array, slowed: float) -> Array:
    """Seconds of each collective, which takes longer until computation has ended."""
    alone = np.cumsum(x, axis=0)
    ends = np.where(alone * (1.0 + slowed) <= computing, alone * (1.0 + slowed),
                    alone + computing * slowed / (1.0 + slowed))  # fmt: skip
    return np.diff(ends, axis=0, prepend=0.0)


def played(alone: Sequence[float] | Array, slowed: Sequence[Sequence[Array]] | Array, x: Array) -> Array:
    """Seconds of each computation, when computations and collectives run in order on two streams (equation 4).

    Args:
      alone: seconds of each computation with no collective beside it.
      slowed: `slowed[i][j]`: seconds of computation i with collective j beside it all the time, [settings].
      x: seconds of each collective, [collectives, settings].
    """
    ends = np.cumsum(x, axis=0)
    now = np.zeros_like(ends[0])
    found = []
    for mine, beside in zip(alone, slowed, strict=True):
        start, left = now, np.ones_like(now)
        for end, whole in zip(ends, beside, strict=True):
            spent = np.minimum(np.maximum(end - now, 0.0), left * whole)
            now, left = now + spent, left - spent / whole
        now = now + left * mine
        found.append(now - start)
    return np.stack(found)
