"""The exact model against all possible orders: its bound is never above the fastest order, and usually equal to it."""

import dataclasses
import random
import sys

import pytest
from ortools.sat.python import cp_model as cp_sat

from dhelix.errors import DhelixError
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import BY_THEMSELVES, Costs, InStep
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.exact.bound import least_makespan
from dhelix.passes.ordering.exact.model import NANO, Overlap
from dhelix.passes.ordering.exact.order import ExactOrder, exact_order
from dhelix.passes.ordering.exact.problem import Problem
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.strand_pairing import pairing_order
from dhelix.profiles.hardware import H200
from dhelix.tests.passes.random_cases import Case, fastest, random_case, unlimited
from dhelix.tests.passes.schedules import PERMUTING_LOOP, Done, Op, Start, build


def solve(module: HloModule, costs: Costs, effort: float = 1.0) -> ExactOrder:
    found = exact_order(module.entry, module.schedule[module.entry], costs, unlimited(module), effort=effort)
    verify_sequence(module.entry, list(found.order))
    assert found.seconds == evaluate(found.order, costs).seconds
    return found


@pytest.mark.parametrize("in_step", [BY_THEMSELVES, InStep(pause=3e-6, wait=1e-5), InStep(pause=3e-6, launch=2e-5)])
def test_no_order_beats_the_bound_and_small_programs_are_solved(in_step: InStep) -> None:
    """At least 6 of 8 programs are solved up to the rounding of rates. The others use both lanes, or waits that the
    model cuts. If launches stop compute, the bound holds but may be loose: the model lacks what runs meanwhile.
    """
    draw = random.Random(2)
    tight = equal = 0
    for _ in range(8):
        module, costs = random_case(draw).module(in_step)
        found, least = solve(module, costs), fastest(module, costs)
        assert found.bound <= least * (1.0 + 1e-9) <= found.seconds * (1.0 + 2e-9)
        assert found.gap == pytest.approx(1.0 - found.bound / found.seconds)
        tight += found.bound >= least * 0.999
        equal += found.seconds <= least * (1.0 + 1e-9)
    assert in_step.launch or (tight >= 6 and equal >= 6)


PAIR = Case(
    [
        *(Op("a", 1e-4, ("p",)), Start("g", 1e-4, "a"), Done("g"), Op("x", 1e-4, ("g_done",))),
        *(Op("b", 1e-4, ("p",)), Start("h", 1e-4, "b"), Done("h"), Op("y", 1e-4, ("h_done",))),
    ],
    ["x", "y"],
    {
        (compute, collective, *meeting): (1.0, 1.0)
        for compute in "abxy"
        for collective in "gh"
        for meeting in ((True, False), (False, False), (True, True))
    },
)


def test_two_strands_hide_each_other() -> None:
    """Brute force, the model and the search all find a, then b over g, then x over h, then y."""
    module, costs = PAIR.module()
    found = solve(module, costs)
    assert found.seconds == pytest.approx(4e-4) and fastest(module, costs) == pytest.approx(4e-4)
    assert found.solved and found.bound == pytest.approx(4e-4, rel=1e-3)
    paired = pairing_order(module.entry, module.schedule[module.entry], costs, unlimited(module))
    assert evaluate(paired, costs).seconds == pytest.approx(4e-4)


def test_the_lane_that_slows_compute_gives_the_other_time() -> None:
    """g ends under x, because h doubles the time of x."""
    meetings = ((True, False), (False, False), (True, True))
    rates = {("x", start, *way): rate for start, rate in (("h", (0.5, 1.0)), ("g", (1.0, 0.3))) for way in meetings}
    program = [
        *(Start("h", 2e-4, "p", lane=Lane.COMM_2), Start("g", 6e-5, "p")),
        *(Op("x", 1e-4, ("p",)), Done("h"), Done("g")),
    ]
    module, costs = Case(program, ["x", "g_done", "h_done"], rates).module()
    found = solve(module, costs)
    assert found.bound == pytest.approx(2e-4, rel=1e-3) and found.seconds == pytest.approx(2e-4)


def test_each_order_of_collectives_is_bounded_by_itself() -> None:
    """No bound is above the fastest order. If the known time is below all orders, it is the bound."""
    draw = random.Random(7)
    for _ in range(4):
        module, costs = random_case(draw).module(InStep(pause=3e-6, wait=1e-5))
        problem = Problem(module.entry, module.schedule[module.entry], costs, unlimited(module))
        least = fastest(module, costs)
        slack = Overlap(cp_sat, problem, 1.0).slack
        assert least_makespan(cp_sat, problem, 2.0 * least, 2.0) - slack <= least * NANO
        assert least_makespan(cp_sat, problem, 0.5 * least, 2.0) >= int(0.5 * least * NANO)


LOOP = f"""HloModule m, is_scheduled=true
{PERMUTING_LOOP}ENTRY e {{
  state = (s32[], f32[2]) parameter(0)
  x = f32[2] parameter(1)
  outer = (f32[2], f32[2]) collective-permute-start(x), channel_id=2, source_target_pairs={{{{0,1}},{{1,0}}}}
  loop = (s32[], f32[2]) while(state), condition=condition, body=body, backend_config={{"known_trip_count":{{"n":"4"}}}}
  y = f32[2] negate(x)
  over = f32[2] collective-permute-done(outer)
  v = f32[2] get-tuple-element(loop), index=1
  ROOT last = f32[2] add(v, over)
}}
"""


@pytest.mark.parametrize("outer", [1e-5, 1e-4, 1e-3])
def test_loops_are_bounded_by_what_they_compute(outer: float) -> None:
    """The loop contains a collective, and another collective may overlap with the loop."""
    module = HloModule.from_text(LOOP)
    seconds = {"start": 3e-4, "w": 2e-4, "sum": 1e-4, "last": 1e-4, "y": 1e-4, "outer": outer}
    costs = {
        i: Cost(seconds.get(i.name, 0.0), lane=Lane.COMM if i.name in ("start", "outer") else Lane.COMPUTE)
        for c in module.computations
        for i in c.instructions
    }
    entry, limits = module.entry, unlimited(module)
    found = exact_order(entry, module.schedule[entry], costs, limits, effort=0.3)
    assert 1.399e-3 <= found.bound <= found.seconds <= evaluate(module.schedule[entry], costs, H200).seconds


def test_the_same_order_each_time() -> None:
    module, costs = random_case(random.Random(5)).module()
    once, again = (solve(module, costs, 0.2) for _ in range(2))
    assert once == again


def test_a_known_order_is_where_it_begins() -> None:
    """With zero effort, the solver returns the order that it starts from, and has only a bound for the others."""
    module, costs = PAIR.module()
    sequence, limits = module.schedule[module.entry], unlimited(module)
    paired = pairing_order(module.entry, sequence, costs, limits)
    found = exact_order(module.entry, sequence, costs, limits, paired, effort=0.0)
    assert list(found.order) == paired and not found.solved and found.bound <= found.seconds


def test_orders_that_need_too_much_memory_are_not_taken() -> None:
    wide = [dataclasses.replace(s, size=1000) if isinstance(s, Start) else s for s in PAIR.program]
    module, costs = dataclasses.replace(PAIR, program=wide).module()
    sequence, memory = module.schedule[module.entry], Memory(module)
    tight = Limits(H200, memory.peak(module.entry, sequence), memory)
    found = exact_order(module.entry, sequence, costs, tight, effort=1.0)
    assert memory.peak(module.entry, found.order) <= tight.bytes
    assert found.seconds > 4e-4 * 1.001 > found.bound, "the bound knows nothing of memory"


def test_what_takes_no_time_takes_none() -> None:
    module, costs = build([Op("x", 0.0, ("p",))], ["x"])
    found = exact_order(module.entry, module.schedule[module.entry], costs, unlimited(module), effort=0.1)
    assert (found.seconds, found.bound, found.gap) == (0.0, 0.0, 0.0)


def test_large_bodies_are_refused() -> None:
    module, costs = build([Op(f"x{n}", 1e-6, ("p",)) for n in range(300)], ["x0"])
    with pytest.raises(DhelixError, match="timed instructions; the exact model takes at most 250"):
        exact_order(module.entry, module.schedule[module.entry], costs, unlimited(module))


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    module, costs = PAIR.module()
    with pytest.raises(DhelixError, match="an exact order needs OR-tools: pip install 'dhelix"):
        solve(module, costs)
