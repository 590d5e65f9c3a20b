"""What anything costs, measured or not, and how far the answer is to be trusted.

    estimator = Estimator(profile, hardware.H200, "default")
    estimator.operator(key)                  Estimate(seconds=0.00041, source=<Source.MEASURED>, spread=4e-06)
    estimator.pair(gemm, all_gather)         PairEstimate(seconds=..., first=..., second=..., source=...)
    estimator.coverage([(gemm, 64), (all_gather, 64)])     {MEASURED: 0.9, INTERPOLATED: 0.1, GUESS: 0.0} of the time

A time alone is taken from the first of these that has one:

1. the section of the launch setting: measured, or of a GPU like this one (`alike`) interpolated;
2. the other sections, because times alone hardly depend on settings, and for operators other links: interpolated;
3. near relatives in this section, or in all together (`interpolation`): interpolated;
4. farther relatives, which calibrate the roofline, or the plain roofline: a guess.

A pair is measured in the section, or follows from times alone and from rates of like pairs (`contention`): of the
section if it has like ones; pairs of other settings are only good for a guess, for settings change who starts first.
Rates of a measured pair come from what its sides took alone beside it, which may differ from `solo`: there the same
operator meets the data and clocks of a whole step.
Pairs start together. What an operator meets that starts beside a collective already running is what pairs show in
settings that start kernels in the order of their launch: `Estimator.running`.
Without a profile everything is a guess. All times are seconds; answers are kept, so asking again costs nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

from dhelix.errors import DhelixError
from dhelix.profiles.estimates.contention import ContentionModel, measured_rates, pair_seconds
from dhelix.profiles.estimates.interpolation import CollectiveCurves, Interpolation, OperatorFamilies, roofline_seconds
from dhelix.profiles.hardware import ALL, Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import ALIKE, PairTiming, Profile, Section, Timing

# Settings under which kernels may start in another order than they are launched in, and their like under which not.
# Copy engines are no such case: an all-gather waits for cuBLAS GEMMs whenever it was launched, by measured steps.
_ONE_CONNECTION = {"default": "connections1", "command-buffers": "connections1", "user-buffers": "connections1"}


class Source(enum.Enum):
    """Where a number comes from, from the best to the worst."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    GUESS = "guess"

    @property
    def rank(self) -> int:
        return list(Source).index(self)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds alone; `spread` is about the distance of the quartiles, for a guess as long as the time itself."""

    seconds: float
    source: Source
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """Seconds of two at once, and from the start of the pair until each side is done."""

    seconds: float
    first: float
    second: float
    source: Source


def hardware_of(profile: Profile) -> Hardware:
    """The description that belongs to a profile's hardware and link, such as `H200-no-p2p`.

    Raises:
      DhelixError: nothing is known of that hardware.
    """
    for name in (f"{profile.hardware}-{profile.link}", profile.hardware):
        if name in ALL:
            return ALL[name]
    raise DhelixError(f"no description of hardware {profile.hardware!r}: known are {', '.join(ALL)}")


class Estimator:
    """Answers for one launch setting of a profile."""

    def __init__(self, profile: Profile | None, hardware: Hardware, setting: str = "default") -> None:
        self.hardware, self.profile = hardware, profile
        self.section = profile.section(setting) if profile else Section(setting)
        self._everywhere = _all_sections(profile, self.section)
        self._solo: dict[Key, Estimate] = {}
        self._pairs: dict[tuple[Key, Key], tuple[PairEstimate, tuple[float, float]]] = {}

    def operator(self, key: OperatorKey) -> Estimate:
        return self.solo(key)

    def collective(self, key: CollectiveKey) -> Estimate:
        return self.solo(key)

    def solo(self, key: Key) -> Estimate:
        """`key` when nothing runs beside it."""
        known = self._solo.get(key)
        if known is None:
            known = self._solo[key] = self._find_solo(key)
        return known

    def pair(self, first: Key, second: Key) -> PairEstimate:
        """Both at once, independent of each other, `first` launched first."""
        return self._pair(first, second)[0]

    def rates(self, first: Key, second: Key) -> tuple[float, float]:
        """How fast each side of the pair proceeds while both run: above 0, and 1 when nothing disturbs it."""
        return self._pair(first, second)[1]

    @cached_property
    def running(self) -> Estimator | None:
        """For the setting whose pairs, the first one a collective, say what it does once its kernel holds its SMs.

        None where nothing was measured under it.
        """
        setting = _ONE_CONNECTION.get(self.section.setting, self.section.setting)
        if setting == self.section.setting:
            return self
        if self.profile is None or setting not in self.profile.sections:
            return None
        return Estimator(self.profile, self.hardware, setting)

    def coverage(self, used: Iterable[tuple[Key | PairKey, float]]) -> dict[Source, float]:
        """Shares of time by source.

        Args:
          used: what a plan is made of, and how often each part of it runs.

        Returns a share for every source; they add up to 1, or are all 0 if nothing takes time.
        """
        seconds = dict.fromkeys(Source, 0.0)
        for key, count in used:
            estimate = self.pair(key.first, key.second) if isinstance(key, PairKey) else self.solo(key)
            seconds[estimate.source] += count * estimate.seconds
        total = sum(seconds.values())
        return {source: part / total if total else 0.0 for source, part in seconds.items()}

    def assumes(self, key: CollectiveKey) -> bool:
        """Whether nothing measured says what a collective takes over such links, and the hardware's constants do."""
        return self.solo(key).source is Source.GUESS and not any(
            relatives.at(key) for relatives in (self._relatives, self._relatives_everywhere)
        )

    def _find_solo(self, key: Key) -> Estimate:
        for section, source in ((self.section, Source.MEASURED), (self._everywhere, Source.INTERPOLATED)):
            timing = section.solo(key)
            if timing is not None:
                return Estimate(timing.seconds, _known(source, timing), timing.spread)
        if self.profile and isinstance(key, OperatorKey) and (timing := self.profile.elsewhere.get(key)) is not None:
            return Estimate(timing.seconds, Source.INTERPOLATED, timing.spread)
        found = [relatives.at(key) for relatives in (self._relatives, self._relatives_everywhere)]
        for interpolation in found:
            if interpolation is not None and interpolation.near:
                return Estimate(interpolation.seconds, Source.INTERPOLATED, interpolation.spread)
        calibrated = next((i.seconds for i in found if i is not None), None)
        seconds = roofline_seconds(key, self.hardware) if calibrated is None else calibrated
        return Estimate(seconds, Source.GUESS, seconds)

    def _pair(self, first: Key, second: Key) -> tuple[PairEstimate, tuple[float, float]]:
        known = self._pairs.get((first, second))
        if known is None:
            known = self._pairs[first, second] = self._find_pair(first, second)
        return known

    def _find_pair(self, first: Key, second: Key) -> tuple[PairEstimate, tuple[float, float]]:
        timing = self.section.pairs.get(PairKey(first, second))
        if timing is not None:
            source, rates = _known(Source.MEASURED, timing), measured_rates(timing)
            return PairEstimate(timing.seconds, timing.first, timing.second, source), rates
        one, two = self.solo(first), self.solo(second)
        query = first, one.seconds, second, two.seconds
        source = Source.INTERPOLATED if self._contention.near(*query) else Source.GUESS
        model = self._contention if self._contention.knows(first, second) else self._contention_everywhere
        rates = model.rates(*query)
        source = max(source, one.source, two.source, key=lambda s: s.rank)
        return PairEstimate(*pair_seconds(one.seconds, two.seconds, rates), source), rates

    @cached_property
    def _relatives(self) -> _Relatives:
        return _Relatives(self.section, self.hardware)

    @cached_property
    def _relatives_everywhere(self) -> _Relatives:
        return _Relatives(self._everywhere, self.hardware)

    @cached_property
    def _contention(self) -> ContentionModel:
        return ContentionModel.fit(self.section, self.hardware)

    @cached_property
    def _contention_everywhere(self) -> ContentionModel:
        return ContentionModel.fit(self._everywhere, self.hardware)


def _known(source: Source, timing: Timing | PairTiming) -> Source:
    return Source.INTERPOLATED if timing.source == ALIKE else source


class _Relatives:
    """Interpolation for both sorts of keys from one section."""

    def __init__(self, section: Section, hardware: Hardware) -> None:
        self._operators = OperatorFamilies(section.operators, hardware)
        self._collectives = CollectiveCurves(section.collectives, hardware)

    def at(self, key: Key) -> Interpolation | None:
        return self._collectives.at(key) if isinstance(key, CollectiveKey) else self._operators.at(key)


def _all_sections(profile: Profile | None, own: Section) -> Section:
    """Every section merged into one; where several have a time, `own` counts, then `default`, then by name."""
    sections = profile.sections if profile else {}
    names = sorted(sections, key=lambda name: (name == own.setting, name == "default", name))
    return reduce(Section.merged, [sections[name] for name in names], Section(own.setting))
