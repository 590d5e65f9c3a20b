"""Which orders are taken: memory is a hard limit, the required gain, and computations that call others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule, list_order
from dhelix.passes.ordering.order_rules import apply_order, most_in_flight
from dhelix.passes.ordering.strand_pairing import StrandPairing, pairing_order
from dhelix.profiles.hardware import H200, H200_NO_P2P
from dhelix.tests.passes.schedules import Program, build, runs_rightly
from dhelix.tests.passes.two_strands import TOGETHER, limits_of, two_strands

# `wide` is made long before it is read; a gather could run under `x`.
WASTEFUL = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
ENTRY e {
  p = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  wide = bf16[4096,4096] dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(p), calls=gather
  done = bf16[8192,4096] async-done(start)
  small = bf16[4096] reduce-precision(done), exponent_bits=8, mantissa_bits=7
  late = bf16[2048,4096] dot(p, wide), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (bf16[4096], bf16[2048,4096]) tuple(small, late)
}"""  # noqa: E501
PASSES = (CollectiveSchedule, StrandPairing)


def peak(module: HloModule) -> int:
    return Memory(module).needed(module)


@pytest.mark.parametrize("one", PASSES)
def test_a_limit_that_nothing_meets_is_refused_with_one_that_would_do(one: type) -> None:
    module = HloModule.from_text(WASTEFUL)
    before = list(module.schedule[module.entry])
    with pytest.raises(PassRefusal, match="limit of 1,000 B, .* the smallest needs ") as error:
        one(H200_NO_P2P, memory_limit=1000).run(module, PassContext())
    assert module.schedule[module.entry] == before
    enough = error.value.facts["needed"]
    assert enough < peak(module)
    assert one(H200_NO_P2P, memory_limit=enough).run(module, PassContext())
    assert peak(module) <= enough


@pytest.mark.parametrize("one", PASSES)
def test_an_order_below_what_xla_needs_is_taken_although_it_is_slower(one: type) -> None:
    module = HloModule.from_text(WASTEFUL)
    needed = peak(module)
    assert one(H200_NO_P2P, memory_limit=needed - 1).run(module, PassContext())
    assert peak(module) < needed


LOOP = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
body {
  s = (s32[], bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  p = bf16[2048,4096] get-tuple-element(s), index=1
  w = bf16[4096,4096] get-tuple-element(s), index=2
  one = s32[] constant(1)
  n = s32[] add(i, one)
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(p), calls=gather
  done = bf16[8192,4096] async-done(start)
  v = bf16[8192,4096] dot(done, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  part = bf16[2048,4096] slice(v), slice={[0:2048], [0:4096]}
  more = bf16[4096,4096] dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = (s32[], bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) tuple(n, part, w, more)
}
condition {
  s = (s32[], bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  four = s32[] constant(4)
  ROOT less = pred[] compare(i, four), direction=LT
}
ENTRY e {
  p = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  zero = s32[] constant(0)
  state = (s32[], bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) tuple(zero, p, w, w)
  loop = (s32[], bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) while(state), condition=condition, body=body
  out = bf16[2048,4096] get-tuple-element(loop), index=1
  HEAD
}"""  # noqa: E501


def loop(head: str) -> HloModule:
    return HloModule.from_text(LOOP.replace("HEAD", head))


def test_a_body_may_use_what_its_callers_leave() -> None:
    """If the step's peak is elsewhere, the body may use more memory than it does now."""
    alone = loop("ROOT r = bf16[2048,4096] bitcast(out)")
    beside = loop(
        "big = bf16[65536,4096] broadcast(zero), dimensions={}\n"
        "  ROOT r = (bf16[2048,4096], bf16[65536,4096]) tuple(out, big)"
    )
    limits = []
    for module in (alone, beside):
        memory = Memory(module)
        body = next(c for c in module.computations if c.name == "body")
        inside = memory.beside(body) + memory.peak(body, module.schedule[body])
        limits.append(peak(module) - memory.arguments - inside)
        assert memory.beside(module.entry) == 0
    assert limits[0] == 0
    assert limits[1] > 65536 * 4096


def test_a_gain_counts_against_a_computations_own_time() -> None:
    """The entry's own time excludes the loop, whose order is already final."""
    module = loop(
        "begin = ((bf16[2048,4096]), bf16[8192,4096]) async-start(out), calls=gather\n"
        "  end = bf16[8192,4096] async-done(begin)\n"
        "  last = bf16[4096,4096] dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT r = (bf16[8192,4096], bf16[4096,4096]) tuple(end, last)"
    )
    context = PassContext()
    assert apply_order(module, context, list_order, Costs(H200), memory_slack=1.0, min_gain=0.03)
    facts = next(n.facts for n in context.notes if n.facts["computation"] == "e")
    assert 0.97 * facts["seconds_before"] < facts["seconds_after"] < facts["seconds_before"]
    order = [i.name for i in module.schedule[module.entry]]
    assert order.index("begin") < order.index("last") < order.index("end")


@pytest.mark.parametrize("one", PASSES)
def test_no_more_collectives_are_in_flight_than_allowed_even_if_that_is_slower(one: type) -> None:
    module, costs = HloModule.from_text(TOGETHER), Costs(H200_NO_P2P)
    assert most_in_flight(module.schedule[module.entry], costs) == 2
    context = PassContext()
    assert one(H200_NO_P2P, memory_slack=1.0, max_in_flight=1).run(module, context)
    assert most_in_flight(module.schedule[module.entry], costs) == 1
    assert context.notes[-1].facts["seconds_after"] > context.notes[-1].facts["seconds_before"]
    free = HloModule.from_text(TOGETHER)
    one(H200_NO_P2P, memory_slack=1.0, max_in_flight=2).run(free, PassContext())
    assert most_in_flight(free.schedule[free.entry], costs) == 2


def test_the_manager_leaves_a_refused_module_alone() -> None:
    source = HloModule.from_text(WASTEFUL).to_bytes()
    after, report = PassManager([StrandPairing(H200_NO_P2P, memory_limit=1000)]).run(Stage.POST_SCHEDULER, source)
    assert after is None
    assert "the smallest needs" in str(report.passes[0].notes[-1])


@settings(deadline=None, max_examples=15)
@given(two_strands(), st.randoms(use_true_random=False))
def test_side_effects_and_control_dependencies_keep_their_order(
    drawn: tuple[Program, list[str]], draw: random.Random
) -> None:
    """All schedulers must keep these orders, and the order of values that share a buffer."""
    program, results = drawn
    module, costs = build(program, results)
    sequence = module.schedule[module.entry]
    for number, instruction in enumerate(sequence[1:], 1):
        if instruction.opcode == "custom-call" and draw.random() < 0.3:
            instruction.proto.custom_call_has_side_effect = True
        if draw.random() < 0.2:
            instruction.control_predecessors = [draw.choice(sequence[:number])]
    effects = [i for i in sequence if has_side_effect(i)]
    for order in (list_order, pairing_order):
        found = order(module.entry, sequence, costs, limits_of(module, 1.0))
        verify_sequence(module.entry, found)
        assert [i for i in found if has_side_effect(i)] == effects
        assert runs_rightly(program, found)
