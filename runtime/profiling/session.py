"""Finds which measurements a profile lacks for a step, and makes only these measurements.

    session = Session(profile, "default", measurer, gpus_per_node=4)
    wanted = session.missing(step)             # operators alone, then pairs of those that matter
    profile = session.run(step, progress=print_progress, save=storage_save)

Measuring runs in batches, and `save` is called after each batch. So only the current batch is lost if the run is
interrupted, and a second run continues where the first run stopped.

Products and attention are measured at full clock, in bursts of BURST_SECONDS after a rest. Longer dense work would
reach the GPU's power limit and slow down. `PowerLimit` (`passes/evaluation/costs.py`) estimates how much a whole step
slows down.

Operators alone come first, because their times decide which pairs are worth measuring. These pairs are measured:
- each compute operator with each collective, in both orders. (DHelix section 4.2, arXiv 2411.15871, measures all pairs
  of its table 2.)
- all pairs of these compute operators: the longest one of each kind, and the paper's operator bases.
- some pairs of collectives, with equal replica groups and with different ones.

Operators and collectives shorter than MIN_SECONDS are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import Groups, find_collective
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.replay.operators import Operator, find_operators
from dhelix.passes.evaluation.replay.program import Item
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.estimates.estimator import Estimator
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import SETTINGS, PairTiming, Profile, Section, Timing
from dhelix.runtime.profiling.measure import Measurer, Outcome

MIN_SECONDS = 20e-6
"""Operators and collectives that take less time are not measured in pairs, because their launch takes about as long."""
ALONE_REPEATS, BURST_REPEATS, PAIR_REPEATS = 10, 5, 7
BURST_SECONDS = 20e-3
"""Limit on the estimated time of all repeats of products and attention in one measuring program."""
_TRIES = 3  # measurements of a pair that contradicts itself, at most
_BATCH = 120  # number of items in one measuring program
_COLLECTIVE_PAIRS = 24  # number of pairs with equal replica groups, and number of pairs with different ones

Progress = Callable[[int, int, str], None]
"""A function of the number of finished items, the number of all items, and a text that says what comes next."""


@dataclass(frozen=True)
class Step:
    """A step to profile.

    Attributes:
      module: the compiled, scheduled module.
      further: more compiled modules whose operators are measured too, such as the modules of `operator_bases`.
      bases: instructions of any of the modules. All pairs of bases that are not collectives are measured, too.
      traced: times from a trace of the step in which operators run alone. A step does not run at full clock. So for
        products and attention, such a time is used only if the operator cannot be measured by itself.
      gap_seconds: see `Section`.
    """

    module: HloModule
    further: tuple[HloModule, ...] = ()
    bases: tuple[Instruction, ...] = ()
    traced: Mapping[Key, Timing] = field(default_factory=dict)
    gap_seconds: float | None = None


@dataclass(frozen=True)
class Wanted:
    """Measurements that the profile lacks.

    Attributes:
      alone: operators to measure alone.
      pairs: pairs of operators to measure together.
      refused: names of instructions that cannot be measured outside their step, each with the reason.
    """

    alone: tuple[Item, ...]
    pairs: tuple[Item, ...]
    refused: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.alone) + len(self.pairs)


class Session:
    """Measures under one launch setting. The process must have been started with this setting."""

    def __init__(
        self,
        profile: Profile,
        setting: str,
        measurer: Measurer | None,
        hardware: Hardware,
        gpus_per_node: int = 8,
        pairs: bool = True,
        again: bool = False,
        gpus: int | None = None,
    ) -> None:
        """Creates a session.

        Args:
          profile: the known measurements.
          setting: name of the launch setting.
          measurer: runs the measurements. None: the session can only tell what is missing.
          hardware: hardware for estimates of operators that are not measured yet. The estimates decide which pairs are
            worth measuring.
          gpus_per_node: the number n of GPUs per node. Devices 0 .. n-1 of the step are node 0, and so on.
          pairs: whether pairs are measured. If False, operators are only measured alone.
          again: whether known operators and pairs are measured again, once.
          gpus: number of GPUs to measure on. Collectives that need more GPUs are left out. None: there are enough GPUs
            for all collectives.

        Raises:
          DhelixError: there is no such setting.
        """
        if setting not in SETTINGS:
            raise DhelixError(f"launch setting {setting!r} is unknown; use one of {', '.join(SETTINGS)}")
        self.profile = profile
        self.setting = setting
        self._measurer = measurer
        self._hardware = hardware
        self._pairs = pairs
        self._again = again
        self._gpus = gpus
        self._found: dict[HloModule, tuple[tuple[Operator, ...], tuple[tuple[str, str], ...]]] = {}
        self._key_of = partial(key_of, gpus_per_node=gpus_per_node, implementation=SETTINGS[setting].implementation)

    @property
    def section(self) -> Section:
        return self.profile.section(self.setting)

    def missing(self, step: Step) -> Wanted:
        """What `run` would measure now. Pairs are included only if both are estimated to take MIN_SECONDS."""
        operators, refused = self._operators(step)
        known = Section(self.setting) if self._again else self.section
        alone = tuple(
            Item(o) for o in operators if (_clocked(o.key) or o.key not in step.traced) and self._lacks(o.key, known)
        )
        pairs = tuple(p for p in self._wanted_pairs(operators, step) if self._lacks(pair_key(p), known))
        return Wanted(alone, pairs, refused)

    def complete(self, step: Step) -> bool:
        """Whether the profile has everything that `run` would measure."""
        return not len(self.missing(step))

    def run(self, step: Step, progress: Progress, save: Callable[[Profile], None]) -> Profile:
        """Measures what the profile lacks, and returns the extended profile.

        Args:
          step: the step to profile.
          progress: see `Progress`.
          save: function that is called with the profile each time the profile has grown.

        Raises:
          DhelixError: the session has no measurer.
        """
        measurer = self._measurer
        if measurer is None:
            raise DhelixError("this session cannot measure; give it a measurer")
        known = Section(self.setting) if self._again else self.section
        traced = {key: timing for key, timing in step.traced.items() if known.solo(key) is None}
        unclocked = {key: timing for key, timing in traced.items() if not _clocked(key)}
        self._add(_split(unclocked, self.setting, step.gap_seconds), save)
        wanted = self.missing(step)
        failures = {name: reason for name, reason in wanted.refused if name not in self.section.failures}
        self._add(Section(self.setting, failures=failures), save)
        done = 0
        for batch, repeats in self._batches(wanted.alone):
            progress(done, len(wanted), "operators alone")
            self._add(section_of(self.setting, batch, measurer.measure(batch, repeats)), save)
            done += len(batch)
        clocked = {key: timing for key, timing in traced.items() if self.section.solo(key) is None}
        self._add(_split(clocked, self.setting), save)
        pairs = self.missing(step).pairs  # chosen again, because measured times have replaced estimates
        total = done + len(pairs)
        for batch in itertools.batched(pairs, _BATCH):
            progress(done, total, "pairs")
            self._add(self._measured(batch, measurer), save)
            done += len(batch)
        progress(done, done, "done")
        return self.profile

    def _measured(self, pairs: Sequence[Item], measurer: Measurer) -> Section:
        """The times of pairs.

        A pair that takes less time than its longer side alone contradicts itself: a side alone was probably disturbed.
        Such pairs are measured again, with their sides. Of all measurements, the one that contradicts itself least
        stays.
        """
        found = Section(self.setting)
        for _ in range(_TRIES):
            sides = tuple(Item(o) for o in dict.fromkeys(o for pair in pairs for o in pair.operators))
            outcomes = measurer.measure((*sides, *pairs), PAIR_REPEATS)
            new = pairs_of(self.setting, (*sides, *pairs), outcomes)
            better = {key: t for key, t in new.pairs.items() if key not in found.pairs or t.oef < found.pairs[key].oef}
            failures = {} if found.pairs else new.failures  # a pair that failed only later keeps its first time
            found = found.merged(replace(new, pairs=better, failures=failures))
            pairs = [item for item in pairs if (t := found.pairs.get(pair_key(item))) and t.contradicts_itself]
            if not pairs:
                break
        return found

    def _batches(self, items: Sequence[Item]) -> Iterator[tuple[tuple[Item, ...], int]]:
        """The items of each measuring program, and its number of repeats. Products and attention come in bursts."""
        others = [item for item in items if not _clocked(item.first.key)]
        yield from ((batch, ALONE_REPEATS) for batch in itertools.batched(others, _BATCH))
        estimator = Estimator(self.profile, self._hardware, self.setting)
        burst: list[Item] = []
        left = BURST_SECONDS
        for item in (item for item in items if _clocked(item.first.key)):
            seconds = BURST_REPEATS * estimator.solo(item.first.key).seconds
            if burst and seconds > left:
                yield tuple(burst), BURST_REPEATS
                burst, left = [], BURST_SECONDS
            burst.append(item)
            left -= seconds
        if burst:
            yield tuple(burst), BURST_REPEATS

    def _add(self, section: Section, save: Callable[[Profile], None]) -> None:
        if section != Section(self.setting):
            self.profile = self.profile.with_section(section)
            save(self.profile)

    def _operators(self, step: Step) -> tuple[list[Operator], tuple[tuple[str, str], ...]]:
        """Operators of all modules, one for each key, and refused instructions as in `Wanted.refused`."""
        found: dict[Key, Operator] = {}
        refused: list[tuple[str, str]] = []
        for module in (step.module, *step.further):
            if module not in self._found:
                self._found[module] = find_operators(module, self._key_of)
            operators, not_these = self._found[module]
            for operator in operators:
                if self._gpus is None or Item(operator).gpus <= self._gpus:
                    found.setdefault(operator.key, operator)
            refused += not_these
        return list(found.values()), tuple(refused)

    def _wanted_pairs(self, operators: Sequence[Operator], step: Step) -> list[Item]:
        if not self._pairs:
            return []
        estimator = Estimator(self.profile, self._hardware, self.setting)
        long = [o for o in operators if estimator.solo(o.key).seconds >= MIN_SECONDS]
        long = [o for o in long if str(o.key) not in self.section.failures]
        compute = [o for o in long if not o.is_collective]
        collectives = [o for o in long if o.is_collective]
        pairs = [Item(collective, o) for collective in collectives for o in compute]
        pairs += [Item(o, collective) for collective in collectives for o in compute]
        bases = {self._key_of(instruction) for instruction in step.bases}
        longest: dict[str, Operator] = {}
        for o in sorted(compute, key=lambda o: -estimator.solo(o.key).seconds):
            longest.setdefault(_kind(o), o)
        beside = [o for o in compute if o.key in bases or o in longest.values()]
        pairs += [Item(a, b) for a, b in itertools.product(beside, repeat=2)]
        together = list(itertools.product(collectives, repeat=2))
        for same in (False, True):
            alike = [Item(a, b) for a, b in together if (_groups(a) == _groups(b)) is same]
            pairs += _varied(alike)[:_COLLECTIVE_PAIRS]
        return pairs

    def _lacks(self, key: Key | PairKey, known: Section) -> bool:
        if isinstance(key, PairKey):
            measured = key in known.pairs
        else:
            measured = known.solo(key) is not None
        return not measured and str(key) not in known.failures


def pair_key(item: Item) -> PairKey:
    """The key of a pair. `item` must have two operators."""
    assert item.second is not None
    return PairKey(item.first.key, item.second.key)


def section_of(setting: str, items: Iterable[Item], outcomes: Iterable[Outcome]) -> Section:
    """A profile section with the outcomes of operators that ran alone."""
    alone: dict[Key, Timing] = {}
    failures: dict[str, str] = {}
    for item, outcome in zip(items, outcomes, strict=True):
        if isinstance(outcome, str):
            failures[str(item.first.key)] = outcome
        else:
            alone[item.first.key] = Timing.of(s.seconds for s in outcome)
    return replace(_split(alone, setting), failures=failures)


def pairs_of(setting: str, items: Iterable[Item], outcomes: Iterable[Outcome]) -> Section:
    """A profile section with the outcomes of pairs. `items` must also contain the two operators of each pair, alone."""
    together = list(zip(items, outcomes, strict=True))
    alone = section_of(setting, *zip(*(io for io in together if io[0].second is None), strict=True))
    pairs: dict[PairKey, PairTiming] = {}
    failures: dict[str, str] = {}
    for item, outcome in together:
        if item.second is None:
            continue
        first, second = (alone.solo(operator.key) for operator in item.operators)
        if isinstance(outcome, str) or first is None or second is None:
            failures[str(pair_key(item))] = outcome if isinstance(outcome, str) else "one side does not run alone"
        else:
            samples = ((s.seconds, s.first, s.second) for s in outcome)
            pairs[pair_key(item)] = PairTiming.of(samples, first.seconds, second.seconds)
    return Section(setting, pairs=pairs, failures=failures)


def _split(timings: Mapping[Key, Timing], setting: str, gap_seconds: float | None = None) -> Section:
    operators = {k: t for k, t in timings.items() if isinstance(k, OperatorKey)}
    collectives = {k: t for k, t in timings.items() if isinstance(k, CollectiveKey)}
    return Section(setting, operators, collectives, {}, gap_seconds)


def _groups(operator: Operator) -> Groups:
    """The replica groups of a collective.

    Collectives with the same groups run one after the other. Some collectives with different groups overlap.
    """
    found = find_collective(operator.instruction)
    return found.groups if found else ()


def _varied(pairs: Sequence[Item]) -> list[Item]:
    """The same pairs in another order: one pair for each combination of kinds and replica groups comes first."""
    seen: dict[object, Item] = {}
    for pair in pairs:
        seen.setdefault(tuple((o.key.kind, _groups(o)) for o in pair.operators), pair)
    first = list(seen.values())
    return first + [pair for pair in pairs if pair not in first]


def _clocked(key: Key) -> bool:
    return isinstance(key, OperatorKey) and key.clocked


def _kind(operator: Operator) -> str:
    """The kind of an operator, such as GEMM or attention. For a fusion, the kind includes the kind of its emitter."""
    key = operator.key
    if isinstance(key, OperatorKey) and key.kind == "fusion":
        return f"fusion {key.family.partition('-')[0]}"
    return key.kind
