"""Compares two profiles, for example of two machines of the same kind.

    for agreement in compare(profile, other):
        print(agreement.setting, agreement.what, agreement.median, agreement.p90)

The relative difference of two times is time / other time - 1. For pairs, the times of the whole pair are compared. Only
entries that both profiles have under the same launch setting are compared. Entries that take less than MIN_SECONDS in
one of the profiles are left out, because they matter little in a step and scatter more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dhelix.profiles.profile import PairTiming, Profile, Timing

MIN_SECONDS = 20e-6
WORST = 5
_PARTS = ("operators", "collectives", "pairs")


@dataclass(frozen=True)
class Difference:
    """An entry of both profiles: its key as text, and its time in each profile, in seconds."""

    key: str
    seconds: float
    other: float

    @property
    def relative(self) -> float:
        """The relative difference of the times; above 0 if the other profile has the shorter time."""
        return self.seconds / self.other - 1


@dataclass(frozen=True)
class Agreement:
    """How well two profiles agree in one kind of entry, under one launch setting.

    Attributes:
      what: `operators`, `collectives` or `pairs`.
      common: number of entries that both profiles have.
      compared: number of common entries that take MIN_SECONDS or more in both profiles.
      median, p90: median and 90th percentile of the absolute values of the relative differences; None if no entry is
        compared.
      bias: median of the relative differences, with their signs; above 0 if the other profile has shorter times.
      worst: the entries whose relative differences have the largest absolute values, at most WORST of them.
    """

    setting: str
    what: str
    common: int
    compared: int
    median: float | None = None
    p90: float | None = None
    bias: float | None = None
    worst: tuple[Difference, ...] = ()

    def to_json(self) -> dict[str, Any]:
        worst = [{**asdict(d), "relative": d.relative} for d in self.worst]
        return {name: value for name, value in asdict(self).items() if name != "worst"} | {"worst": worst}


def compare(profile: Profile, other: Profile) -> tuple[Agreement, ...]:
    """The agreement of operators, of collectives and of pairs, for each launch setting that both profiles have."""
    settings = sorted(set(profile.sections) & set(other.sections))
    return tuple(
        _agreement(setting, part, getattr(profile.section(setting), part), getattr(other.section(setting), part))
        for setting in settings
        for part in _PARTS
    )


def _agreement(
    setting: str, what: str, ours: Mapping[Any, Timing | PairTiming], theirs: Mapping[Any, Timing | PairTiming]
) -> Agreement:
    common = [Difference(str(key), ours[key].seconds, theirs[key].seconds) for key in ours if key in theirs]
    compared = [d for d in common if min(d.seconds, d.other) >= MIN_SECONDS]
    if not compared:
        return Agreement(setting, what, len(common), 0)
    compared.sort(key=lambda d: (-abs(d.relative), d.key))
    sizes = [abs(d.relative) for d in compared]
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    bias = statistics.median(d.relative for d in compared)
    median = statistics.median(sizes)
    return Agreement(setting, what, len(common), len(compared), median, p90, bias, tuple(compared[:WORST]))
