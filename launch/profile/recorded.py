"""A measurer that needs no GPUs: it returns measurements that were recorded earlier.

    Session(profile, "default", Recorded(record.section("default")), hardware).run(step, progress, save)

The record is a profile. With a record, `dhelix profile` runs completely on any machine, for example in CI.
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
    """A `measure.Measurer` that looks up the times of keys in one section of a profile."""

    def __init__(self, record: Section) -> None:
        self.record = record

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        """One outcome for each item: samples with the recorded median and spread, or why there are no samples."""
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
    """The profile after a session with `Recorded`, corrected so that it agrees with the record.

    A pair gets its recorded timing, because the session drops the record's spread and its times of each side alone.
    Failures are dropped if their only reason is that the record lacks the key, because GPUs may be able to measure it.
    """
    sections = {}
    for name, section in profile.sections.items():
        recorded = record.section(name).pairs
        pairs = {key: recorded.get(key, timing) for key, timing in section.pairs.items()}
        failures = {key: why for key, why in section.failures.items() if why != _MISSING}
        sections[name] = replace(section, pairs=pairs, failures=failures)
    return replace(profile, sections=sections)
