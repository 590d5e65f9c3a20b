"""Estimates the time of any operator, collective or pair, and says whether the time was measured or guessed.

    estimator = Estimator(profile, hardware.H200, "default")
    estimator.operator(key)                  Estimate(seconds=0.00041, source=<Source.MEASURED>, spread=4e-06)
    estimator.pair(gemm, all_gather)         PairEstimate(seconds=..., first=..., second=..., source=...)
    estimator.coverage([(gemm, 64), (all_gather, 64)])     {MEASURED: 0.9, INTERPOLATED: 0.1, GUESS: 0.0} of the time

A profile has one section for each launch setting. The time of a key alone comes from the first of these sources that
has a time:

1. The section of this launch setting: measured, or interpolated if the time is from a similar GPU (`alike`).
2. The other sections, and for operators also profiles with other links: interpolated. Times alone hardly depend on
   settings.
3. Near relatives in this section, or else in all sections (`interpolation`): interpolated.
4. Farther relatives, which calibrate the roofline, or else the plain roofline: a guess.

If the pair itself was measured in the section, the measured time is used. Otherwise, the time of a pair follows from
the times alone and from the rates of similar pairs (`contention`). If the section has pairs with the same roles, they
decide the rates. The roles say which sides are collectives, and which side is launched first. Otherwise, the pairs of
all sections decide the rates. Such rates are a guess, because settings change which kernel starts first.

The measurement of a pair contains its own times alone, and the rates of the pair are computed from them. These times
may differ from the times of `solo`, which reflect the data and clocks of a whole step.

The sides of a pair start together. `Estimator.running` is for an operator that starts while a collective is already
running. It uses pairs of a launch setting in which kernels start in launch order.

Without a profile, every time is a guess. All times are in seconds. Results are cached.
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

# Maps a setting in which kernels may start out of launch order to a similar setting in which they start in launch
# order. `copy-engine` is not in the table: in measured steps with this setting, all-gathers wait for cuBLAS GEMMs in
# both launch orders.
_ONE_CONNECTION = {"default": "connections1", "command-buffers": "connections1", "user-buffers": "connections1"}


class Source(enum.Enum):
    """Where a time comes from. The sources are sorted, the most reliable one first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    GUESS = "guess"

    @property
    def rank(self) -> int:
        return list(Source).index(self)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of an operator or collective alone.

    Attributes:
      spread: about the distance between the quartiles of samples, in seconds. If the time is a guess, it equals
        `seconds`.
    """

    seconds: float
    source: Source
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """The time of a pair, in seconds.

    Attributes:
      seconds: time from the start of the pair to the end of the side that ends last.
      first, second: time from the start of the pair to the end of each side.
    """

    seconds: float
    first: float
    second: float
    source: Source


def hardware_of(profile: Profile) -> Hardware:
    """The description of the GPU and the link that a profile was measured on, such as `H200-no-p2p`.

    Raises:
      DhelixError: the hardware is not described.
    """
    for name in (f"{profile.hardware}-{profile.link}", profile.hardware):
        if name in ALL:
            return ALL[name]
    raise DhelixError(f"hardware {profile.hardware!r} is unknown: use one of {', '.join(ALL)}")


type _Exact = tuple[Key, float, int]


def _exact(key: Key) -> _Exact:
    """The key with the numbers that it is compared without. Equal operators may differ by the bytes of an index.

    Without them, an estimate would depend on which of the two was asked for first.
    """
    return (key, key.flops, key.bytes) if isinstance(key, OperatorKey) else (key, 0.0, 0)


class Estimator:
    """Estimates times under one launch setting, from a profile and the description of the hardware."""

    def __init__(self, profile: Profile | None, hardware: Hardware, setting: str = "default") -> None:
        self.hardware, self.profile = hardware, profile
        self.section = profile.section(setting) if profile else Section(setting)
        self._everywhere = _all_sections(profile, self.section)
        self._solo: dict[_Exact, Estimate] = {}
        self._pairs: dict[tuple[_Exact, _Exact], tuple[PairEstimate, tuple[float, float]]] = {}

    def operator(self, key: OperatorKey) -> Estimate:
        return self.solo(key)

    def collective(self, key: CollectiveKey) -> Estimate:
        return self.solo(key)

    def solo(self, key: Key) -> Estimate:
        """The time of `key` while nothing else runs."""
        exact = _exact(key)
        known = self._solo.get(exact)
        if known is None:
            known = self._solo[exact] = self._find_solo(key)
        return known

    def pair(self, first: Key, second: Key) -> PairEstimate:
        """The time of two independent operators that start together. `first` is launched first."""
        return self._pair(first, second)[0]

    def rates(self, first: Key, second: Key) -> tuple[float, float]:
        """The rates of both sides while both run. A rate is above 0, and 1 is the speed alone."""
        return self._pair(first, second)[1]

    @cached_property
    def running(self) -> Estimator | None:
        """The estimator for an operator that starts while the kernel of a collective is already running.

        Use it for pairs whose first side is the collective. It uses the times of a launch setting in which kernels
        start in launch order: of this setting, or of a similar setting. None if that similar setting was not measured.
        """
        setting = _ONE_CONNECTION.get(self.section.setting, self.section.setting)
        if setting == self.section.setting:
            return self
        if self.profile is None or setting not in self.profile.sections:
            return None
        return Estimator(self.profile, self.hardware, setting)

    def coverage(self, used: Iterable[tuple[Key | PairKey, float]]) -> dict[Source, float]:
        """For each source, the fraction of the total time whose estimates come from this source.

        Args:
          used: keys of operators, collectives and pairs, each with its number of executions.

        Returns:
          A fraction for every source. The fractions add up to 1. If the total time is 0, all fractions are 0.
        """
        seconds = dict.fromkeys(Source, 0.0)
        for key, count in used:
            estimate = self.pair(key.first, key.second) if isinstance(key, PairKey) else self.solo(key)
            seconds[estimate.source] += count * estimate.seconds
        total = sum(seconds.values())
        return {source: part / total if total else 0.0 for source, part in seconds.items()}

    def assumes(self, key: CollectiveKey) -> bool:
        """Whether the time of `key` follows from the hardware description alone.

        This is the case if no collective over the same kind of link (inside a node, or between nodes) was measured.
        """
        return self.solo(key).source is Source.GUESS and not any(
            relatives.at(key) for relatives in (self._relatives, self._relatives_everywhere)
        )

    def _find_solo(self, key: Key) -> Estimate:
        # 1. This section. 2. The other sections, then (for operators) the profiles with other links.
        for section, source in ((self.section, Source.MEASURED), (self._everywhere, Source.INTERPOLATED)):
            timing = section.solo(key)
            if timing is not None:
                return Estimate(timing.seconds, _known(source, timing), timing.spread)
        if self.profile and isinstance(key, OperatorKey) and (timing := self.profile.elsewhere.get(key)) is not None:
            return Estimate(timing.seconds, Source.INTERPOLATED, timing.spread)
        # 3. Near relatives.
        found = [relatives.at(key) for relatives in (self._relatives, self._relatives_everywhere)]
        for interpolation in found:
            if interpolation is not None and interpolation.near:
                return Estimate(interpolation.seconds, Source.INTERPOLATED, interpolation.spread)
        # 4. Farther relatives, or the plain roofline.
        calibrated = next((i.seconds for i in found if i is not None), None)
        seconds = roofline_seconds(key, self.hardware) if calibrated is None else calibrated
        return Estimate(seconds, Source.GUESS, seconds)

    def _pair(self, first: Key, second: Key) -> tuple[PairEstimate, tuple[float, float]]:
        both = _exact(first), _exact(second)
        known = self._pairs.get(both)
        if known is None:
            known = self._pairs[both] = self._find_pair(first, second)
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
    """Interpolates times of operators and collectives from the measured times of one section."""

    def __init__(self, section: Section, hardware: Hardware) -> None:
        self._operators = OperatorFamilies(section.operators, hardware)
        self._collectives = CollectiveCurves(section.collectives, hardware)

    def at(self, key: Key) -> Interpolation | None:
        return self._collectives.at(key) if isinstance(key, CollectiveKey) else self._operators.at(key)


def _all_sections(profile: Profile | None, own: Section) -> Section:
    """All sections merged into one.

    If several sections have a time of a key, the time in `own` is taken. If `own` has no such time, the time in the
    section `default` is taken, or else the time in the section whose name sorts last.
    """
    sections = profile.sections if profile else {}
    names = sorted(sections, key=lambda name: (name == own.setting, name == "default", name))
    return reduce(Section.merged, [sections[name] for name in names], Section(own.setting))
