"""Converts the profile of a GPU into a profile of a similar GPU.

    as_on(profile_of_h200, "H100")           # a Profile of H100; all its times are marked ALIKE

An H100 (SXM) and an H200 have the same cores, clock, power and links. They differ only in memory (`Hardware.like`).
Each time is multiplied by the ratio of the roofline's times for both GPUs. So times of collectives and of compute-bound
operators do not change, and times of memory-bound operators change with the memory bandwidth. The two sides of a pair
slow each other down by the same factors as before (`contention`). docs/research_log.md compares the resulting times
with measured times.

With such a profile, users of the similar GPU can make plans under every launch setting before they profile anything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dhelix.profiles.estimates.contention import measured_rates, pair_seconds
from dhelix.profiles.estimates.interpolation import roofline_seconds
from dhelix.profiles.hardware import describe
from dhelix.profiles.keys import Key
from dhelix.profiles.profile import ALIKE, PairTiming, Profile, Section, Timing


def as_on(profile: Profile, hardware: str) -> Profile:
    """The estimated profile of the GPU called `hardware`, with the same link as `profile`."""
    here, there = describe(hardware, profile.link), describe(profile.hardware, profile.link)

    @functools.cache  # because a key is part of many pairs
    def ratio(key: Key) -> float:
        return roofline_seconds(key, here) / roofline_seconds(key, there)

    def solo[K: Key](timings: Mapping[K, Timing]) -> dict[K, Timing]:
        return {key: _stretched(timing, ratio(key)) for key, timing in timings.items()}

    def section(one: Section) -> Section:
        pairs = {key: _pair(timing, ratio(key.first), ratio(key.second)) for key, timing in one.pairs.items()}
        return replace(one, operators=solo(one.operators), collectives=solo(one.collectives), pairs=pairs, failures={})

    return replace(
        profile,
        hardware=hardware,
        sections={name: section(one) for name, one in profile.sections.items()},
        elsewhere=solo(profile.elsewhere),
        alike=profile.hardware,
    )


def stand_in(own: Profile, other: Profile) -> Profile:
    """The profile `own`, with times from `other` for what it lacks. `other` is a similar GPU's profile after `as_on`.

    If `own` has a time of an operator under any launch setting or link, this time is used in all settings. No time from
    `other` replaces it.
    """
    known = {key for one in own.sections.values() for key in one.operators} | own.elsewhere.keys()
    sections = {
        name: replace(one, operators={key: timing for key, timing in one.operators.items() if key not in known})
        for name, one in other.sections.items()
    }
    merged = replace(other, sections=sections).merged(own)
    return replace(merged, measured_on=own.measured_on, elsewhere={**other.elsewhere, **own.elsewhere})


def told(profile: Profile, settings: Iterable[str]) -> str | None:
    """A line of text for users, which says that times come from a similar GPU.

    None if no times come from a similar GPU, or if some pairs were measured on this GPU under each of the launch
    settings.
    """
    pairs = [profile.section(setting).pairs.values() for setting in settings]
    if not profile.alike or all(any(timing.source != ALIKE for timing in of_setting) for of_setting in pairs):
        return None
    return (
        f"times that were not measured on {profile.hardware} with link {profile.link} are taken from the "
        f"{profile.alike}, which has the same cores, clock and links; memory-bound times are scaled by memory "
        "bandwidth. `dhelix profile` measures them here"
    )


def _stretched(timing: Timing, ratio: float) -> Timing:
    return replace(timing, seconds=ratio * timing.seconds, spread=ratio * timing.spread, source=ALIKE)


def _pair(timing: PairTiming, first: float, second: float) -> PairTiming:
    if first == second == 1.0:
        return replace(timing, source=ALIKE)
    alone = first * timing.first_alone, second * timing.second_alone
    ends = pair_seconds(*alone, measured_rates(timing))
    return PairTiming(*ends, *alone, max(first, second) * timing.spread, timing.samples, ALIKE)
