"""The search over a whole step, on overlaps whose optimum is known; resuming, limits and failures."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.tuning.measurements import LimitReached
from dhelix.passes.tuning.space import Space
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.runtime.tuning import rounds, tune_step
from dhelix.runtime.tuning.bodies import StepTimes
from dhelix.runtime.tuning.records import mark_failed
from dhelix.runtime.tuning.step_search import (
    ALONE,
    DEFAULTS,
    KINDS,
    TUNED,
    UNIFORM,
    StepSearch,
    StepSettings,
)
from dhelix.runtime.tuning.tune_step import Tuning
from dhelix.runtime.tuning.tuned import Tuned, as_json
from dhelix.tests.runtime.tuning.simulated_step import FAST_KIND, SLOW_KIND, SPACE, SimulatedStep

PLAN = Plan("a step", PlanTarget.of("H100", "no-p2p", "default", 2))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_step, "nccl_version", lambda: "2.30.1")


def tuned(step: Any, out: Path | None = None, records: Path | None = None, minutes: float = 10.0) -> Tuned:
    return Tuning(step, PLAN, lambda _: None, time.monotonic(), minutes).run(out, records)


def test_all_overlaps_of_a_step_are_tuned_at_once() -> None:
    step = SimulatedStep()
    found = StepSearch(step.bodies(), lambda s: step.times(step.bodies(), s), SPACE, 0.0, kinds=()).run()
    seconds = {name: step.seconds(settings) for name, settings in found.candidates.items()}
    assert seconds[TUNED] <= 1.02 * step.optimum
    assert seconds[TUNED] <= min(seconds[UNIFORM], seconds[ALONE], seconds[DEFAULTS])
    assert found.measured == step.count
    # Searches share measurements: the same search of the first overlap alone takes almost as many.
    alone = SimulatedStep((0,))
    StepSearch(alone.bodies(), lambda s: alone.times(alone.bodies(), s), SPACE, 0.0, kinds=()).run()
    assert step.count <= 1.3 * alone.count


def test_channels_above_those_of_the_communicator_are_not_searched() -> None:
    step, most, tried = SimulatedStep(), 4, set[int]()

    def capped(settings: StepSettings) -> StepTimes:
        tried.update(one.channels for one in settings.values())
        asked = {one.channels for one in settings.values()}
        given = {i: replace(one, channels=min(one.channels, most)) for i, one in settings.items()}
        times = step.times(step.bodies(), given)
        lucky = 0.99 if asked == {16} else 1.0  # chance makes a setting that is none the best
        return {name: replace(one, whole=lucky * one.whole) for name, one in times.items()}

    space = Space((1, 2, 4, 6, 8, 12, 16), SPACE.chunks[-1:])
    found = StepSearch(step.bodies(), capped, space, 0.0, kinds=()).run()
    assert tried <= {1, 2, 4, 8, 16} and all(found.maps.values())
    assert {one.channels for each in found.maps.values() for one in each} <= {1, 2, 4}
    assert all(one.channels <= most for one in found.candidates[TUNED].values())


def test_a_body_keeps_the_algorithm_and_protocol_that_is_fastest_for_it() -> None:
    step = SimulatedStep()
    found = StepSearch(step.bodies(), lambda s: step.times(step.bodies(), s), SPACE, 0.0).run()
    first, second = step.bodies()
    assert found.kinds[first.fingerprint] == FAST_KIND and found.kinds[second.fingerprint] != FAST_KIND
    kinds = {(s.algorithm, s.protocol) for i, s in found.candidates[TUNED].items() if i in first.collectives}
    assert kinds == {FAST_KIND}


def test_a_plan_with_settings_is_written_and_reproduced_byte_for_byte(tmp_path: Path) -> None:
    texts = []
    for n in range(2):
        found = tuned(SimulatedStep(noise=0.005), tmp_path / f"{n}.json")
        assert found.gain > 1.02 and json.dumps(as_json(found))
        assert found.plan.tuning is not None and found.plan.tuning.collectives
        texts.append((tmp_path / f"{n}.json").read_text())
    assert texts[0] == texts[1] and plan_files.loads(texts[0], "here").leaves_program


def test_a_tuning_without_minutes_checks_the_settings_of_its_plan() -> None:
    step = SimulatedStep()
    first = tuned(step).plan
    assert first.tuning is not None and first.tuning.collectives
    count = step.count
    again = Tuning(step, first, lambda _: None, time.monotonic(), 0.0).run(None, None)
    assert set(again.seconds) == {DEFAULTS, TUNED} and again.gain > 1.02 and step.count == count
    assert again.plan.tuning is not None and again.plan.tuning.collectives == first.tuning.collectives
    slower = [replace(one, setting=NcclSetting(*SLOW_KIND)) for one in first.tuning.collectives]
    worse = replace(first, tuning=replace(first.tuning, collectives=tuple(slower)))
    none = Tuning(step, worse, lambda _: None, time.monotonic(), 0.0).run(None, None).plan
    assert none.tuning is not None and not none.tuning.collectives


def test_an_interrupted_tuning_goes_on_where_it_stopped(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"

    class Interrupted(SimulatedStep):
        def times(self, *given: Any) -> Any:
            if self.count == 20:
                raise KeyboardInterrupt
            return super().times(*given)

    with pytest.raises(KeyboardInterrupt):
        tuned(Interrupted(), records=records)
    whole, rest = SimulatedStep(), SimulatedStep()
    first = tuned(whole, tmp_path / "whole.json")
    with records.open("a") as file:
        file.write('{"program": "half of a')
    again = tuned(rest, tmp_path / "rest.json", records)
    assert again.plan == first.plan and rest.count < whole.count - 15


def test_if_nccls_own_channels_are_fastest_only_the_kind_is_set() -> None:
    class Dear(SimulatedStep):
        """Any number of channels takes longer than NCCL's own."""

        def times(self, bodies: Any, settings: Any) -> Any:
            factor = {body.fingerprint: 0.5 for body in bodies}
            for (name, *_), one in settings.items():
                factor[name] = 0.9 if one.channels else 0.7 if (one.algorithm, one.protocol) == KINDS[1] else 1.0
            return {b.fingerprint: replace(b.default, whole=factor[b.fingerprint] * b.default.whole) for b in bodies}

    found = tuned(Dear()).found
    assert {(s.algorithm, s.protocol, s.channels) for s in found.candidates[TUNED].values()} == {(*KINDS[1], 0)}


def test_records_of_overlaps_that_were_cut_otherwise_are_measured_again(tmp_path: Path) -> None:
    """How computation is cut into pieces follows from a trace, so it may differ in the run that goes on."""

    class Otherwise(SimulatedStep):
        def bodies(self) -> Any:
            return tuple(self._cut(body) for body in super().bodies())

        def times(self, bodies: Any, settings: Any) -> Any:
            found = super().times(bodies, settings)
            return {name: replace(one, computations=(sum(one.computations),)) for name, one in found.items()}

        def _cut(self, body: Any) -> Any:
            default = replace(body.default, computations=(sum(body.default.computations),))
            return replace(body, overlap=replace(body.overlap, waves=body.overlap.waves[:1]), default=default)

    records = tmp_path / "records.jsonl"
    first = tuned(SimulatedStep(), records=records)
    again = Otherwise()
    assert tuned(again, records=records).gain > 1.02 and again.count > first.found.measured // 2


def test_a_measurement_that_an_earlier_run_left_open_did_not_fail(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    opened = '{"program": "p", "settings": "s", "began": true}\n'
    records.write_text(opened)
    assert not mark_failed(records, "no memory", opened)
    records.write_text(2 * opened)
    assert mark_failed(records, "no memory", opened)


def test_records_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="measurements cannot be read"):
        tuned(SimulatedStep(), records=tmp_path)


def test_settings_that_hung_are_not_tried_again(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"

    class Hangs(SimulatedStep):
        def times(self, *given: Any) -> Any:
            if given[1] and len({*given[1].values()}) == 1 and next(iter(given[1].values())).algorithm == KINDS[2][0]:
                raise TimeoutError
            return super().times(*given)

    with pytest.raises(TimeoutError):
        tuned(Hangs(), records=records)
    assert mark_failed(records, "no answer for 60 s") and not mark_failed(records, "again")
    found = tuned(SimulatedStep(), records=records)
    assert any("no answer for 60 s" in note for note in found.notes) and found.gain > 1.02


def test_a_tuning_ends_in_time_with_the_best_so_far() -> None:
    class Slow(SimulatedStep):
        def times(self, *given: Any) -> Any:
            time.sleep(0.02)
            return super().times(*given)

    found = tuned(Slow(), minutes=0.01)
    assert found.seconds[TUNED] <= found.seconds[DEFAULTS] and 10 < found.found.measured < 40
    assert found.notes == ("NCCL's defaults stay where nothing was tried: 0.01 minutes have passed",)
    step = SimulatedStep()
    assert tuned(step, minutes=0.0).seconds == {DEFAULTS: step.seconds({})} and step.count == 0


def test_the_end_of_each_measurement_is_told_before_models_are_fitted() -> None:
    said: list[str] = []
    step = SimulatedStep()
    tuning = Tuning(step, PLAN, said.append, time.monotonic(), 10.0, lambda: said.append("measured"))
    found = tuning.run(None, None).found
    lines = [n for n, line in enumerate(said) if line.startswith(("all collectives", "settings of their own"))]
    assert len(lines) == found.measured and all(said[n + 1] == "measured" for n in lines)


def test_if_nccl_asks_in_another_order_nothing_is_tuned() -> None:
    step = SimulatedStep()
    step.surprise = "question 2 of 6 is all-gather of 512 bytes, where the program has the end of the step"
    with pytest.raises(DhelixError, match="settings would reach the wrong collectives"):
        tuned(step)


def test_searches_in_rounds_wait_for_each_other() -> None:
    asked: list[dict[str, int]] = []

    def counting(upto: int) -> Any:
        def search(ask: Any) -> int:
            return sum(ask(n) for n in range(upto))

        return search

    def measure(questions: Any) -> Any:
        asked.append(dict(questions))
        return {name: 10 * n for name, n in questions.items()}

    assert rounds.run({"a": counting(1), "b": counting(3)}, measure) == {"a": 0, "b": 30}
    assert asked == [{"a": 0, "b": 0}, {"b": 1}, {"b": 2}]


def test_an_error_of_a_measurement_reaches_every_search() -> None:
    def stops(ask: Any) -> str:
        try:
            return ask(1)
        except LimitReached:
            return "the best so far"

    def limit(_: Any) -> Any:
        raise LimitReached

    assert rounds.run({"a": stops, "b": stops}, limit) == dict.fromkeys("ab", "the best so far")
    with pytest.raises(LimitReached):
        rounds.run({"a": stops, "b": lambda ask: ask(1)}, limit)
