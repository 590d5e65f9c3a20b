"""Measuring without GPUs: returns measurements that were recorded earlier.

    Session(profile, "default", Recorded(record.section("default")), hardware).run(step, progress, save)

The record is a profile. With it, the whole path from a compiled step to tables and pictures runs anywhere, as in CI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dhelix.passes.evaluation.replay.program import Item
from dhelix.profiles.keys import PairKey
from dhelix.profiles.profile import Profile, Section
from dhelix.runtime.profiling.measure import Outcome, Sample

_MISSING = "not in the record"


class Recorded:
    """A `measure.Measurer` that looks up keys in one section of a profile."""

    def __init__(self, record: Section) -> None:
        self.record = record

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        """One outcome per item: samples that give the recorded time and spread, or the reason why there are none."""
        return [self._outcome(item) for item in items]

    def _outcome(self, item: Item) -> Outcome:
        first = item.first.key
        if item.second is None:
            timing = self.record.solo(first)
            if timing is None:
                return self.record.failures.get(str(first), _MISSING)
            times = (max(timing.seconds + part * timing.spread, 0.0) for part in (-1, 0, 1))
            return tuple(Sample(seconds, seconds) for seconds in times)
        key = PairKey(first, item.second.key)
        pair = self.record.pairs.get(key)
        if pair is None:
            return self.record.failures.get(str(key), _MISSING)
        return (Sample(pair.seconds, pair.first, pair.second),)


def as_recorded(profile: Profile, record: Profile) -> Profile:
    """`profile` with what the record says, no more.

    Pairs become the recorded ones, with their own times alone and their spread. Failures whose only reason is that the
    record lacks them are dropped, since GPUs may well measure those.
    """
    sections = {}
    for name, section in profile.sections.items():
        recorded = record.section(name).pairs
        pairs = {key: recorded.get(key, timing) for key, timing in section.pairs.items()}
        failures = {key: why for key, why in section.failures.items() if why != _MISSING}
        sections[name] = replace(section, pairs=pairs, failures=failures)
    return replace(profile, sections=sections)
