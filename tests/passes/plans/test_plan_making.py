"""A schedule as a plan, and back."""

from dataclasses import replace

import pytest

from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanSegment, PlanTarget
from dhelix.passes.plans.plan_making import make_plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.profiles.profile import Profile, Section
from dhelix.tests.passes import strand_module

# Nothing is measured: roofline times and the hardware's rates, for which overlap pays without peer-to-peer.
MODEL = CostModel(Profile("H200", "no-p2p").with_section(Section("connections1")), "connections1")
TARGET = PlanTarget.of("H200", "no-p2p", "connections1")


def module() -> HloModule:
    return HloModule.from_text(strand_module.text())


def plan() -> tuple[Plan, HloModule]:
    """The plan of the pairing of two strands, and the program in that order."""
    found = module()
    original = dict(found.schedule)
    assert StrandPairing(model=MODEL, memory_slack=1.0).run(found, PassContext())
    return make_plan(found, original, MODEL, Plan("two strands", TARGET)), found


def order(found: HloModule) -> list[str]:
    names = ("_x", "_gather", "_y", "_w")
    return [i.name for i in found.schedule[found.entry] if i.name.endswith(names)]


def seconds(found: HloModule) -> float:
    return simulate_module(found, MODEL.hardware, MODEL.costs()).seconds


def test_a_plan_gives_the_order_it_was_made_of_and_predicts_its_time() -> None:
    made, ordered = plan()
    again = module()
    made = plan_files.loads(plan_files.dumps(made), "a file")
    assert PlannedOrder(made, memory_slack=1.0).run(again, PassContext())
    assert order(again) == order(ordered)
    assert seconds(again) == pytest.approx(seconds(ordered), rel=5e-3)
    assert made.predicted.makespan_us == pytest.approx(1e6 * seconds(ordered), rel=1e-4)
    (body,) = made.bodies
    assert body.predicted_us == pytest.approx(made.predicted.makespan_us, rel=1e-4)
    assert body.runs == 1 and len(body.order) == len(body.operators)


def test_overlap_that_was_never_measured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    made = [plan()[0] for _ in range(2)]
    assert made[0].predicted.guessed_overlap_fraction == 1.0
    (record,) = caplog.records
    assert "no measured pairs for 100% of the time" in record.getMessage()
    assert "H200-no-p2p" in record.getMessage() and "'connections1'" in record.getMessage()


def test_a_segment_begins_where_a_collective_is_launched() -> None:
    (body,) = plan()[0].bodies
    assert all("all-gather" in segment.run[0] for segment in body.segments[1:])
    assert sum(name.endswith(" all-gather") and "end of" not in name for name in body.order) == 2


def test_an_edited_plan_is_another_order_with_another_time() -> None:
    """The strands run one after the other, so no compute hides a gather."""
    made, ordered = plan()
    body = made.bodies[0]
    names = [name for strand in ("beta", "alpha") for name in body.order if name.startswith(strand)]
    names.sort(key=lambda name: (name.startswith("alpha"), name == "alpha wgrad 1"))
    apart = made.with_body(replace(body, segments=tuple(PlanSegment((name,)) for name in names)))
    again = module()
    PlannedOrder(apart, memory_slack=1.0).run(again, PassContext())
    assert order(again) != order(ordered)
    assert seconds(again) > seconds(ordered)


def test_equal_programs_give_equal_plans() -> None:
    assert plan_files.dumps(plan()[0]) == plan_files.dumps(plan()[0])
