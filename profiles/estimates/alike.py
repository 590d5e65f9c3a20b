"""What a profile would say of a GPU that is like the one it was measured on.

    as_on(profile_of_h200, "H100")           # a Profile of H100, all of it marked as ALIKE

An H100 (SXM) and an H200 have the same cores, clock, power and links, and differ in their memory alone
(`Hardware.like`). What the roofline says of both tells how a time changes: products, attention and collectives stay,
what memory decides takes 1.43 times as long. Of 306 operators that were measured on both, times made so are 0.9 % too
long in the median and 2.1 % in their sum (docs/profiles.md). Two at once keep their rates (`contention`).

Whoever has such a GPU gets the plans of its like before anything was profiled there, under every launch setting.
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
    """`profile` with the times that the GPU called `hardware` would have, over the same link."""
    here, there = describe(hardware, profile.link), describe(profile.hardware, profile.link)

    @functools.cache  # a key is part of many pairs
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
    """Both of one GPU, where `other` is `as_on` it: an operator that `own` knows counts, under whichever setting."""
    known = {key for one in own.sections.values() for key in one.operators} | own.elsewhere.keys()
    sections = {
        name: replace(one, operators={key: timing for key, timing in one.operators.items() if key not in known})
        for name, one in other.sections.items()
    }
    merged = replace(other, sections=sections).merged(own)
    return replace(merged, measured_on=own.measured_on, elsewhere={**other.elsewhere, **own.elsewhere})


def told(profile: Profile, settings: Iterable[str]) -> str | None:
    """For people, where no pair under one of these launch settings was measured on this GPU; else None."""
    pairs = [profile.section(setting).pairs.values() for setting in settings]
    if not profile.alike or all(any(timing.source != ALIKE for timing in of_setting) for of_setting in pairs):
        return None
    return (
        f"what was not measured on {profile.hardware} with link {profile.link} costs what it does on the "
        f"{profile.alike}, which has the same cores, clock and links; what memory decides is scaled by its bandwidth. "
        "`dhelix profile` measures it here"
    )


def _stretched(timing: Timing, ratio: float) -> Timing:
    return replace(timing, seconds=ratio * timing.seconds, spread=ratio * timing.spread, source=ALIKE)


def _pair(timing: PairTiming, first: float, second: float) -> PairTiming:
    if first == second == 1.0:
        return replace(timing, source=ALIKE)
    alone = first * timing.first_alone, second * timing.second_alone
    ends = pair_seconds(*alone, measured_rates(timing))
    return PairTiming(*ends, *alone, max(first, second) * timing.spread, timing.samples, ALIKE)
