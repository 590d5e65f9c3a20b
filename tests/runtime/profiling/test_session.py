"""Measurements that a profile lacks for a step, and sessions that add only these, with a fake measurer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.replay.program import Item
from dhelix.passes.hlo import HloModule
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import PairKey
from dhelix.profiles.profile import Profile, Section, Timing
from dhelix.runtime.profiling import session as of_session
from dhelix.runtime.profiling.measure import Outcome, Sample
from dhelix.runtime.profiling.session import MIN_SECONDS, Session, Step
from dhelix.tests.runtime.profiling import small_step
from dhelix.tests.runtime.profiling.small_step import LONG, NAMES, key

MODULE, HALF = small_step.module(), small_step.module(rows=4096)
KEYS = MappingProxyType({
    **{f"half {name}": o.key for name, o in small_step.operators(rows=4096).items() if name != "small"},
    **{name: key(name) for name in NAMES},
})  # fmt: skip
STEP = Step(MODULE)
COLLECTIVES = {name for name in KEYS if name.endswith(("gather", "scatter"))}
EMPTY = Profile("H200", "nvlink")

type Names = tuple[str, ...]


class Measurer:
    """A fake measurer. Operators take `times` microseconds, pairs 1.1 times as long as their longer side.

    Attributes:
      asked: names of the operators of each item, in order; not of sides that are measured alone next to pairs.
      calls: number of calls; `programs` has the names of the operators of each call.
      fails: returns the reason why an item has no time, or None.
      before: called at the beginning of each call.
    """

    def __init__(self, **times: float) -> None:
        self.times = {name: 95.0 + n for n, name in enumerate(KEYS)} | {"small": 3.0} | times
        self.asked: list[Names] = []
        self.sides: list[Names] = []
        self.calls = 0
        self.programs: list[list[str]] = []
        self.fails: Callable[[Names], str | None] = lambda names: None
        self.before: Callable[[], None] = lambda: None

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        self.before()
        self.calls += 1
        self.programs.append([name for item in items for name in names(item)])
        pairs = any(item.second for item in items)
        outcomes: list[Outcome] = []
        for item in items:
            named = names(item)
            (self.sides if pairs and item.second is None else self.asked).append(named)
            seconds = [self.times[name] * 1e-6 for name in named]
            sample = Sample(1.1 * max(seconds), *seconds) if item.second else Sample(seconds[0], seconds[0])
            outcomes.append(self.fails(named) or (sample,) * repeats)
        return outcomes


class Run:
    """A session, and records of everything that a test checks."""

    def __init__(self, measurer: Measurer | None = None, profile: Profile = EMPTY, **options: Any) -> None:
        self.measurer = measurer or Measurer()
        self.saved: list[Profile] = []
        self.told: list[tuple[int, int, str]] = []
        self.session = Session(profile, "default", self.measurer, H200, gpus_per_node=4, **options)

    def run(self, step: Step = STEP) -> Section:
        profile = self.session.run(step, lambda *what: self.told.append(what), self.saved.append)
        assert profile is self.session.profile
        return profile.section("default")


def names(item: Item | PairKey) -> Names:
    """Names of the operators in an item or a pair."""
    found = [o.key for o in item.operators] if isinstance(item, Item) else [item.first, item.second]
    return tuple(name for wanted in found for name, key in KEYS.items() if key == wanted)


def pairs(asked: Iterable[Names]) -> list[Names]:
    return [named for named in asked if len(named) == 2]


def alone(asked: Iterable[Names]) -> list[Names]:
    return [named for named in asked if len(named) == 1]


# ---- what is measured


def test_a_cold_profile_gets_all_operators_and_then_pairs() -> None:
    run = Run()
    section = run.run()
    assert sorted(alone(run.measurer.asked)) == sorted((name,) for name in NAMES)
    assert {*section.operators, *section.collectives} == {KEYS[name] for name in NAMES}
    assert {names(pair) for pair in section.pairs} == set(pairs(run.measurer.asked))
    assert section.solo(KEYS["gemm"]) == Timing(pytest.approx(101e-6), 0.0, of_session.BURST_REPEATS)  # type: ignore
    assert run.session.complete(STEP)


def test_pairs_know_what_their_sides_took_beside_them() -> None:
    run = Run()
    run.measurer.before = lambda: run.measurer.times.update(gemm=run.measurer.times["gemm"] + 7.0)
    section = run.run()
    assert {named for named in run.measurer.sides} == {(name,) for name in LONG}
    solo, pair = section.solo(KEYS["gemm"]), section.pairs[PairKey(KEYS["gemm"], KEYS["gather"])]
    assert solo is not None and solo.seconds == pytest.approx(115e-6)
    assert (pair.first_alone, pair.second_alone) == (pytest.approx(122e-6), pytest.approx(100e-6))
    assert (pair.seconds, pair.first, pair.samples) == (pytest.approx(134.2e-6), pytest.approx(122e-6), 7)


def test_a_warm_profile_measures_nothing() -> None:
    first = Run()
    first.run()
    again = Run(profile=storage.loads(storage.dumps(first.session.profile), "a file"))
    again.run()
    assert again.measurer.calls == 0 and again.saved == []
    assert again.told == [(0, 0, "done")]


def test_only_what_is_missing_is_measured() -> None:
    known = {KEYS["gemm"]: Timing(5e-5)}
    run = Run(profile=EMPTY.with_section(Section("default", known)))  # type: ignore[arg-type]
    section = run.run()
    assert ("gemm",) not in run.measurer.asked
    assert section.solo(KEYS["gemm"]) == Timing(5e-5)
    other = Session(run.session.profile, "connections1", Measurer(), H200, gpus_per_node=4)
    assert len(other.missing(STEP).alone) == len(NAMES)


def test_times_of_a_trace_are_taken_but_for_those_of_its_clock() -> None:
    """A product runs alone, because the clock of the traced step differs. If that fails, the trace's time counts."""
    traced = {KEYS["gemm"]: Timing(7e-5, 1e-6, 8, "trace"), KEYS["gather"]: Timing(1e-5, source="trace")}
    step = Step(MODULE, traced=traced, gap_seconds=2e-6)
    run = Run()
    section = run.run(step)
    assert sorted(alone(run.measurer.asked)) == sorted((name,) for name in NAMES if name != "gather")
    assert section.solo(KEYS["gemm"]) == Timing(pytest.approx(101e-6), 0.0, of_session.BURST_REPEATS)  # type: ignore
    assert section.solo(KEYS["gather"]) == traced[KEYS["gather"]]
    assert section.gap_seconds == 2e-6
    # too short for pairs, according to the trace
    assert not any("gather" in pair for pair in pairs(run.measurer.asked))
    broken = Run()
    broken.measurer.fails = lambda named: "it does not run" if named == ("gemm",) else None
    assert broken.run(step).solo(KEYS["gemm"]) == traced[KEYS["gemm"]]


def test_a_trace_does_not_replace_what_is_known_but_for_again() -> None:
    profile = EMPTY.with_section(Section("default", {}, {KEYS["gather"]: Timing(5e-5)}))  # type: ignore[dict-item]
    step = Step(MODULE, traced={KEYS["gather"]: Timing(7e-5, source="trace")})
    assert Run(profile=profile).run(step).solo(KEYS["gather"]) == Timing(5e-5)
    assert Run(profile=profile, again=True).run(step).solo(KEYS["gather"]) == step.traced[KEYS["gather"]]


def test_products_are_measured_in_bursts_that_do_not_lower_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_session, "BURST_SECONDS", 1e-9)
    run = Run()
    run.run()
    assert run.measurer.programs[1] == ["gemm"], "one at least, however long it is"
    assert not any("gemm" in named for named in run.measurer.programs[:1]), "apart from what it does not slow"


def test_operators_of_further_modules_are_measured_once_for_all() -> None:
    run = Run()
    run.run(Step(MODULE, further=(HALF, MODULE)))
    assert sorted(alone(run.measurer.asked)) == sorted((name,) for name in KEYS)


# ---- which pairs


def chosen(measurer: Measurer | None = None, step: Step = STEP, pairs_too: bool = True) -> list[Names]:
    run = Run(measurer, pairs=pairs_too)
    run.run(step)
    return pairs(run.measurer.asked)


def test_computation_meets_collectives_in_both_orders() -> None:
    found = chosen()
    for collective in ("gather", "scatter"):
        for compute in ("gemm", "doubled", "moved"):
            assert (collective, compute) in found and (compute, collective) in found
    assert len(found) == len(set(found))


def test_what_is_short_is_in_no_pair() -> None:
    assert not any("small" in pair for pair in chosen())
    found = chosen(Measurer(doubled=MIN_SECONDS * 1e6 - 0.1, small=MIN_SECONDS * 1e6 + 0.1))
    assert not any("doubled" in pair for pair in found) and ("gather", "small") in found


def test_estimates_choose_pairs_as_long_as_nothing_is_measured() -> None:
    wanted = Session(EMPTY, "default", None, H200, gpus_per_node=4).missing(STEP)
    assert {names(item) for item in wanted.pairs} == set(chosen())
    assert len(wanted) == len(wanted.alone) + len(wanted.pairs)


def test_the_longest_of_each_kind_meet_each_other_and_themselves() -> None:
    computation = [pair for pair in chosen(step=Step(MODULE, further=(HALF,))) if not {*pair} & COLLECTIVES]
    assert sorted(computation) == sorted(itertools.product(("doubled", "gemm", "moved"), repeat=2))


def test_bases_meet_each_other_whatever_their_kind() -> None:
    base = next(i for i in HALF.entry.instructions if i.name == "gemm")
    found = chosen(step=Step(MODULE, further=(HALF,), bases=(base,)))
    assert {("gemm", "half gemm"), ("half gemm", "gemm"), ("half gemm", "half gemm")} <= set(found)
    assert ("half doubled", "gemm") not in found


def test_collectives_meet_over_the_same_gpus_and_over_others() -> None:
    found = [pair for pair in chosen() if {*pair} <= {"gather", "scatter"}]
    assert found[:2] == [("gather", "scatter"), ("scatter", "gather")]  # different groups
    assert found[2:] == [("gather", "gather"), ("scatter", "scatter")]


def test_no_pairs_if_none_are_wanted() -> None:
    assert chosen(pairs_too=False) == []
    run = Run(pairs=False)
    run.run()
    assert run.session.complete(STEP)


def test_two_sessions_ask_for_the_same_in_the_same_order() -> None:
    asked = []
    for module in (small_step.module(), HloModule.from_bytes(small_step.module().to_bytes())):
        run = Run()
        run.run(Step(module))
        asked.append(run.measurer.asked)
    assert asked[0] == asked[1]


# ---- interruptions and failures


@pytest.mark.parametrize("calls", range(5))
def test_an_interrupted_session_goes_on_where_it_stopped(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_session, "_BATCH", 4)
    whole = Run()
    whole.run()
    first = Run()

    def stop() -> None:
        if first.measurer.calls == calls:
            raise KeyboardInterrupt

    first.measurer.before = stop
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert first.saved[-1] == first.session.profile
    second = Run(profile=first.saved[-1])
    assert second.run() == whole.session.section
    assert sorted(first.measurer.asked + second.measurer.asked) == sorted(whole.measurer.asked)


def test_what_was_measured_is_saved_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_session, "_BATCH", 4)
    run = Run()
    run.run()
    known = [len(p.section("default").operators) + len(p.section("default").collectives) for p in run.saved[:3]]
    assert known == [0, 4, 5]  # what is refused comes first
    assert [(done, what) for done, _, what in run.told[:4]] == [
        (0, "operators alone"),
        (4, "operators alone"),
        (5, "operators alone"),
        (6, "pairs"),
    ]
    assert [done for done, _, _ in run.told] == sorted(done for done, _, _ in run.told)
    assert run.told[-1][0] == run.told[-1][1] == len(run.measurer.asked)
    assert all(done <= total for done, total, _ in run.told)


def test_failures_are_recorded_and_not_tried_again() -> None:
    def fails(named: Names) -> str | None:
        return "out of memory" if named in (("doubled",), ("gather", "gemm")) else None

    first = Run()
    first.measurer.fails = fails
    section = first.run()
    pair = PairKey(KEYS["gather"], KEYS["gemm"])
    assert section.failures[str(KEYS["doubled"])] == section.failures[str(pair)] == "out of memory"
    assert not any("doubled" in named for named in pairs(first.measurer.asked))
    assert PairKey(KEYS["gemm"], KEYS["gather"]) in section.pairs
    second = Run(profile=first.session.profile)
    second.run()
    assert second.measurer.calls == 0


def test_pairs_that_contradict_their_sides_are_measured_again() -> None:
    class Disturbed(Measurer):
        """At first, a product takes ten times as long alone as in its pairs."""

        def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
            first = not self.sides
            outcomes = super().measure(items, repeats)
            if self.sides and first:
                n = next(n for n, item in enumerate(items) if names(item) == ("gemm",))
                outcomes[n] = (Sample(1e-3, 1e-3),) * repeats
            return outcomes

    run = Run(Disturbed())
    section, usual = run.run(), Run().run()
    asked = pairs(run.measurer.asked)
    again = [named for named in dict.fromkeys(asked) if asked.count(named) > 1]
    assert again and all("gemm" in named for named in again) and len(asked) < 2 * len(section.pairs)
    assert section.pairs == usual.pairs


def test_a_pair_needs_both_sides_alone_beside_it() -> None:
    run = Run()
    run.measurer.fails = lambda named: "out of memory" if named == ("moved",) and run.measurer.calls > 1 else None
    section = run.run()
    failed = {why for text, why in section.failures.items() if str(KEYS["moved"]) in text}
    assert failed == {"one side does not run alone"}
    assert not any(KEYS["moved"] in (pair.first, pair.second) for pair in section.pairs)
    assert section.solo(KEYS["moved"]) is not None


def test_what_cannot_be_isolated_is_recorded_with_its_reason() -> None:
    run = Run()
    assert run.session.missing(STEP).refused == (("sent", "it has side effects"),)
    assert run.run().failures == {"sent": "it has side effects"}
    assert run.saved[0].section("default").failures == {"sent": "it has side effects"}


def test_what_needs_more_gpus_than_there_are_is_left_for_a_machine_that_has_them() -> None:
    run = Run(gpus=2)
    section = run.run()
    assert not section.collectives and section.failures.keys() == {"sent"}
    assert section.operators.keys() == {key for name, key in KEYS.items() if name in NAMES and name not in COLLECTIVES}
    whole = Run(profile=run.session.profile)
    assert whole.run().collectives
    assert all(COLLECTIVES & {*named} for named in whole.measurer.asked)


def test_again_measures_everything_once_more() -> None:
    first = Run()
    first.measurer.fails = lambda named: "out of memory" if named in (("doubled",), ("gather", "gemm")) else None
    first.run()
    again = Run(Measurer(gemm=50.0), first.session.profile, again=True)
    section = again.run()
    assert sorted(alone(again.measurer.asked)) == sorted((name,) for name in NAMES)
    solo = section.solo(KEYS["gemm"])
    assert solo is not None and solo.seconds == pytest.approx(50e-6)
    assert section.failures == {"sent": "it has side effects"}
    assert set(pairs(again.measurer.asked)) == {names(pair) for pair in section.pairs} == set(chosen())


def test_again_chooses_pairs_by_the_new_times() -> None:
    first = Run(Measurer(doubled=5.0))
    first.run()
    again = Run(Measurer(moved=5.0), first.session.profile, again=True)
    again.run()
    found = {name for pair in pairs(again.measurer.asked) for name in pair}
    assert "doubled" in found and "moved" not in found


def test_bad_input_is_explained() -> None:
    with pytest.raises(DhelixError, match="launch setting 'fast' is unknown; use one of default, "):
        Session(EMPTY, "fast", None, H200)
    with pytest.raises(DhelixError, match="cannot measure"):
        Session(EMPTY, "default", None, H200).run(Step(MODULE), lambda *what: None, lambda profile: None)
