"""The evaluator with a profile: contention of measured pairs. Times are worked out by hand, or drawn."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import BY_THEMSELVES, CostModel, Costs, InStep
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import evaluate, guessed_overlap, simulate
from dhelix.passes.hlo import HloModule
from dhelix.profiles.estimates.contention import MIN_RATE, measured_rates, pair_seconds
from dhelix.profiles.estimates.estimator import Estimator
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section
from dhelix.tests.machine import slowness
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, programs

type Rates = dict[tuple[str, str], tuple[float, float]]
"""Rates of the instruction launched first and of the other one, by their names."""


def profiled(
    program: Program, results: list[str], rates: Rates, running: Rates | None = None, in_step: InStep = BY_THEMSELVES
) -> tuple[HloModule, Costs]:
    """A program, and costs from a profile that holds only these pairs.

    `running`: the pairs under the launch setting `connections1`.
    """
    module, costs = build(program, results)
    seconds = {step.name: step.seconds for step in program if not isinstance(step, Done)}
    keys = {step.name: key_of(step) for step in program if not isinstance(step, Done)}

    def section(setting: str, rates: Rates) -> Section:
        pairs = {
            PairKey(keys[first], keys[second]): timing(seconds[first], seconds[second], both)
            for (first, second), both in rates.items()
        }
        return Section(setting, pairs=pairs)

    profile = Profile("H200", "nvlink").with_section(section("default", rates))
    if running is not None:
        profile = profile.with_section(section("connections1", running))
    known = Costs(H200, Estimator(profile, H200), in_step=in_step)
    known.update(costs)
    known.operator_keys.update((i, keys.get(i.name)) for i in module.entry.instructions)
    return module, known


def key_of(step: Op | Start) -> Key:
    number = int.from_bytes(step.name.encode())
    return CollectiveKey("all-gather", number, 4) if isinstance(step, Start) else OperatorKey("other", "x", (number,))


def timing(first: float, second: float, rates: tuple[float, float]) -> PairTiming:
    """The measurement of a pair that proceeds at these rates."""
    return PairTiming(*pair_seconds(first, second, rates), first, second)


def play(
    program: Program, results: list[str], rates: Rates, running: Rates | None = None, in_step: InStep = BY_THEMSELVES
) -> Timeline:
    module, costs = profiled(program, results, rates, running, in_step)
    return evaluate(module.schedule[module.entry], costs)


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {i.instruction: (i.start, i.end) for i in timeline.intervals}


GATHER_UNDER_X = [Start("g", 3.0, "p"), Op("x", 4.0, ("p",)), Done("g"), Op("y", 1.0, ("g_done", "x"))]


def test_a_collective_that_starts_before_compute_was_launched_first() -> None:
    timeline = play(GATHER_UNDER_X, ["y"], {("g", "x"): (0.75, 0.5), ("x", "g"): (0.1, 1.0)})
    # g takes 4 s at rate 0.75; meanwhile x does 2 of its 4 s.
    assert spans(timeline) == {"g": (0.0, 4.0), "x": (0.0, 6.0), "y": (6.0, 7.0)}
    assert (timeline.slow_down, timeline.hidden, timeline.exposed) == (2.0, 4.0, 0.0)


def test_a_collective_whose_turn_comes_while_compute_runs_was_launched_second() -> None:
    program = [
        Start("g", 2.0, "p"),
        Start("h", 2.0, "p"),
        Op("x", 4.0, ("p",)),
        Op("y", 4.0, ("p",)),
        Done("g"),
        Done("h"),
    ]
    rates = {("g", "x"): (1.0, 0.5), ("x", "h"): (1.0, 0.25), ("h", "x"): (0.5, 0.5), ("h", "y"): (0.5, 1.0)}
    timeline = play(program, ["x", "y", "g_done", "h_done"], rates)
    # While g runs for 2 s, x does 1 s of work. x takes 3 s more; meanwhile h does 0.75 s of work at rate 0.25.
    # h is in flight when y begins, and needs 1.25 s of work at rate 0.5.
    assert spans(timeline) == {"g": (0.0, 2.0), "x": (0.0, 5.0), "h": (2.0, 7.5), "y": (5.0, 9.0)}


def test_a_collective_that_begins_together_with_compute_was_launched_first() -> None:
    program = [Start("g", 2.0, "p"), Start("h", 2.0, "p"), Op("x", 2.0, ("p",)), Op("y", 2.0, ("p",))]
    program += [Done("g"), Done("h")]
    rates = {("g", "x"): (1.0, 1.0), ("h", "y"): (0.5, 0.5), ("y", "h"): (0.1, 1.0)}
    timeline = play(program, ["x", "y", "g_done", "h_done"], rates)
    assert spans(timeline) == {"g": (0.0, 2.0), "x": (0.0, 2.0), "h": (2.0, 6.0), "y": (2.0, 6.0)}


def test_compute_beside_both_lanes_proceeds_at_the_lower_rate() -> None:
    program = [
        Start("g", 2.0, "p"),
        Start("h", 1.0, "p", lane=Lane.COMM_2),
        Op("x", 4.0, ("p",)),
        Done("g"),
        Done("h"),
    ]
    timeline = play(program, ["x", "g_done", "h_done"], {("g", "x"): (1.0, 0.75), ("h", "x"): (0.25, 0.5)})
    # x: 2 s at rate 0.5 next to g and h, then at 0.5 next to h until 4 s, then alone.
    assert spans(timeline) == {"g": (0.0, 2.0), "h": (0.0, 4.0), "x": (0.0, 6.0)}


def test_nothing_measured_leaves_the_constants_of_the_hardware() -> None:
    module, costs = profiled(GATHER_UNDER_X, ["y"], {})
    order = module.schedule[module.entry]
    assert simulate(module.entry, order, costs, H200) == simulate(module.entry, order, dict(costs), H200)


def test_overlap_is_guessed_where_no_pair_like_it_was_measured() -> None:
    program = [
        Start("g", 2.0, "p"),
        Op("x", 4.0, ("p",)),
        Done("g"),
        Start("h", 2.0, "p"),
        Op("y", 4.0, ("g_done",)),
        Done("h"),
    ]
    module, costs = profiled(program, ["x", "y", "h_done"], {("g", "x"): (0.5, 0.5)})
    timeline = evaluate(module.schedule[module.entry], costs)
    known, guessed = (next(c.hidden for c in timeline.collectives if c.instruction == name) for name in "gh")
    assert known > 0.0 and guessed > 0.0
    assert guessed_overlap(timeline, costs) == pytest.approx(guessed / (known + guessed))
    assert guessed_overlap(timeline, costs.at_clock(1.5)) == guessed_overlap(timeline, costs)


def test_without_a_profile_all_overlap_is_guessed() -> None:
    module, costs = build(GATHER_UNDER_X, ["y"])
    roofline = Costs(H200)
    roofline.update(costs)
    timeline = evaluate(module.schedule[module.entry], roofline)
    assert timeline.hidden > 0.0 and guessed_overlap(timeline, roofline) == 1.0
    alone = evaluate([i for i in module.schedule[module.entry] if i.name == "x"], roofline)
    assert guessed_overlap(alone, roofline) == 0.0


def test_a_starved_collective_comes_after_compute() -> None:
    starved = PairTiming(7.0, 7.0, 4.0, 3.0, 4.0)
    assert measured_rates(starved) == (MIN_RATE, 1.0)
    timeline = play(GATHER_UNDER_X, ["y"], {("g", "x"): (MIN_RATE, 1.0)})
    assert spans(timeline)["x"] == (0.0, 4.0)
    assert timeline.seconds == pytest.approx(3.0 + 4.0 + 1.0, rel=0.01)


UNDER_TWO = [Start("g", 3.0, "p"), Op("x", 2.0, ("p",)), Op("y", 2.0, ("p",)), Done("g")]
STARVED = {("g", "x"): (MIN_RATE, 1.0), ("g", "y"): (MIN_RATE, 1.0)}


def test_a_starved_collective_gets_its_sms_when_the_first_instruction_ends() -> None:
    """The collective keeps its SMs next to y, at the rates of `connections1`, where kernels start in launch order."""
    running = {("g", "x"): (0.1, 0.1), ("g", "y"): (0.9, 0.75)}
    timeline = play(UNDER_TWO, ["x", "y", "g_done"], STARVED, running)
    under_y = 2.0 / 0.75
    assert timeline.collectives[0].under == (("y", pytest.approx(under_y)), ("x", 2.0))
    assert timeline.seconds == pytest.approx(2.0 + under_y + (3.0 - 2.0 * MIN_RATE - 0.9 * under_y))


def test_a_collective_that_ran_alone_first_is_not_starved() -> None:
    program = [Start("g", 3.0, "p", lane=Lane.COMM_2), Start("h", 1.0, "p"), Done("h")]
    program += [Op("x", 2.0, ("h_done",)), Done("g")]
    timeline = play(program, ["x", "g_done"], {("g", "x"): (MIN_RATE, 1.0)}, {("g", "x"): (1.0, 0.5)})
    assert spans(timeline) == {"h": (0.0, 1.0), "g": (0.0, 3.0), "x": (1.0, 4.0)}, "2 s at half speed, 1 s alone"


def test_where_one_connection_was_not_measured_pairs_of_the_setting_count() -> None:
    assert play(UNDER_TWO, ["x", "y", "g_done"], STARVED, {}).seconds == pytest.approx(7.0, rel=0.02)
    assert play(UNDER_TWO, ["x", "y", "g_done"], STARVED).seconds == pytest.approx(7.0, rel=0.02)


def test_kernels_pause_and_collectives_go_on_meanwhile() -> None:
    rates = {("g", "x"): (1.0, 1.0), ("g", "y"): (1.0, 1.0)}
    timeline = play(UNDER_TWO, ["x", "y", "g_done"], rates, in_step=InStep(pause=0.25))
    assert spans(timeline) == {"g": (0.0, 3.0), "x": (0.25, 2.25), "y": (2.5, 4.5)}
    assert (timeline.compute, timeline.exposed, timeline.hidden, timeline.idle) == (4.0, 0.5, 2.5, 0.0)
    alone = play([Op("x", 2.0, ("p",)), Op("y", 2.0, ("x",))], ["y"], {}, in_step=InStep(pause=0.25))
    assert (alone.seconds, alone.idle) == (4.5, 0.5)


def test_a_collective_launched_before_a_pause_is_launched_with_what_comes_after_it() -> None:
    timeline = play(GATHER_UNDER_X, ["y"], {("g", "x"): (0.5, 1.0)}, {("g", "x"): (1.0, 1.0)}, InStep(pause=0.5))
    assert spans(timeline)["g"] == (0.0, 0.5 + 4.0 + 0.5)


def test_collectives_wait_for_the_last_of_their_gpus() -> None:
    timeline = play(GATHER_UNDER_X, ["y"], {("g", "x"): (0.5, 1.0)}, in_step=InStep(wait=0.5))
    assert spans(timeline)["g"] == (0.0, 5.5)
    assert timeline.collectives[0].alone == 3.0


def test_compute_stands_still_where_copy_engines_are_given_a_collective() -> None:
    module, costs = profiled(GATHER_UNDER_X, ["y"], {("g", "x"): (0.5, 1.0)}, {("g", "x"): (1.0, 1.0)})
    costs.update({i: replace(cost, launch=0.5) for i, cost in costs.items() if i.name == "g"})
    timeline = evaluate(module.schedule[module.entry], costs)
    assert spans(timeline) == {"g": (0.5, 5.5), "x": (0.5, 4.5), "y": (5.5, 6.5)}, "g begins with x: launched first"
    assert (timeline.idle, timeline.exposed) == (0.5, 1.0)


def test_what_is_under_way_goes_on_where_copy_engines_are_given_a_collective() -> None:
    """The launch of h stops x, but not g. g takes 3 s alone and has 2 s left when x begins."""
    two = [Start("g", 3.0, "p"), Start("h", 1.0, "p"), Op("x", 4.0, ("p",)), Done("g"), Done("h")]
    module, costs = profiled(two, ["x", "g_done", "h_done"], {("g", "x"): (1.0, 1.0), ("x", "h"): (1.0, 1.0)})
    costs.update({i: replace(cost, launch=1.0) for i, cost in costs.items() if i.name == "h"})
    timeline = evaluate(module.schedule[module.entry], costs)
    assert spans(timeline) == {"g": (0.0, 3.0), "h": (3.0, 4.0), "x": (1.0, 5.0)}
    assert (timeline.exposed, timeline.hidden, timeline.idle) == (1.0, 3.0, 0.0)


TWO_GATHERS = [Start("g", 3.0, "p"), Start("h", 2.0, "p"), Op("x", 4.0, ("p",)), Done("g"), Done("h")]
NO_CONTENTION = {("g", "x"): (1.0, 1.0), ("h", "x"): (1.0, 1.0), ("x", "h"): (1.0, 1.0)}


def test_nothing_passes_a_collective_that_waits_for_its_lane_over_one_connection() -> None:
    results = ["x", "g_done", "h_done"]
    passed = play(TWO_GATHERS, results, NO_CONTENTION)
    assert spans(passed) == {"g": (0.0, 3.0), "h": (3.0, 5.0), "x": (0.0, 4.0)}
    in_order = play(TWO_GATHERS, results, NO_CONTENTION, in_step=InStep(in_order=True))
    assert spans(in_order) == {"g": (0.0, 3.0), "h": (3.0, 5.0), "x": (3.0, 7.0)}
    assert (in_order.exposed, in_order.hidden) == (3.0, 2.0)


def test_over_one_connection_compute_goes_on_beside_collectives_that_have_their_lanes() -> None:
    later = [
        Start("g", 3.0, "p"),
        Op("x", 4.0, ("p",)),
        Start("h", 2.0, "p"),
        Op("y", 1.0, ("x",)),
        Done("g"),
        Done("h"),
    ]
    rates = NO_CONTENTION | {("h", "y"): (1.0, 1.0)}
    timeline = play(later, ["y", "g_done", "h_done"], rates, in_step=InStep(in_order=True))
    assert spans(timeline) == {"g": (0.0, 3.0), "x": (0.0, 4.0), "h": (4.0, 6.0), "y": (4.0, 5.0)}


@pytest.mark.parametrize("setting, in_order", [("default", False), ("connections1", True), ("copy-engine", False)])
def test_costs_know_whether_their_setting_has_one_connection(setting: str, in_order: bool) -> None:
    assert (
        CostModel(Profile("H200", "nvlink").with_section(Section(setting)), setting).costs().in_step.in_order
        is in_order
    )


def test_evaluation_needs_to_know_the_hardware() -> None:
    module, costs = profiled(GATHER_UNDER_X, ["y"], {})
    with pytest.raises(DhelixError, match="the costs name no hardware"):
        evaluate(module.schedule[module.entry], dict(costs))


@given(programs(), st.data())
def test_between_the_longest_lane_and_everything_in_turn(drawn: tuple[Program, list[str]], data: st.DataObject) -> None:
    """Holds for pairs whose overlap takes no longer than one after the other."""
    program, results = drawn
    rates = {}
    for collective in (s.name for s in program if isinstance(s, Start)):
        for compute in (s.name for s in program if isinstance(s, Op)):
            for pair in ((collective, compute), (compute, collective)):
                one = data.draw(st.floats(MIN_RATE, 1.0))
                rates[pair] = (one, data.draw(st.floats(max(1.0 - one, MIN_RATE), 1.0)))
    timeline = play(program, results, rates)
    comm = [c.alone for c in timeline.collectives if c.lane is Lane.COMM]
    inter = [c.alone for c in timeline.collectives if c.lane is Lane.COMM_2]
    assert timeline.seconds >= max(timeline.compute_alone, sum(comm), sum(inter)) * (1 - 1e-9)
    assert timeline.seconds <= (timeline.compute_alone + sum(comm) + sum(inter)) * (1 + 1e-9)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)


COMPUTE = st.lists(st.tuples(st.floats(0.1, 8.0), st.floats(MIN_RATE, 1.0), st.floats(MIN_RATE, 1.0)), max_size=6)


def under_one(gather: float, compute: list[tuple[float, float, float]]) -> float:
    """Seconds of a gather with compute under it. `compute`: (seconds, own rate, the gather's rate) of each operator."""
    names = [f"x{n}" for n in range(len(compute))]
    ops = [Op(name, seconds, ("p",)) for name, (seconds, _, _) in zip(names, compute, strict=True)]
    rates = {("g", name): (its, own) for name, (_, own, its) in zip(names, compute, strict=True)}
    return play([Start("g", gather, "p"), *ops, Done("g")], ["g_done", *names], rates).seconds


@given(st.floats(0.1, 20.0), COMPUTE)
def test_more_under_a_collective_takes_longer(gather: float, compute: list[tuple[float, float, float]]) -> None:
    seconds = [under_one(gather, compute[:n]) for n in range(len(compute) + 1)]
    assert seconds[0] == gather
    assert all(a <= b * (1 + 1e-9) for a, b in zip(seconds, seconds[1:], strict=False))


@given(st.floats(0.1, 20.0), COMPUTE, st.data())
def test_longer_parts_take_longer(
    gather: float, compute: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    """Holds for pairs whose overlap takes no longer than one after the other. Otherwise a longer operator that overlaps
    well could keep the collective away from one that overlaps badly.
    """
    fair = [(seconds, own, max(its, 1.0 - own)) for seconds, own, its in compute]
    longer = [(seconds + data.draw(st.floats(0.0, 4.0)), own, its) for seconds, own, its in fair]
    more = data.draw(st.floats(0.0, 4.0))
    assert under_one(gather, fair) <= under_one(gather + more, longer) * (1 + 1e-9)


@pytest.fixture(params=["default", "connections1"])
def shipped(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path))  # only the shipped profiles
    return CostModel.find("H200", "nvlink", request.param).estimator


def test_measured_pairs_come_out_as_they_were_measured(shipped: Estimator) -> None:
    """Simulated pairs agree with the model of pairs exactly, and with the measurement to 1 % if rates within [MIN_RATE,
    1] can explain it. A few differ by more, because the ends of both sides and of the pair are separate medians.
    """
    module, alone = build([Start("g", 1.0, "p"), Op("x", 1.0, ("p",)), Done("g")], ["x", "g_done"])
    order = module.schedule[module.entry]
    by_name = {i.name: i for i in order}
    off = []
    for pair, measured in shipped.section.pairs.items():
        if not isinstance(pair.first, CollectiveKey) or not isinstance(pair.second, OperatorKey):
            continue
        costs = Costs(H200, shipped)
        costs.update(alone)
        costs.operator_keys.update({by_name["g"]: pair.first, by_name["x"]: pair.second})
        costs[by_name["g"]] = Cost(measured.first_alone, lane=Lane.COMM)
        costs[by_name["x"]] = Cost(measured.second_alone)
        seconds = simulate(module.entry, order, costs, H200).seconds
        rates = measured_rates(measured)
        assert seconds == pytest.approx(pair_seconds(measured.first_alone, measured.second_alone, rates)[0])
        if MIN_RATE < min(rates) and max(rates) < 1.0:
            off.append(abs(seconds / measured.seconds - 1.0))
    assert len(off) > 200
    assert sum(error <= 0.01 for error in off) >= 0.98 * len(off)
    assert max(off) < 0.06


def test_many_instructions_take_a_second() -> None:
    """As in a search, the same few keys occur over and over."""
    program: list = []
    for n in range(4000):
        program += [Start(f"g{n}", 2.0, "p"), Op(f"x{n}", 1.0, ("p",)), Op(f"y{n}", 3.0, ("p",)), Done(f"g{n}")]
    module, costs = build(program, [f"g{n}_done" for n in range(4000)])
    gather, x = CollectiveKey("all-gather", 1, 4), OperatorKey("other", "x", (1,))
    pairs = {PairKey(gather, x): timing(2.0, 1.0, (0.5, 0.75))}
    profile = Profile("H200", "nvlink").with_section(Section("default", pairs=pairs))
    known = Costs(H200, Estimator(profile, H200))
    known.update(costs)
    keys = {"g": gather, "x": x, "y": x}
    known.operator_keys.update((i, keys.get(i.name[0]) if costs[i].seconds else None) for i in costs)
    begin = time.process_time()
    timeline = simulate(module.entry, module.schedule[module.entry], known, H200)
    assert time.process_time() - begin < 2.0 * slowness()
    # g takes 4 s at rate 0.5; meanwhile x takes 4/3 s, and y does 2 of its 3 s.
    assert timeline.seconds == pytest.approx(4000 * 5.0)
