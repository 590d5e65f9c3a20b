"""A step whose overlaps are simulated, so their best settings are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from dhelix.benchmarks.collectives.simulated_overlaps import NCCL, SPACE, Simulated
from dhelix.passes.plans.tuned_collectives import Identity
from dhelix.profiles.channels.channel_model import ChannelSetting
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.runtime.tuning.bodies import Body, BodyTimes
from dhelix.runtime.tuning.step_search import StepSettings

SLOW_KIND = ("tree", "simple")
"""An algorithm and protocol with which collectives take twice as long."""
FAST_KIND = ("ring", "ll128")
"""The one with which the first overlap's collectives take 0.7 of the time."""


class SimulatedStep:
    """Plays `StepTrials`. A step runs each overlap twice.

    Attributes:
      count: how often the step was measured.
    """

    key, surprise, devices, sends = "a program", "", 2, False

    def __init__(self, seeds: Sequence[int] = (0, 1), noise: float = 0.0) -> None:
        self._cases = {f"{seed:016x}": Simulated.drawn(seed, 2, strong=True) for seed in seeds}
        self._draw, self._noise = np.random.default_rng(0), noise
        self.count = 0

    @cached_property
    def _bodies(self) -> tuple[Body, ...]:
        nothing: Any = None
        found = []
        for name, case in self._cases.items():
            identities = tuple((name, "all-gather", n + 1) for n in range(len(case.volumes)))
            overlap = replace(case.overlap, waves=(math.inf,) * len(case.overlap.waves))
            pieces = ((),) * len(overlap.waves)
            body = Body(name, f"overlap {name}", 2, identities, nothing, (), pieces, overlap, self._of(name, {}))
            found.append(body)
        return tuple(found)

    def bodies(self) -> tuple[Body, ...]:
        return self._bodies

    def times(self, bodies: Sequence[Body], settings: StepSettings) -> Mapping[str, BodyTimes]:
        self.count += 1
        return {body.fingerprint: self._of(body.fingerprint, settings) for body in bodies}

    def seconds(self, settings: StepSettings) -> float:
        return sum(2 * self._of(name, settings).whole for name in self._cases)

    def end(self) -> None:
        pass

    @property
    def optimum(self) -> float:
        """The time of a step with the best settings, of NCCL's usual algorithm and protocol."""
        return sum(2 * case.optimum for case in self._cases.values())

    def _of(self, name: str, settings: Mapping[Identity, NcclSetting]) -> BodyTimes:
        case = self._cases[name]
        own = [settings.get((name, "all-gather", n + 1), NcclSetting()) for n in range(len(case.volumes))]
        x, y = case.times(tuple(ChannelSetting(s.channels or NCCL.channels, s.chunk or NCCL.chunk) for s in own))
        x = x * [self._factor(name, (s.algorithm, s.protocol)) for s in own]
        whole = max(float(x.sum()), float(y.sum()))
        x, y, (whole,) = (
            v * (1.0 + self._noise * self._draw.standard_normal(len(v))) for v in (x, y, np.array([whole]))
        )
        return BodyTimes(tuple(map(float, x)), tuple(map(float, y)), float(whole))

    def _factor(self, name: str, kind: tuple[str, str]) -> float:
        return 2.0 if kind == SLOW_KIND else 0.7 if kind == FAST_KIND and name == next(iter(self._cases)) else 1.0


__all__ = ["FAST_KIND", "SLOW_KIND", "SPACE", "SimulatedStep"]
