"""The walk over everything that executes: how often, in which order, and through which callers."""

import pytest

from dhelix.passes.analysis.execution import counted_trips, executions, instructions, once, places, visits
from dhelix.passes.hlo import HloModule

TEXT = """HloModule m, is_scheduled=true
inner { a = s32[] parameter(0) ROOT b = s32[] copy(a) }
other { a = s32[] parameter(0) ROOT n = s32[] negate(a) }
condition { c = (s32[]) parameter(0) g = s32[] get-tuple-element(c), index=0 n = s32[] constant(6)
  ROOT r = pred[] compare(g, n), direction=LT }
body { s = (s32[]) parameter(0) i = s32[] get-tuple-element(s), index=0 one = s32[] constant(1)
  j = s32[] add(i, one) k = s32[] call(j), to_apply=inner l = s32[] call(k), to_apply=inner ROOT t = (s32[]) tuple(j) }
ENTRY e { z = s32[] constant(0) u = (s32[]) tuple(z) w = (s32[]) while(u), condition=condition, body=body
  o = s32[] get-tuple-element(w), index=0
  ROOT d = s32[] conditional(o, o, o), branch_computations={inner, other} }
"""


@pytest.fixture
def module() -> HloModule:
    return HloModule.from_text(TEXT)


def test_how_often_computations_run(module: HloModule) -> None:
    """All branches of a conditional count; the condition of a loop does not."""
    found = {computation.name: count for computation, count in executions(module).items()}
    assert found == {"e": 1, "body": 6, "inner": 13, "other": 1}


def test_places_know_what_leads_to_them(module: HloModule) -> None:
    found = [(v.computation.name, v.count, [i.name for i in v.through]) for v in visits(module.entry)]
    assert found == [
        ("e", 1, []), ("body", 6, ["w"]), ("inner", 6, ["w", "k"]), ("inner", 6, ["w", "l"]), ("inner", 1, ["d"]),
        ("other", 1, ["d"]),
    ]  # fmt: skip


def test_each_computation_has_one_place_with_all_its_runs(module: HloModule) -> None:
    found = [(v.computation.name, v.count, [i.name for i in v.through]) for v in places(module)]
    assert found == [("e", 1, []), ("body", 6, ["w"]), ("inner", 13, ["w", "k"]), ("other", 1, ["d"])]


def test_instructions_come_in_the_order_in_which_they_run(module: HloModule) -> None:
    names = [i.name.partition(".")[0] for i, _ in instructions(module.entry)]
    assert names == "z u w s i one j k a b l a b t o d a b a n".split()


def test_each_computation_once(module: HloModule) -> None:
    found = [v.computation.name for v in visits(module.entry, once(lambda control: control.called))]
    assert found == ["e", "body", "inner", "condition", "other"]


def test_a_loop_of_unknown_length_counts_once(module: HloModule) -> None:
    open_ended = HloModule.from_text(TEXT.replace("z = s32[] constant(0)", "z = s32[] parameter(0)"))
    assert executions(open_ended)[next(c for c in open_ended.computations if c.name == "body")] == 1
    (loop,) = (i for i in open_ended.entry.instructions if i.opcode == "while")
    assert counted_trips(loop) == 1
