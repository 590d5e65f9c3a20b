"""Predictions of a plan next to the measured times of its segments. The evaluator makes the executions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.collectives import is_start
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.plans.plan_making import make_plan
from dhelix.profiles.profile import Profile, Section
from dhelix.runtime.profiling.measured_plan import of_executions, of_trace, segment_seconds
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.module_executions import by_instruction
from dhelix.tests.passes import strand_module
from dhelix.tests.runtime.profiling import recorded_traces as traces
from dhelix.tests.runtime.profiling.recorded_traces import execution

MODEL = CostModel(Profile("H200", "no-p2p").with_section(Section("default")))

WAITS = """\
HloModule m, is_scheduled=true

ENTRY main {
  x = f32[8]{0} parameter(0)
  one = f32[8]{0} custom-call(x), custom_call_target="product"
  gather-start = (f32[8]{0}, f32[16]{0}) all-gather-start(one), replica_groups={{0,1}}, dimensions={0}
  two = f32[8]{0} custom-call(one), custom_call_target="product"
  gather-start.2 = (f32[8]{0}, f32[16]{0}) all-gather-start(two), replica_groups={{0,1}}, dimensions={0}
  gather-done = f32[16]{0} all-gather-done(gather-start)
  three = f32[8]{0} custom-call(gather-done), custom_call_target="product"
  gather-done.2 = f32[16]{0} all-gather-done(gather-start.2)
  ROOT out = (f32[8]{0}, f32[16]{0}) tuple(three, gather-done.2)
}
"""


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, HloModule]:
    module = HloModule.from_text(strand_module.text())
    original = dict(module.schedule)
    StrandPairing(model=MODEL, memory_slack=1.0).run(module, PassContext())
    return make_plan(module, original, MODEL, Plan("two strands", PlanTarget.of("H200", "no-p2p", "default"))), module


def executions(module: HloModule, iterations: int, stretched: float = 1.0) -> list[Execution]:
    """Executions of several iterations as the evaluator predicts them; all times are multiplied by `stretched`."""
    timeline = evaluate(module.schedule[module.entry], MODEL.costs())
    return [
        Execution(
            i.instruction, stretched * (n * timeline.seconds + i.start), stretched * (n * timeline.seconds + i.end)
        )
        for n in range(iterations)
        for i in timeline.intervals
    ]


@pytest.mark.parametrize("iterations", [1, 5])
def test_a_step_that_runs_as_predicted_is_measured_so(planned: tuple[Plan, HloModule], iterations: int) -> None:
    plan, module = planned
    (body,) = of_executions(plan, module, executions(module, iterations, stretched=1.5)).bodies
    measured = [s.measured_us for s in body.segments]
    assert all(m is not None for m in measured)
    assert sum(m or 0.0 for m in measured) == pytest.approx(1.5 * body.predicted_us, rel=0.01)
    for segment in body.segments[:-1]:  # launches come before starts, by the time that the running operators take
        assert segment.measured_us == pytest.approx(1.5 * segment.predicted_us, rel=0.1)
    assert body.order == plan.bodies[0].order


def test_a_wait_belongs_to_the_segment_that_waits() -> None:
    module = HloModule.from_text(WAITS)
    (entry,) = module.schedule
    starts = [i for i in entry.instructions if is_start(i)]
    found = [
        execution("one", 0, 10),
        execution("gather-start", 10, 50),
        execution("two", 12, 20),
        execution("gather-start.2", 50, 80),
        execution("three", 55, 70),
    ]
    (seconds,) = segment_seconds(entry, starts, by_instruction(module, found), sorted(e.end for e in found))
    assert seconds == {0: pytest.approx(20e-6), 1: pytest.approx(60e-6)}


def test_what_the_trace_tore_apart_is_left_out(planned: tuple[Plan, HloModule]) -> None:
    plan, module = planned
    whole = executions(module, 3)
    name = next(e.name for e in whole[len(whole) // 6 :] if "start" not in e.name)
    parts = [
        half
        for e in whole
        for half in ([replace(e, end=e.start + e.seconds / 3), replace(e, start=e.end)] if e.name == name else [e])
    ]
    (body,) = of_executions(plan, module, parts).bodies
    assert sum(s.measured_us or 0.0 for s in body.segments) == pytest.approx(body.predicted_us, rel=0.01)


def test_without_compute_in_the_trace_nothing_is_measured(planned: tuple[Plan, HloModule]) -> None:
    plan, module = planned
    starts = [i.name for i in module.entry.instructions if is_start(i)]
    seen = [e for e in executions(module, 3) if e.name in starts]
    assert all(s.measured_us is None for s in of_executions(plan, module, seen).bodies[0].segments)


def test_another_program_is_refused(planned: tuple[Plan, HloModule]) -> None:
    other = HloModule.from_text("HloModule m, is_scheduled=true\nENTRY e { ROOT p = f32[] parameter(0) }")
    with pytest.raises(PassRefusal, match="for another program"):
        of_executions(planned[0], other, [])


def recorded(
    folder: Path, modules: Sequence[HloModule], ran: HloModule, gpu: int = 0, renamed: str | None = None
) -> Path:
    """A trace of three steps of `ran`, which take 1.5 times as long as predicted, on two streams."""
    found = executions(ran, 3, stretched=1.5)
    kernels = [
        traces.kernel(1 + ("start" in e.name), 1e6 * e.start, 1e6 * e.end, renamed or e.name, ran.name) for e in found
    ]
    folder.mkdir()
    file = folder / "host.xplane.pb"
    file.write_bytes(traces.serialized({gpu: kernels}, modules))
    return file


def test_a_trace_is_enough(planned: tuple[Plan, HloModule], tmp_path: Path) -> None:
    plan, module = planned
    other = HloModule.from_text("HloModule other, is_scheduled=true\nENTRY e { ROOT p = f32[] parameter(0) }")
    measured = of_trace(plan, recorded(tmp_path / "t", [other, module], module))
    (body,) = measured.plan.bodies
    assert body.measured_us == pytest.approx(1.5 * body.predicted_us, rel=0.01)
    assert measured.steps == 3
    assert 0.0 < measured.report.hidden_share < 1.0


def test_of_programs_of_one_name_the_one_that_ran_counts(planned: tuple[Plan, HloModule], tmp_path: Path) -> None:
    plan, module = planned
    renamed = HloModule.from_bytes(module.to_bytes())
    for instruction in renamed.entry.instructions:
        instruction.proto.name += ".x"
    measured = of_trace(plan, recorded(tmp_path / "t", [renamed, module], module))
    assert measured.plan.bodies[0].measured_us is not None


def test_traces_that_say_nothing_of_the_plan(planned: tuple[Plan, HloModule], tmp_path: Path) -> None:
    plan, module = planned
    other = HloModule.from_text("HloModule other, is_scheduled=true\nENTRY e { ROOT p = f32[] parameter(0) }")
    with pytest.raises(
        DhelixError, match="no program in the trace has the plan's loop bodies .* the trace holds other"
    ):
        of_trace(plan, recorded(tmp_path / "a", [other], module))
    with pytest.raises(DhelixError, match="xla_gpu_enable_command_buffer="):
        of_trace(plan, recorded(tmp_path / "b", [module], module, renamed="command_buffer"))
