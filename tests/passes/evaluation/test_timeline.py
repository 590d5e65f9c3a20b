"""The evaluator of schedules: lanes, waits, contention, loops. All times are worked out by hand."""

import dataclasses

import pytest
from hypothesis import given

from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import simulate, simulate_module
from dhelix.passes.hlo import HloModule
from dhelix.profiles.hardware import H200
from dhelix.tests.passes.schedules import PERMUTING_LOOP, Done, Op, Program, Start, build, programs

RATES = ("compute_rate", "communication_rate", "inter_compute_rate", "inter_communication_rate")
FAIR = dataclasses.replace(H200, **dict.fromkeys(RATES, 1.0))
HALF = dataclasses.replace(H200, **dict.fromkeys(RATES, 0.5))


def play(program: Program, results: list[str], hardware=FAIR) -> Timeline:
    module, costs = build(program, results)
    return simulate(module.entry, module.schedule[module.entry], costs, hardware)


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {i.instruction: (i.start, i.end) for i in timeline.intervals}


GATHER_UNDER_X = [Start("g", 3.0, "p"), Op("x", 4.0, ("p",)), Done("g"), Op("y", 1.0, ("g_done", "x"))]


def test_a_collective_runs_under_compute() -> None:
    timeline = play(GATHER_UNDER_X, ["y"])
    assert spans(timeline) == {"g": (0.0, 3.0), "x": (0.0, 4.0), "y": (4.0, 5.0)}
    assert (timeline.seconds, timeline.hidden, timeline.exposed) == (5.0, 3.0, 0.0)
    assert timeline.collectives[0].under == (("x", 3.0),)


def test_compute_waits_for_a_done() -> None:
    timeline = play([Start("g", 3.0, "p"), Op("x", 1.0, ("p",)), Done("g"), Op("y", 1.0, ("g_done", "x"))], ["y"])
    assert spans(timeline) == {"x": (0.0, 1.0), "g": (0.0, 3.0), "y": (3.0, 4.0)}
    assert (timeline.hidden, timeline.exposed) == (1.0, 2.0)


def test_a_collective_waits_for_the_compute_before_its_start() -> None:
    timeline = play([Op("x", 4.0, ("p",)), Start("g", 3.0, "p"), Done("g")], ["x", "g_done"])
    assert spans(timeline)["g"] == (4.0, 7.0)


def test_a_lane_runs_one_collective_at_a_time_and_lanes_run_side_by_side() -> None:
    def program(lane: Lane) -> Program:
        return [Start("g", 3.0, "p"), Start("h", 2.0, "p", lane=lane), Done("h"), Done("g")]

    assert spans(play(program(Lane.COMM), ["g_done", "h_done"])) == {"g": (0.0, 3.0), "h": (3.0, 5.0)}
    assert spans(play(program(Lane.COMM_2), ["g_done", "h_done"])) == {"g": (0.0, 3.0), "h": (0.0, 2.0)}


def test_both_slow_down_while_they_share() -> None:
    timeline = play(GATHER_UNDER_X, ["y"], HALF)
    # g takes 6 s at half speed; meanwhile x does 3 of its 4 s.
    assert spans(timeline) == {"g": (0.0, 6.0), "x": (0.0, 7.0), "y": (7.0, 8.0)}
    assert (timeline.compute, timeline.compute_alone, timeline.slow_down) == (8.0, 5.0, 3.0)
    assert timeline.collectives[0].alone == 3.0 and timeline.collectives[0].hidden == 6.0


def test_what_leaves_the_node_slows_down_otherwise() -> None:
    over_the_network = [dataclasses.replace(GATHER_UNDER_X[0], between_nodes=True), *GATHER_UNDER_X[1:]]
    hardware = dataclasses.replace(FAIR, compute_rate=0.5, communication_rate=0.5, inter_communication_rate=0.75)
    assert spans(play(over_the_network, ["y"], hardware)) == {"g": (0.0, 4.0), "x": (0.0, 4.0), "y": (4.0, 5.0)}


LOOP = f"""HloModule m, is_scheduled=true
{PERMUTING_LOOP}ENTRY e {{
  state = (s32[], f32[2]) parameter(0)
  x = f32[2] parameter(1)
  outer = (f32[2], f32[2]) collective-permute-start(x), channel_id=2, source_target_pairs={{{{0,1}},{{1,0}}}}
  loop = (s32[], f32[2]) while(state), condition=condition, body=body, backend_config=TRIPS
  over = f32[2] collective-permute-done(outer)
  v = f32[2] get-tuple-element(loop), index=1
  ROOT last = f32[2] add(v, over)
}}
""".replace("TRIPS", '{"known_trip_count":{"n":"4"}}')


def loop_costs(module: HloModule, outer: float) -> dict:
    seconds = {"start": 3.0, "w": 2.0, "sum": 1.0, "last": 1.0, "outer": outer}
    lanes = {"start": Lane.COMM, "outer": Lane.COMM}
    return {
        i: Cost(seconds.get(i.name, 0.0), lane=lanes.get(i.name, Lane.COMPUTE))
        for c in module.computations
        for i in c.instructions
    }


def test_loops_are_entered() -> None:
    module = HloModule.from_text(LOOP)
    timeline = simulate_module(module, FAIR, loop_costs(module, 0.0))
    loop = next(i for i in timeline.intervals if i.instruction == "loop")
    assert (loop.start, loop.end, loop.count) == (0.0, 16.0, 4)
    assert loop.body is not None and loop.body.seconds == 4.0
    assert (timeline.seconds, timeline.hidden, timeline.exposed) == (17.0, 8.0, 4.0)
    inner = timeline.collectives[0]
    assert (inner.instruction, inner.count, inner.alone, inner.under) == ("start", 4, 12.0, (("w", 8.0),))


def test_a_collective_from_outside_delays_those_inside() -> None:
    module = HloModule.from_text(LOOP)
    timeline = simulate_module(module, FAIR, loop_costs(module, 5.0))
    # First iteration: w until 2, start from 5 to 8, sum until 9. Three more iterations take 4 s each, the addition 1 s.
    assert timeline.seconds == 9.0 + 3 * 4.0 + 1.0
    outer = next(c for c in timeline.collectives if c.instruction == "outer")
    assert (outer.hidden, outer.exposed) == (2.0, 3.0)


def test_costs_of_a_loop_bound_its_time() -> None:
    module = HloModule.from_text(LOOP)
    costs = Costs(H200)
    loop = next(i for i in module.entry.instructions if i.opcode == "while")
    alone = simulate(module.entry, [loop], costs, FAIR)
    assert alone.seconds <= costs[loop].seconds


@given(programs())
def test_times_add_up(drawn: tuple[Program, list[str]]) -> None:
    timeline = play(*drawn, hardware=HALF)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)
    assert timeline.slow_down == pytest.approx(timeline.hidden / 2)
    for one in timeline.collectives:
        assert one.alone == pytest.approx(one.hidden / 2 + one.exposed)
        assert one.hidden == pytest.approx(sum(seconds for _, seconds in one.under))
    compute = [i for i in timeline.intervals if i.lane is Lane.COMPUTE]
    assert all(a.end <= b.start for a, b in zip(compute, compute[1:], strict=False))


@given(programs())
def test_without_contention_no_order_beats_the_longest_lane(drawn: tuple[Program, list[str]]) -> None:
    timeline = play(*drawn)
    comm = [c.alone for c in timeline.collectives if c.lane is Lane.COMM]
    assert timeline.seconds >= max(timeline.compute_alone, sum(comm)) - 1e-9
    everything = timeline.compute_alone + sum(c.alone for c in timeline.collectives)
    assert timeline.seconds <= everything + 1e-9
