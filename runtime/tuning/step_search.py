"""Tunes all collectives of a step together with what they overlap (Lagom section 3).

    found = search(bodies, measure, space, noise=0.01, told=print)

    1  NCCL's defaults                          the times that everything is compared with
    2  each algorithm and protocol              the same for all collectives; each body keeps what is fastest for it
    3  each number of channels, then each chunk the same for all collectives: the map of computation and communication,
                                                and the best setting for the whole process, which needs no plugin
    4  each body's own search, side by side     `passes/tuning/guided_search.py`, from what step 3 has measured
    5  a body keeps NCCL's defaults             unless its best is faster by more than the noise

What each collective would choose for itself (as AutoCCL tunes) follows from step 3 without further measurements. The
caller measures the candidates against each other, because a body's time in a trace is not the time of the step.

If the step was ordered anew after a tuning, `run_from` goes on with the settings that were found. It leaves out steps 2
and 3, and searches only the bodies whose order has changed.

Cost: 1 + kinds + channels + chunks measurements of the step, then those of the longest search of a body.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dhelix.passes.plans.tuned_collectives import Identity
from dhelix.passes.tuning.guided_search import tune
from dhelix.passes.tuning.measurements import LimitReached, Measurements, Run
from dhelix.passes.tuning.space import Settings, Space
from dhelix.profiles.channels.channel_model import ChannelSetting
from dhelix.profiles.channels.model_fit import MeasuredTimes
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.runtime.tuning import rounds
from dhelix.runtime.tuning.bodies import Body, BodyTimes, StepTimes

type StepSettings = Mapping[Identity, NcclSetting]
"""Settings of the step's collectives. Those that are missing run as NCCL has it."""

DEFAULTS, UNIFORM, ALONE, TUNED = "NCCL's defaults", "one setting for all", "each alone", "dhelix"
BEFORE = "dhelix, before the new order"
KINDS = (("ring", "simple"), ("ring", "ll128"), ("ring", "ll"), ("tree", "simple"))
"""Algorithms and protocols that step 2 tries. NCCL leaves out those that a communicator cannot run."""

_DIFFERENT = 0.015
"""Times of collectives that differ by less count as equal: the settings are then one and the same."""

FAILED_FACTOR = 10.0
"""A measurement that failed counts as so many times slower than NCCL's defaults."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      candidates: settings of the step by who proposes them: NCCL's defaults, the best single setting, what each
        collective chooses alone, and dhelix.
      maps: for each body, its times under each single setting of step 3.
      kinds: the algorithm and protocol of each body; "" is NCCL's choice.
      measured: number of measurements.
      stopped: why the search ended early; "" if it did not.
    """

    candidates: Mapping[str, StepSettings]
    maps: Mapping[str, Mapping[ChannelSetting, BodyTimes]]
    kinds: Mapping[str, tuple[str, str]]
    measured: int
    stopped: str = ""


class StepSearch:
    """The search over one step. `measure` runs the step; it may raise LimitReached."""

    def __init__(
        self,
        bodies: Sequence[Body],
        measure: Callable[[StepSettings], StepTimes],
        space: Space,
        noise: float,
        told: Callable[[str], None] = lambda _: None,
        kinds: Iterable[tuple[str, str]] = KINDS,
    ) -> None:
        self._bodies = {body.fingerprint: body for body in bodies}
        self._run, self._space, self._noise, self._told = measure, space, noise, told
        self._kinds = tuple(kinds)
        self._chosen: dict[str, tuple[str, str]] = dict.fromkeys(self._bodies, ("", ""))
        self._as_chosen = {name: body.default.whole for name, body in self._bodies.items()}  # with NCCL's channels
        self._maps: dict[str, dict[ChannelSetting, BodyTimes]] = {name: {} for name in self._bodies}
        self._best: dict[str, tuple[float, Settings | None]] = {
            name: (body.default.whole, None) for name, body in self._bodies.items()
        }
        self._searched: Collection[str] = self._bodies
        self._kept: StepSettings = {}  # of bodies that are not searched
        self._starts: dict[str, MeasuredTimes] = {}  # what is known of bodies whose search goes on from settings
        self._count, self._stopped = 0, ""

    def run(self) -> Found:
        """Runs the search until it ends, or until `measure` raises LimitReached."""
        with contextlib.suppress(LimitReached):
            self._choose_kinds()
            self._measure_map()
            self._search_bodies()
        candidates: dict[str, StepSettings] = {DEFAULTS: {}}
        if any(self._maps.values()):
            candidates |= {UNIFORM: self._of_all(self._best_single()), ALONE: self._alone()}
        candidates[TUNED] = self._tuned()
        return Found(candidates, self._maps, self._chosen, self._count, self._stopped)

    def run_from(self, start: StepSettings, changed: Collection[str]) -> Found:
        """Goes on from settings that were found for another order of the step.

        Args:
          start: the settings.
          changed: fingerprints of the bodies whose order has changed. Others keep their settings.
        """
        self._searched = [name for name in self._bodies if name in changed]
        moved = {identity for name in self._searched for identity in self._bodies[name].collectives}
        self._kept = {identity: setting for identity, setting in start.items() if identity not in moved}
        with contextlib.suppress(LimitReached):
            self._told("the settings found so far, in the new order")
            times = self._measure(start)
            for name in self._searched:
                self._start_from(
                    name, [start.get(i, NcclSetting()) for i in self._bodies[name].collectives], times[name]
                )
            self._search_bodies()
        return Found({DEFAULTS: {}, BEFORE: start, TUNED: self._tuned()}, {}, self._chosen, self._count, self._stopped)

    def _start_from(self, name: str, known: Sequence[NcclSetting], times: BodyTimes) -> None:
        self._chosen[name], self._as_chosen[name] = (known[0].algorithm, known[0].protocol), math.inf
        if all(one.channels for one in known):
            settings = tuple(ChannelSetting(one.channels, one.chunk or self._space.chunks[-1]) for one in known)
            self._starts[name] = _as_measured(settings, times)
            self._better(name, times.whole, settings)

    def _choose_kinds(self) -> None:
        fastest = {name: body.default for name, body in self._bodies.items()}
        for kind in self._kinds:
            self._told(f"all collectives {' '.join(kind)}")
            times = self._measure({i: NcclSetting(*kind) for body in self._bodies.values() for i in body.collectives})
            for name, found in times.items():
                if self._is_faster(found, fastest[name]):
                    fastest[name], self._chosen[name], self._as_chosen[name] = found, kind, found.whole

    def _is_faster(self, new: BodyTimes, old: BodyTimes) -> bool:
        """Whether a body is faster, or as fast with faster collectives, which then can do with fewer channels."""
        if new.whole < old.whole * (1.0 - self._noise):
            return True
        less = sum(new.collectives) < sum(old.collectives) * (1.0 - 2.0 * self._noise)
        return less and new.whole <= old.whole * (1.0 + self._noise / 2.0)

    def _measure_map(self) -> None:
        """Measures channels with the largest chunk, then chunks with the best number of channels.

        Powers of two come first, then the channels between two that differ. A collective has no more channels than its
        communicator, so all settings above are one. The search leaves these out.
        """
        largest = self._space.chunks[-1]
        settings = [ChannelSetting(channels, largest) for channels in self._space.channels]
        between = [one for one in settings if one.channels & (one.channels - 1)]
        for setting in settings:
            if setting not in between:
                self._measure_of_all(setting)
        useful = self._space.channels[0]
        for setting in between:
            if self._may_differ(setting):
                self._measure_of_all(setting)
        for setting in settings:
            if self._differs_from_fewer(setting):
                useful = max(useful, setting.channels)
        self._space = Space(tuple(n for n in self._space.channels if n <= useful), self._space.chunks)
        self._leave_out(useful)
        best = self._best_single().channels
        for chunk in reversed(self._space.chunks[:-1]):
            self._measure_of_all(ChannelSetting(best, chunk))

    def _leave_out(self, above: int) -> None:
        """Forgets settings of more channels."""
        for name, body in self._bodies.items():
            known = {one: times for one, times in self._maps[name].items() if one.channels <= above}
            self._maps[name], self._best[name] = known, (body.default.whole, None)
            for setting, times in known.items():
                self._better(name, times.whole, (setting,) * len(body.collectives))

    def _measure_of_all(self, setting: ChannelSetting) -> None:
        self._told(f"all collectives {setting}")
        for name, found in self._measure(self._of_all(setting)).items():
            self._maps[name][setting] = found
            self._better(name, found.whole, (setting,) * len(self._bodies[name].collectives))

    def _may_differ(self, setting: ChannelSetting) -> bool:
        """Whether the nearest measured settings with fewer and with more channels differ for some body."""
        for each in self._maps.values():
            fewer, more = _fewer(each, setting), _more(each, setting)
            if fewer is None or more is None or self._differ(each[fewer], each[more]):
                return True
        return False

    def _differs_from_fewer(self, setting: ChannelSetting) -> bool:
        """Whether collectives of some body take another time with the next fewer channels that were measured."""
        for each in self._maps.values():
            fewer = _fewer(each, setting)
            if setting in each and fewer is not None and self._differ(each[fewer], each[setting]):
                return True
        return False

    @staticmethod
    def _differ(one: BodyTimes, other: BodyTimes) -> bool:
        times = sum(one.collectives), sum(other.collectives)
        return abs(times[0] - times[1]) > _DIFFERENT * max(times)

    def _search_bodies(self) -> None:
        """Step 4. A search that is stopped ends with its best, so nothing that was measured is lost."""
        if not self._searched:
            return

        def measure(asked: Mapping[str, Settings]) -> Mapping[str, BodyTimes]:
            self._told(f"settings of their own: {len(asked)} of {len(self._searched)} searches go on")
            settings = dict(self._kept)
            for name in self._bodies:
                chosen = asked.get(name) or self._best[name][1]
                settings |= {} if chosen is None else self._of(name, chosen)
            times = self._measure(settings)
            for name, chosen in asked.items():
                self._better(name, times[name].whole, chosen)
            return {name: times[name] for name in asked}

        rounds.run({name: self._search(self._bodies[name]) for name in self._searched}, measure)

    def _search(self, body: Body) -> Callable[[Callable[[Settings], BodyTimes]], MeasuredTimes]:
        def search(ask: Callable[[Settings], BodyTimes]) -> MeasuredTimes:
            def run(settings: Settings) -> tuple[Sequence[float], Sequence[float], float]:
                found = ask(settings)
                return found.collectives, found.computations, found.whole

            measured: Run = run
            measurements = Measurements(measured, self._noise)
            for setting, times in self._maps[body.fingerprint].items():
                measurements.add(_as_measured((setting,) * len(body.collectives), times))
            start = self._starts.get(body.fingerprint)
            if start is not None:
                measurements.add(start)
            return tune(measurements, body.overlap, self._space, start and start.settings)

        return search

    def _measure(self, settings: StepSettings) -> StepTimes:
        try:
            found = self._run(settings)
        except LimitReached as limit:
            self._stopped = str(limit) or "no more measurements are allowed"
            raise
        self._count += 1
        return found

    def _better(self, name: str, whole: float, settings: Settings) -> None:
        if whole < self._best[name][0]:
            self._best[name] = whole, settings

    def _best_single(self) -> ChannelSetting:
        """The setting with which all bodies together are fastest."""

        def seconds(setting: ChannelSetting) -> float:
            return sum(body.runs * self._maps[name][setting].whole for name, body in self._bodies.items())

        everywhere = [s for s in self._space.all() if all(s in each for each in self._maps.values())]
        return min(everywhere, key=seconds)

    def _alone(self) -> StepSettings:
        found: dict[Identity, NcclSetting] = {}
        for name, body in self._bodies.items():
            each = self._maps[name]
            chosen = tuple(
                min(each, key=lambda setting, j=j: each[setting].collectives[j]) for j in range(len(body.collectives))
            )
            found |= self._of(name, chosen)
        return found

    def _tuned(self) -> StepSettings:
        found = dict(self._kept)
        for name in self._searched:
            whole, settings = self._best[name]
            needed = min(self._bodies[name].default.whole * (1.0 - self._noise), self._as_chosen[name])
            if settings is not None and whole < needed:
                found |= self._of(name, settings)
            elif self._chosen[name] != ("", ""):
                found |= {i: NcclSetting(*self._chosen[name]) for i in self._bodies[name].collectives}
        return found

    def _of_all(self, setting: ChannelSetting) -> StepSettings:
        found: dict[Identity, NcclSetting] = {}
        for name, body in self._bodies.items():
            found |= self._of(name, (setting,) * len(body.collectives))
        return found

    def _of(self, name: str, settings: Settings) -> dict[Identity, NcclSetting]:
        """The settings of a body's collectives, with its algorithm and protocol."""
        own_chunks = len(self._space.chunks) > 1
        return {
            identity: NcclSetting(*self._chosen[name], one.channels, one.chunk if own_chunks else 0)
            for identity, one in zip(self._bodies[name].collectives, settings, strict=True)
        }


def _fewer(measured: Iterable[ChannelSetting], setting: ChannelSetting) -> ChannelSetting | None:
    """The measured setting with the next fewer channels, and the same chunk."""
    alike = [one for one in measured if one.chunk == setting.chunk and one.channels < setting.channels]
    return max(alike, key=lambda one: one.channels, default=None)


def _more(measured: Iterable[ChannelSetting], setting: ChannelSetting) -> ChannelSetting | None:
    alike = [one for one in measured if one.chunk == setting.chunk and one.channels > setting.channels]
    return min(alike, key=lambda one: one.channels, default=None)


def failed(bodies: Iterable[Body]) -> StepTimes:
    """What counts as the times of a measurement that failed."""
    return {
        body.fingerprint: replace(
            body.default,
            collectives=tuple(FAILED_FACTOR * x for x in body.default.collectives),
            whole=FAILED_FACTOR * body.default.whole,
        )
        for body in bodies
    }


def _as_measured(settings: Settings, times: BodyTimes) -> MeasuredTimes:
    return MeasuredTimes(settings, times.collectives, times.computations, whole=times.whole)
