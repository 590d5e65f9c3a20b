"""Overlaps that are simulated, so their optimum is known: the test of tuners.

The formulas differ in form from those of `profiles/channels`, so that a tuner cannot know them. The GPU is that of the
paper: 84 SMs, 696 GB/s (A40).

    V = Vmax (1 - exp(-(NC / n1)^p (C / c1)^q))                                   bandwidth that a collective takes
    x = v / (link NC^g / (NC^g + n0^g) (1 - exp(-(C / c2)^h))) + a log2(1 + v / (NC C)) + b NC^1.2
    y by equations 4, 5 and 6 of the paper, with whole waves

Contention is weak if Vmax is at most 0.4 of the bandwidth, and strong at 0.75 with more bytes for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dhelix.passes.tuning.measurements import Run
from dhelix.passes.tuning.space import Settings, Space
from dhelix.profiles.channels.channel_model import Array, ChannelSetting, Overlap, played
from dhelix.profiles.channels.model_fit import columns

SPACE = Space((1, 2, 3, 4, 6, 8, 12, 16, 24, 32), tuple(2**power for power in range(16, 23)))
NCCL = ChannelSetting(8, 2**21)
"""NCCL's defaults on the paper's cluster."""

SMS, BANDWIDTH = 84, 696e9


@dataclass(frozen=True)
class Simulated:
    """One overlap. Sizes are those of the module's docstring; arrays have one value for each computation."""

    volumes: Array
    blocks: Array
    blocks_per_sm: Array
    block_bytes: Array
    wave: Array
    link: float
    taken: float
    shape: dict[str, float]

    @classmethod
    def drawn(cls, seed: int, collectives: int, strong: bool) -> Simulated:
        """A random overlap. Under NCCL's defaults, communication takes 0.5 to 2.5 times as long as computation."""
        draw = np.random.default_rng([seed, collectives, strong])
        computations = int(draw.integers(3, 5)) if collectives <= 3 else collectives + 2
        made = cls(
            volumes=draw.uniform(8e6, 64e6, collectives),
            blocks=draw.integers(300, 3001, computations).astype(float),
            blocks_per_sm=draw.integers(1, 4, computations).astype(float),
            block_bytes=draw.uniform(20e3, 90e3, computations) * (1.8 if strong else 1.0),
            wave=draw.uniform(10e-6, 60e-6, computations),
            link=draw.uniform(8e9, 25e9),
            taken=(0.75 if strong else 0.4) * BANDWIDTH * draw.uniform(0.7, 1.0),
            shape={
                "n1": draw.uniform(6, 20), "c1": draw.uniform(3e5, 1.5e6), "p": draw.uniform(0.8, 1.2),
                "q": draw.uniform(0.4, 0.9), "n0": draw.uniform(1, 5), "g": draw.uniform(1, 1.6),
                "c2": draw.uniform(1e5, 5e5), "h": draw.uniform(0.7, 1.2), "a": draw.uniform(5e-6, 2e-5),
                "b": draw.uniform(2e-6, 1e-5),
            },
        )  # fmt: skip
        x = made.times((NCCL,) * collectives)[0].sum()
        factor = x * draw.uniform(0.4, 2.0) / made.alone.sum()
        blocks = np.maximum(np.round(made.blocks * factor), 100.0)
        return cls(**{**made.__dict__, "blocks": blocks})

    @property
    def overlap(self) -> Overlap:
        """What a tuner may know."""
        waves = self.blocks / (self.blocks_per_sm * SMS)
        return Overlap(tuple(map(float, self.volumes)), tuple(map(float, waves)), SMS)

    @property
    def alone(self) -> Array:
        """Seconds of each computation with nothing beside it."""
        return self._beside(np.zeros(1), np.ones(1))[:, 0]

    def times(self, settings: Settings) -> tuple[Array, Array]:
        """Seconds of each collective and of each computation."""
        x, y = self._times(*columns([settings]))
        return x[:, 0], y[:, 0]

    def seconds(self, settings: Settings) -> float:
        """The time of the overlap."""
        x, y = self.times(settings)
        return max(float(x.sum()), float(y.sum()))

    @cached_property
    def optimum(self) -> float:
        """The least time of all settings, by brute force. For at most 3 collectives."""
        every = columns([[one] for one in SPACE.all()])
        places = np.indices((len(every[0][0]),) * len(self.volumes)).reshape(len(self.volumes), -1)
        x, y = self._times(every[0][0][places], every[1][0][places])
        return float(np.maximum(x.sum(axis=0), y.sum(axis=0)).min())

    def run(self, noise: float = 0.0, seed: int = 0) -> Run:
        """Measures with a relative standard deviation of `noise` on each time."""
        draw = np.random.default_rng(seed)

        def measured(settings: Settings) -> tuple[list[float], list[float]]:
            x, y = self.times(settings)
            return tuple(list(part * (1.0 + noise * draw.standard_normal(part.shape))) for part in (x, y))  # type: ignore[return-value]

        return measured

    def _times(self, channels: Array, chunk: Array) -> tuple[Array, Array]:
        s = self.shape
        rate = self.link * channels ** s["g"] / (channels ** s["g"] + s["n0"] ** s["g"])
        rate = rate * (1.0 - np.exp(-((chunk / s["c2"]) ** s["h"])))
        volume = self.volumes[:, None]
        x = volume / rate + s["a"] * np.log2(1.0 + volume / (channels * chunk)) + s["b"] * channels**1.2
        return x, played(self.alone, self._beside(channels, chunk), x)

    def _beside(self, channels: Array, chunk: Array) -> Array:
        """Seconds of each computation beside each collective, [computations, *the shape of channels]."""
        s, each = self.shape, (-1, *(1,) * channels.ndim)
        blocks, per_sm, size, wave = (
            np.reshape(part, each) for part in (self.blocks, self.blocks_per_sm, self.block_bytes, self.wave)
        )
        slots = (SMS - channels) * per_sm
        taken = self.taken * (1.0 - np.exp(-((channels / s["n1"]) ** s["p"]) * (chunk / s["c1"]) ** s["q"]))
        return np.ceil(blocks / slots) * (wave + slots * size / (BANDWIDTH - taken))
