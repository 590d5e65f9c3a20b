"""Strand pairing: strands found by data flow, orders of random programs, and the pass."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import Costs, InStep
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import evaluate, simulate
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.strand_pairing import PAIRED_NOTE, StrandPairing, pairing_order, plan_body
from dhelix.passes.ordering.strand_sequences import Body, Operator, Strand, find_strands
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.random_cases import fastest, random_case, unlimited
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, runs_rightly
from dhelix.tests.passes.two_strands import BOTH, FORWARD, PRODUCTS, limits_of, two_strands


def test_what_floats_comes_behind_collectives_or_late() -> None:
    """A weight gradient may run under the next collective of its own strand."""
    lanes = (Lane.COMPUTE, Lane.COMPUTE, Lane.COMM, Lane.COMPUTE)
    chain = [Operator(n, lane, 1.0, needs=frozenset({n - 1} - {-1})) for n, lane in enumerate(lanes)]
    weight = Operator(4, Lane.COMPUTE, 1.0, needs=frozenset({0}))
    strand = Strand((chain[0], weight, *chain[1:]), frozenset({4}))
    assert [[o.number for o in c] for c in strand.candidates()] == [[0, 4, 1, 2, 3], [0, 1, 2, 4, 3], [0, 1, 2, 3, 4]]
    assert Strand(tuple(chain), frozenset()).candidates() == (tuple(chain),) * 3


def strands(program: Program, results: list[str]) -> Body:
    module, costs = build(program, results)
    return find_strands(module.entry, module.schedule[module.entry], costs, limits_of(module))


def names(body: Body, strand: Strand) -> list[str]:
    return [body.heads[o.number].name for o in strand.operators]


def test_strands_share_no_value() -> None:
    body = strands(BOTH, ["f2", "b2"])
    assert names(body, body.first) == ["f1", "fg", "f2"]
    assert names(body, body.second) == ["b1", "bg", "b2"]


def test_a_third_part_goes_with_the_strand_that_takes_less() -> None:
    """Policy and reference take 5 s of compute each, the backward pass 12 s."""
    other = [Op("r1", 1.0, ("p",)), Start("rg", 4.0, "r1"), Done("rg"), Op("r2", 4.0, ("rg_done",))]
    longest = [Op("b1", 8.0, ("p",)), Start("bg", 4.0, "b1"), Done("bg"), Op("b2", 4.0, ("bg_done",))]
    body = strands([*FORWARD, *other, *longest], ["f2", "r2", "b2"])
    assert sorted([sorted(names(body, body.first)), sorted(names(body, body.second))]) == [
        ["b1", "b2", "bg"],
        ["f1", "f2", "fg", "r1", "r2", "rg"],
    ]


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


WRITE = """write {
  acc = f32[8,64,64] parameter(0)
  one = f32[1,64,64] parameter(1)
  slot = s32[] parameter(2)
  zero = s32[] constant(0)
  ROOT put = f32[8,64,64] dynamic-update-slice(acc, one, slot, zero, zero)
}
"""

# Each fusion needs a computation of its own.
SHARED_STACK = f"""HloModule shared_stack, is_scheduled=true
{WRITE.replace("write", "write.1")}
{WRITE.replace("write", "write.2")}
outer {{
  p = (f32[64,64], f32[64,64], f32[8,64,64], s32[]) parameter(0)
  x = f32[64,64] get-tuple-element(p), index=0
  y = f32[64,64] get-tuple-element(p), index=1
  acc = f32[8,64,64] get-tuple-element(p), index=2
  slot = s32[] get-tuple-element(p), index=3
  a = f32[64,64] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  a1 = f32[1,64,64] bitcast(a)
  acc1 = f32[8,64,64] fusion(acc, a1, slot), kind=kLoop, calls=write.1
  b = f32[64,64] dot(y, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  b1 = f32[1,64,64] bitcast(b)
  acc2 = f32[8,64,64] fusion(acc1, b1, slot), kind=kLoop, calls=write.2
  ROOT result = (f32[64,64], f32[64,64], f32[8,64,64], s32[]) tuple(a, b, acc2, slot)
}}"""


def test_a_stack_whose_slots_both_write_ties_nothing() -> None:
    """Two backward passes that overlap accumulate into such a stack. The order of the two writes stays."""
    module = HloModule.from_text(SHARED_STACK)
    body = find_strands(module.entry, module.schedule[module.entry], Costs(H200_NO_P2P), limits_of(module))
    assert [names(body, strand)[0] for strand in (body.first, body.second)] == ["a", "b"]
    order = [i.name for i in body.sequence(range(len(body.operators)))]
    assert order.index("acc1") < order.index("acc2")


def order_names(order: list) -> list[str]:
    return [i.name for i in order if i.name not in ("p", "result")]


def test_the_gather_of_one_strand_lies_under_the_product_of_the_other() -> None:
    module, costs = build(BOTH, ["f2", "b2"])
    order = pairing_order(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    found = order_names(order)
    assert found.index("fg") < found.index("b1") < found.index("fg_done")
    assert found.index("bg") < found.index("f2") < found.index("bg_done")


def test_memory_is_a_hard_limit() -> None:
    """Both gathers in flight at once need more memory than one after the other."""
    wide = [dataclasses.replace(s, size=1000) if isinstance(s, Start) else s for s in BOTH]
    module, costs = build(wide, ["f2", "b2"])
    entry, sequence = module.entry, module.schedule[module.entry]
    tight, roomy = limits_of(module), limits_of(module, 1.0)
    assert roomy.memory.peak(entry, pairing_order(entry, sequence, costs, roomy)) > tight.bytes
    assert tight.memory.peak(entry, pairing_order(entry, sequence, costs, tight)) <= tight.bytes


@settings(deadline=None, max_examples=8)
@given(two_strands(), st.sampled_from([0.0, 0.03, 1.0]))
def test_orders_of_random_programs(drawn: tuple[Program, list[str]], slack: float) -> None:
    """Legal, correct with shared buffers, within memory, and never slower than the list schedule or the given order."""
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


def test_a_router_comes_before_what_could_run_as_well() -> None:
    """A layer with experts and slow communication. The sooner the router's product is done, the sooner the tokens leave
    for their experts, under the compute of the shared expert and the other strand.
    """
    forward = [
        *(Op("attention", 1.0, ("p",)), Op("shared", 6.0, ("attention",)), Op("router", 0.5, ("attention",))),
        *(Start("dispatch", 8.0, "router"), Done("dispatch"), Op("experts", 2.0, ("dispatch_done",))),
        *(Start("combine", 8.0, "experts"), Done("combine"), Op("sum", 1.0, ("combine_done", "shared"))),
    ]
    backward = [
        *(Op("b_experts", 6.0, ("p",)), Start("b_dispatch", 8.0, "b_experts"), Done("b_dispatch")),
        *(Op("b_attention", 3.0, ("b_dispatch_done",)), Op("b_wgrad", 4.0, ("b_experts",))),
    ]
    module, costs = build(forward + backward, ["sum", "b_attention", "b_wgrad"])
    order = [i.name for i in pairing_order(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))]
    assert order[:4] == ["p", "attention", "router", "dispatch"]
    assert order.index("shared") < order.index("dispatch_done") and order.index("b_wgrad") < order.index("combine_done")


@pytest.mark.slow
def test_small_programs_mostly_get_the_fastest_of_all_orders() -> None:
    """The search is a heuristic, so it may miss a few, but it stays within 10 % of the fastest order."""
    draw, fastest_found = random.Random(5), 0
    for _ in range(60):
        module, costs = random_case(draw).module(InStep(pause=3e-6, wait=1e-5))
        order = pairing_order(module.entry, module.schedule[module.entry], costs, unlimited(module))
        taken, least = evaluate(order, costs).seconds, fastest(module, costs)
        assert taken <= 1.1 * least
        fastest_found += taken <= least * (1.0 + 1e-9)
    assert fastest_found >= 55


def test_the_pass_reorders_and_says_what_it_paired() -> None:
    before = HloModule.from_text(PRODUCTS).to_bytes()
    one = StrandPairing(H200_NO_P2P, memory_slack=1.0)
    after, report = PassManager([one], strict=True).run(Stage.POST_SCHEDULER, before)
    assert after is not None and report.passes[0].outcome == CHANGED
    module = HloModule.from_bytes(after)
    order = [i.name for i in module.schedule[module.entry]]
    assert order.index("start") < order.index("backward") < order.index("done") < order.index("forward")
    note = next(n for n in report.passes[0].notes if n.message == PAIRED_NOTE)
    assert note.facts["seconds_paired"] < note.facts["seconds_xla"]
    assert note.facts["seconds_paired"] <= note.facts["seconds_barriers"] * (1.0 + 1e-9)


def test_a_body_without_strands_gets_an_order_too() -> None:
    """A weight gradient moves under the reduce-scatter of its own strand; XLA had put it after that."""
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
