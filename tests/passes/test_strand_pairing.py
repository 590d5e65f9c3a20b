"""Strand pairing: the dynamic programming against brute force, strands by data flow, orders of random programs."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.buffers import Memory
from dhelix.passes.collective_schedule import Limits, list_order
from dhelix.passes.costs import Costs, Lane
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.manager import PassManager, Stage
from dhelix.passes.pairing_table import Plan, pair
from dhelix.passes.report import CHANGED
from dhelix.passes.strand_pairing import StrandPairing, pairing_order, plan_body
from dhelix.passes.strand_sequences import Body, Operator, Strand, find_strands
from dhelix.passes.timeline import simulate
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, programs, runs_rightly


def operators(draw: random.Random, count: int, start: int) -> list[Operator]:
    lanes = [Lane.COMPUTE, Lane.COMPUTE, Lane.COMM, Lane.COMM_INTER]
    return [
        Operator(start + n, draw.choice(lanes), float(draw.randint(1, 9)), draw.choice([0.0, 0.5]))
        for n in range(count)
    ]


def segment_cost(draw: random.Random) -> Callable[[Sequence[Operator], Sequence[Operator]], float]:
    """Any time between the busiest lane and everything one after the other; always the same for the same segments."""

    known: dict[tuple[int, ...], float] = {}

    def cost(first: Sequence[Operator], second: Sequence[Operator]) -> float:
        both = (*first, *second)
        key = tuple(o.number for o in both)
        if key not in known:
            busiest = max(sum(o.busy(lane) for o in both) for lane in Lane)
            known[key] = busiest + draw.random() * (sum(o.seconds + o.light for o in both) - busiest)
        return known[key]

    return cost


def brute_force(
    first: Sequence[Operator],
    second: Sequence[Operator],
    cost: Callable[[Sequence[Operator], Sequence[Operator]], float],
    longest: int,
    allowed: Callable[[int, int], bool],
) -> float:
    """The least sum over every way to cut both sequences; infinite if there is none."""

    def rest(i: int, j: int) -> float:
        if (i, j) == (len(first), len(second)):
            return 0.0
        ways = (
            cost(first[i:p], second[j:q]) + rest(p, q)
            for p in range(i, min(i + longest, len(first)) + 1)
            for q in range(j, min(j + longest, len(second)) + 1)
            if (p, q) != (i, j) and allowed(p, q)
        )
        return min(ways, default=math.inf)

    return rest(0, 0)


def test_the_plan_is_as_fast_as_the_fastest_of_all_segmentations() -> None:
    """1,000 instances of up to 5 x 5 operators, a tenth of the states forbidden in half of them."""
    draw = random.Random(0)
    infeasible = 0
    for _ in range(1000):
        first, second = operators(draw, draw.randint(0, 5), 0), operators(draw, draw.randint(1, 5), 9)
        longest, share = draw.randint(1, 3), draw.choice([0.0, 0.1])
        forbidden = {(i, j) for i in range(6) for j in range(6) if draw.random() < share}
        cost = segment_cost(draw)

        def allowed(i: int, j: int, forbidden: set[tuple[int, int]] = forbidden) -> bool:
            return (i, j) not in forbidden

        plan = pair(first, second, cost, longest, allowed)
        least = brute_force(first, second, cost, longest, allowed)
        if least == math.inf:
            assert plan is None
            infeasible += 1
            continue
        assert plan is not None and plan.seconds == pytest.approx(least)
        check_plan(plan, first, second, longest)
    assert 10 < infeasible < 300


def check_plan(plan: Plan, first: Sequence[Operator], second: Sequence[Operator], longest: int) -> None:
    """Segments follow each other, cover both sequences, and add up."""
    i = j = 0
    for segment in plan.segments:
        assert (segment.first[0], segment.second[0]) == (i, j)
        i, j = segment.first[1], segment.second[1]
        assert max(i - segment.first[0], j - segment.second[0]) <= longest
    assert (i, j) == (len(first), len(second))
    assert sum(s.seconds for s in plan.segments) == pytest.approx(plan.seconds)


def test_what_floats_comes_early_or_late() -> None:
    chain = [Operator(n, Lane.COMPUTE, 1.0, needs=frozenset({n - 1} - {-1})) for n in range(3)]
    weight = Operator(3, Lane.COMPUTE, 1.0, needs=frozenset({0}))
    strand = Strand((*chain[:2], weight, chain[2]), frozenset({3}))
    assert [[o.number for o in c] for c in strand.candidates()] == [[0, 1, 3, 2], [0, 3, 1, 2], [0, 1, 2, 3]]
    assert Strand(tuple(chain), frozenset()).candidates() == [tuple(chain)]


FORWARD = [Op("f1", 1.0, ("p",)), Start("fg", 4.0, "f1"), Done("fg"), Op("f2", 4.0, ("fg_done",))]
BACKWARD = [Op("b1", 4.0, ("p",)), Start("bg", 4.0, "b1"), Done("bg"), Op("b2", 1.0, ("bg_done",))]
BOTH = [*FORWARD, *BACKWARD]


def limits_of(module: HloModule, slack: float = 0.0) -> Limits:
    memory = Memory(module)
    peak = memory.peak(module.entry, module.schedule[module.entry])
    return Limits(H200_NO_P2P, int(peak * (1.0 + slack)), memory)


def strands(program: Program, results: list[str]) -> Body:
    module, costs = build(program, results)
    return find_strands(module.entry, module.schedule[module.entry], costs, limits_of(module))


def names(body: Body, strand: Strand) -> list[str]:
    return [body.heads[o.number].name for o in strand.operators]


def test_strands_share_no_value() -> None:
    body = strands(BOTH, ["f2", "b2"])
    assert names(body, body.first) == ["f1", "fg", "f2"]
    assert names(body, body.second) == ["b1", "bg", "b2"]


def test_no_strands_where_a_value_connects_them() -> None:
    for body in (strands([*BOTH, Op("join", 1.0, ("f2", "b2"))], ["join"]), strands(FORWARD, ["f2"])):
        assert len(body.first.operators) == len(body.operators) and not body.second.operators


BODY = """HloModule m, is_scheduled=true
slice {
  q = f32[8,64,64] parameter(0)
  ROOT s = f32[64,64] bitcast(q)
}
ENTRY e {
  p = (f32[64,64], f32[64,64], f32[8,64,64]) parameter(0)
  x = f32[64,64] get-tuple-element(p), index=0
  dx = f32[64,64] get-tuple-element(p), index=1
  w = f32[8,64,64] get-tuple-element(p), index=2
  weight = f32[64,64] fusion(w), kind=kLoop, calls=slice
  tied = (f32[64,64], f32[64,64]) tuple(x, dx)
  x1 = f32[64,64] get-tuple-element(tied), index=0
  dx1 = f32[64,64] get-tuple-element(tied), index=1
  back = f32[64,64] dot(dx1, weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="transpose(jvp())/dot"}
  ahead = f32[64,64] dot(x1, weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jvp()/dot"}
  ROOT result = (f32[64,64], f32[64,64], f32[8,64,64]) tuple(ahead, back, w)
}"""  # noqa: E501


def test_weights_and_tuples_tie_nothing_and_names_say_which_is_forward() -> None:
    module = HloModule.from_text(BODY)
    body = find_strands(module.entry, module.schedule[module.entry], Costs(H200_NO_P2P), limits_of(module))
    assert names(body, body.first) == ["ahead"]
    assert names(body, body.second) == ["weight", "back"]  # the slice goes with its first user
    order = body.sequence([0, 2, 1])
    verify_sequence(module.entry, order)
    assert [i.name for i in order if i.opcode == "dot"] == ["ahead", "back"]


def order_names(order: list) -> list[str]:
    return [i.name for i in order if i.name not in ("p", "result")]


def test_the_gather_of_one_strand_lies_under_the_product_of_the_other() -> None:
    module, costs = build(BOTH, ["f2", "b2"])
    order = pairing_order(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    found = order_names(order)
    assert found.index("fg") < found.index("b1") < found.index("fg_done")
    assert found.index("bg") < found.index("f2") < found.index("bg_done")


def test_memory_is_a_hard_limit() -> None:
    """Both gathers under way at once would need more than one after the other does."""
    wide = [dataclasses.replace(s, size=1000) if isinstance(s, Start) else s for s in BOTH]
    module, costs = build(wide, ["f2", "b2"])
    entry, sequence = module.entry, module.schedule[module.entry]
    tight, roomy = limits_of(module), limits_of(module, 1.0)
    assert roomy.memory.peak(entry, pairing_order(entry, sequence, costs, roomy)) > tight.bytes
    assert tight.memory.peak(entry, pairing_order(entry, sequence, costs, tight)) <= tight.bytes


@st.composite
def two_strands(draw: st.DrawFn) -> tuple[Program, list[str]]:
    """Two random programs, one after the other."""
    program, results = draw(programs())
    other, more = draw(programs())

    def named(value: str) -> str:
        return value if value == "p" else f"z{value}"

    for step in other:
        if isinstance(step, Op):
            program = [
                *program,
                dataclasses.replace(step, name=named(step.name), operands=(*map(named, step.operands),)),
            ]
        elif isinstance(step, Start):
            program = [*program, dataclasses.replace(step, name=named(step.name), operand=named(step.operand))]
        else:
            program = [*program, Done(named(step.start))]
    return program, list(dict.fromkeys([*results, *map(named, more)]))


@settings(deadline=None, max_examples=40)
@given(two_strands(), st.sampled_from([0.0, 0.03, 1.0]))
def test_orders_of_random_programs(drawn: tuple[Program, list[str]], slack: float) -> None:
    """Legal, right where buffers are shared, within memory, never slower than the list schedule or the order given."""
    program, results = drawn
    module, costs = build(program, results)
    limits, entry = limits_of(module, slack), module.entry
    sequence = module.schedule[entry]
    order = pairing_order(entry, sequence, costs, limits)
    verify_sequence(entry, order)
    assert runs_rightly(program, order)
    assert limits.memory.peak(entry, order) <= limits.bytes
    listed = list_order(entry, sequence, costs, limits)
    ours, theirs, given_order = (simulate(entry, o, costs, H200_NO_P2P).seconds for o in (order, listed, sequence))
    assert ours <= min(theirs, given_order)
    again, again_costs = build(program, results)
    twin = pairing_order(again.entry, again.schedule[again.entry], again_costs, limits_of(again, slack))
    assert order_names(twin) == order_names(order)


PRODUCTS = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
ENTRY e {
  x = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  y = bf16[8192,4096] parameter(2)
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(x), calls=gather
  done = bf16[8192,4096] async-done(start)
  forward = bf16[8192,4096] dot(done, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  backward = bf16[8192,4096] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (bf16[8192,4096], bf16[8192,4096]) tuple(forward, backward)
}"""  # noqa: E501


def test_the_pass_reorders_and_says_what_it_paired() -> None:
    before = HloModule.from_text(PRODUCTS).to_bytes()
    one = StrandPairing(H200_NO_P2P, memory_slack=1.0)
    after, report = PassManager([one], strict=True).run(Stage.POST_SCHEDULER, before)
    assert after is not None and report.passes[0].outcome == CHANGED
    module = HloModule.from_bytes(after)
    order = [i.name for i in module.schedule[module.entry]]
    assert order.index("start") < order.index("backward") < order.index("done") < order.index("forward")
    note = next(n for n in report.passes[0].notes if n.message == "two strands")
    assert note.facts["seconds_paired"] < note.facts["seconds_xla"]
    assert note.facts["seconds_paired"] <= note.facts["seconds_barriers"] * (1.0 + 1e-9)


def test_a_body_without_strands_gets_an_order_too() -> None:
    """A weight gradient under the reduce-scatter of its own strand, which XLA put after it."""
    program = [
        Op("b1", 1.0, ("p",)),
        Start("bg", 4.0, "b1"),
        Done("bg"),
        Op("w", 3.0, ("b1",)),
        Op("b2", 1.0, ("bg_done",)),
    ]
    module, costs = build(program, ["w", "b2"])
    plan = plan_body(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    assert plan.strands == 1
    assert order_names(list(plan.order)) == ["b1", "bg", "w", "bg_done", "b2"]


def test_a_segment_holds_something() -> None:
    with pytest.raises(DhelixError, match="max_segment=0"):
        StrandPairing(max_segment=0)
