"""Plans carried out: the planned order if it fits the program, and otherwise a refusal with the reason."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done
from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.framework.report import REFUSED
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.plans.plan import Plan, PlanBody, PlanOperator, PlanSegment
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.passes.plans.planned_order import PlannedOrder, planned_sequence
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, programs, runs_rightly

# Two strands, one after the other in XLA's order; no instruction reads `fw`.
FORWARD = [
    Op("f1", 1.0, ("p",)),
    Start("fg", 4.0, "f1"),
    Done("fg"),
    Op("f2", 4.0, ("fg_done",)),
    Op("fw", 1.0, ("f2",)),
]
BACKWARD = [Op("b1", 4.0, ("p",), 2), Start("bg", 4.0, "b1", 2), Done("bg"), Op("b2", 1.0, ("bg_done",), 2)]
RESULTS = ["f2", "fw", "b2"]


def module_of(program: Program = (*FORWARD, *BACKWARD), results: Sequence[str] = RESULTS) -> HloModule:
    return build(program, results)[0]


def operators_of(module: HloModule) -> PlanOperators:
    return PlanOperators(module.entry, OperatorKeys())


def plan_of(module: HloModule, *segments: Sequence[str]) -> Plan:
    """A plan that names operators by their instructions, as people may do."""
    operators = operators_of(module)
    names = [name for segment in segments for name in segment]
    identities = {i.name: identity for i, identity in operators.identities.items()}
    table = tuple(PlanOperator(name, *identities[name]) for name in names)
    body = PlanBody("body", operators.fingerprint, 1, table, tuple(PlanSegment(tuple(s)) for s in segments))
    return Plan("a program").with_bodies([body])


def run(plan: Plan, module: HloModule, **options: int) -> list[str]:
    PlannedOrder(plan, **options).run(module, PassContext())
    sequence = module.schedule[module.entry]
    verify_sequence(module.entry, sequence)
    return [i.name for i in sequence if i.opcode not in ("parameter", "tuple")]


PAIRED = (["f1", "fg", "b1"], ["bg", "f2"], ["b2"])


def test_operators_run_in_the_order_of_the_plan() -> None:
    module = module_of()
    order = run(plan_of(module, *PAIRED), module)
    assert order == ["f1", "fg", "b1", "bg", "fg_done", "f2", "fw", "bg_done", "b2"]


def test_another_order_of_segments_is_another_order() -> None:
    module = module_of()
    order = run(plan_of(module, ["b1", "bg", "f1"], ["fg", "b2"], ["f2"]), module)
    assert order == ["b1", "bg", "f1", "fg", "bg_done", "b2", "fg_done", "f2", "fw"]


def test_hosts_with_other_plans_do_not_agree() -> None:
    """Before their first step, hosts compare the fingerprints of their passes (`runtime.processes`)."""
    module = module_of()
    plans = [plan_of(module, *PAIRED), plan_of(module, *PAIRED), plan_of(module, *PAIRED[:1])]
    first, same, other = (PassManager([PlannedOrder(plan)]).fingerprint() for plan in plans)
    assert first == same != other


def test_the_schedule_that_it_finds_plays_no_part() -> None:
    """XLA may schedule the same program in another order, but the operators are the same."""
    plan = plan_of(module_of(), *PAIRED)
    other = module_of([*BACKWARD, *FORWARD])
    assert run(plan, other, memory_limit=1000) == run(plan, module_of())


def test_operators_that_the_plan_does_not_name_come_when_they_are_needed() -> None:
    module = module_of()
    assert run(plan_of(module, ["bg", "fg", "f2"]), module) == [
        "b1", "bg", "f1", "fg", "fg_done", "f2", "fw", "bg_done", "b2",
    ]  # fmt: skip


def test_what_is_small_runs_where_the_plan_says_or_when_it_can() -> None:
    module = module_of()
    plan = plan_of(module, *PAIRED)
    fw = next(i for i in module.entry.instructions if i.name == "fw")
    identity = operators_of(module).identities[fw]
    for name, after in (("bg", "f2"), ("b2", "f2"), ("finally", "b2")):  # fw reads f2
        body = replace(plan.bodies[0], small=((name, (identity, ("copy x 1", 1))),))
        order = run(plan.with_body(body), module_of())
        timed = [i for i in order if not i.endswith("_done")]
        assert timed[timed.index("fw") - 1] == after


def test_a_plan_for_another_program() -> None:
    plan = plan_of(module_of(), *PAIRED)
    other = module_of(FORWARD, ["f2", "fw"])
    with pytest.raises(PassRefusal, match="for another program .*dhelix plan"):
        run(plan, other)


def test_bodies_beside_the_first_may_be_missing() -> None:
    plan = plan_of(module_of(), *PAIRED)
    two = plan.with_bodies([*plan.bodies, replace(plan.bodies[0], name="other", fingerprint="0" * 16)])
    context = PassContext()
    assert PlannedOrder(two).run(module_of(), context)
    assert [n.facts["bodies"] for n in context.notes if "not in this program" in n.message] == [["other"]]
    with pytest.raises(PassRefusal, match="lacks the plan's body 'other'"):
        PlannedOrder(two).run(module_of(), PassContext(strict=True))
    with pytest.raises(PassRefusal, match="for another program"):
        run(two.with_bodies(two.bodies[::-1]), module_of())


def test_a_plan_edited_into_a_circle() -> None:
    module = module_of()
    with pytest.raises(PassRefusal, match="runs 'f2' before 'fg', which must come first"):
        run(plan_of(module, ["f1", "f2", "fg"]), module)


def test_an_operator_that_the_program_does_not_have() -> None:
    module = module_of()
    plan = plan_of(module, *PAIRED)
    body = plan.bodies[0]
    gather = next(n for n, o in enumerate(body.operators) if o.name == "fg")
    for change, said in (
        ({"occurrence": 9}, "occurrence 9 of .* has only"),
        ({"key": "all-gather x"}, "none of these"),
    ):
        operators = list(body.operators)
        operators[gather] = replace(operators[gather], **change)
        with pytest.raises(PassRefusal, match=said):
            run(plan.with_body(replace(body, operators=tuple(operators))), module)


def test_a_fusion_that_the_program_does_not_have_is_left_out_and_named() -> None:
    """Sizes of fusions, and what XLA fuses, depend on the number of layers and on the compiler."""
    module = module_of()
    plan = plan_of(module, *PAIRED)
    body = plan.bodies[0]
    assert body.operators[0].name == "f1"
    other = replace(body, operators=(replace(body.operators[0], key="fusion loop-add:0 8"), *body.operators[1:]))
    context = PassContext()
    assert PlannedOrder(plan.with_body(other)).run(module, context)
    assert [n.facts["operators"] for n in context.notes if "not in this program" in n.message] == [["f1"]]
    with pytest.raises(PassRefusal, match="lacks the plan's 'f1'"):
        PlannedOrder(plan.with_body(other)).run(module_of(), PassContext(strict=True))


def test_a_plan_over_the_memory_limit_says_what_would_do() -> None:
    program = [Op("a", 1.0, ("p",), 100), Op("a2", 1.0, ("a",)), Start("c", 1.0, "a2"), Done("c"),
               Op("b", 1.0, ("p",), 100), Op("b2", 1.0, ("b",))]  # fmt: skip
    module = module_of(program, ["a2", "b2", "c_done"])
    plan = plan_of(module, ["a", "b", "a2", "c", "b2"])
    with pytest.raises(PassRefusal, match="the plan needs .* give memory_limit='.*KiB' or more") as refused:
        run(plan, module_of(program, ["a2", "b2", "c_done"]))
    needed = refused.value.facts["needed"]
    assert run(plan, module, memory_limit=needed)[:2] == ["a", "b"]
    allowed = replace(plan, order=replace(plan.order, memory_limit=needed))
    assert run(allowed, module_of(program, ["a2", "b2", "c_done"]))[:2] == ["a", "b"]


def test_a_refused_plan_leaves_the_program_as_it_was() -> None:
    module = module_of()
    before = module.to_bytes()
    manager = PassManager([PlannedOrder(plan_of(module, ["f1", "f2", "fg"]))])
    after, report = manager.run(Stage.POST_SCHEDULER, before)
    assert after is None and report.passes[0].outcome == REFUSED


@given(programs(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_any_order_of_operators_is_legal_or_refused(
    given_program: tuple[Program, list[str]], draw: random.Random
) -> None:
    program, results = given_program
    module = module_of(program, results)
    sequence = module.schedule[module.entry]
    heads = [i for i in sequence if i.opcode not in ("parameter", "tuple") and not is_done(i)]
    draw.shuffle(heads)
    chosen = heads[: draw.randint(0, len(heads))]
    try:
        order = planned_sequence(module.entry, sequence, {h: h.name for h in chosen}, Memory(module))
    # The order is not legal here, but may be in other computations of the body: move operators that must come first.
    except PassRefusal:
        order = planned_sequence(module.entry, sequence, {h: h.name for h in chosen}, Memory(module), exactly=False)
        verify_sequence(module.entry, order)
        assert runs_rightly(program, order)
        return
    verify_sequence(module.entry, order)
    assert runs_rightly(program, order)
    assert [i for i in order if i in set(chosen)] == chosen


@given(programs())
@settings(max_examples=40, deadline=None)
def test_the_order_of_a_schedule_is_what_a_plan_of_it_gives(given_program: tuple[Program, list[str]]) -> None:
    module = module_of(*given_program)
    sequence: list[Instruction] = module.schedule[module.entry]
    heads = [i for i in sequence if i.opcode not in ("parameter", "tuple") and not is_done(i)]
    order = planned_sequence(module.entry, sequence, {h: h.name for h in heads}, Memory(module))
    assert [i for i in order if i in set(heads)] == heads
