"""A good module, broken in one way at a time: each rule names the instruction that breaks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dhelix.passes.hlo import Builder, HloModule, HloVerifyError, Instruction, schema, shapes, verify
from dhelix.passes.hlo.edit import copy_computation
from dhelix.passes.hlo.verify import same_signature, verify_sequence
from dhelix.tests.passes.hlo.modules import VECTOR, base

GOOD = """HloModule good, is_scheduled=true
add {
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT add = f32[] add(left, right)
}
body {
  state = (s32[], f32[4]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  value = f32[4] get-tuple-element(state), index=1
  ROOT next = (s32[], f32[4]) tuple(count, value)
}
condition {
  tested = (s32[], f32[4]) parameter(0)
  counter = s32[] get-tuple-element(tested), index=0
  ROOT less = pred[] compare(counter, counter), direction=LT
}
function {
  given = f32[4] parameter(0)
  ROOT negated = f32[4] negate(given)
}
fused {
  part = f32[4] parameter(0)
  ROOT sine = f32[4] sine(part)
}
yes {
  taken = f32[4] parameter(0)
  ROOT cosine = f32[4] cosine(taken)
}
no {
  ROOT left_alone = f32[4] parameter(0)
}
ENTRY main {
  x = f32[4] parameter(0)
  n = s32[] parameter(1)
  zero = f32[] constant(0)
  sum = f32[] reduce(x, zero), dimensions={0}, to_apply=add
  init = (s32[], f32[4]) tuple(n, x)
  loop = (s32[], f32[4]) while(init), condition=condition, body=body
  element = f32[4] get-tuple-element(loop), index=1
  called = f32[4] call(element), to_apply=function
  fusion = f32[4] fusion(called), kind=kLoop, calls=fused
  flag = pred[] compare(n, n), direction=EQ
  branch = f32[4] conditional(flag, fusion, fusion), true_computation=yes, false_computation=no
  pair = (f32[4], s32[]) tuple(branch, n)
  fence = (f32[4], s32[]) opt-barrier(pair)
  out = f32[4] get-tuple-element(fence), index=0, control-predecessors={sum}
  outer = f32[] dot(out, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT result = (f32[4], f32[]) tuple(out, sum)
}
"""


class Good:
    """The good module, with its instructions and computations by name."""

    def __init__(self) -> None:
        self.module = HloModule.from_text(GOOD)
        self.computation = {c.name: c for c in self.module.computations}
        self.instruction = {i.name: i for c in self.module.computations for i in c.instructions if i.name != "add"}

    def __getitem__(self, name: str) -> Instruction:
        return self.instruction[name]

    def sequence(self, *names: str) -> None:
        self.module.schedule[self.module.entry] = [self[n] for n in names]


def test_a_good_module_verifies_before_and_after_a_round_trip() -> None:
    good = Good().module
    verify(good)
    verify(good.clone())


def move_to_end(good: Good, name: str) -> None:
    instructions = good[name].computation.instructions
    instructions.remove(good[name])
    instructions.append(good[name])


def resize(good: Good, name: str) -> None:
    good[name].shape.CopyFrom(schema.Shape(element_type=shapes.F32, dimensions=[5]))


def set_operands(good: Good, name: str, *operands: str) -> None:
    good[name].operands = [good[o] for o in operands]


def set_called(good: Good, name: str, *called: str) -> None:
    good[name].called = [good.computation[c] for c in called]


def adopt(good: Good) -> None:
    good["zero"].computation = good.computation["body"]


def shared_loop(good: Good) -> None:
    builder = Builder(good.module.entry)
    again = builder.make("while", good["loop"].shape, [good["init"]], name="again", called=good["loop"].called)
    again.proto.metadata.op_name = "again"


def renumber(good: Good) -> None:
    good["n"].proto.parameter_number = 2


def lose_root(good: Good) -> None:
    good.module.entry.root = good["negated"]


def lose_entry(good: Good) -> None:
    good.module.computations.remove(good.module.entry)


def rename(good: Good, name: str, other: str) -> None:
    good[name].proto.name = other


def index(good: Good, name: str, value: int) -> None:
    good[name].proto.tuple_index = value


def body_of_another_shape(good: Good) -> None:
    good.computation["body"].root = good["value"]


def numeric_condition(good: Good) -> None:
    good.computation["condition"].root = good["counter"]


def name_twice(good: Good) -> None:
    good.computation["yes"].proto.name = "no"


def unscheduled_body(good: Good) -> None:
    del good.module.schedule[good.computation["body"]]


def unscheduled_entry(good: Good) -> None:
    del good.module.schedule[good.module.entry]


RULES: dict[str, tuple[Callable[[Good], None], str]] = {
    "operand after its user": (
        lambda g: move_to_end(g, "flag"),
        r"branch .*reads flag, which is not before it in main",
    ),
    "operand of another computation": (lambda g: set_operands(g, "called", "given"), r"called .*reads given"),
    "control predecessor too late": (
        lambda g: g["loop"].control_predecessors.append(g["branch"]),
        r"loop .*must follow branch, which is not before it in main",
    ),
    "instruction of another computation": (adopt, r"zero .*belongs to another"),
    "instruction twice": (lambda g: g.module.entry.instructions.append(g["out"]), r"out .*twice"),
    "name of another instruction": (
        lambda g: rename(g, "flag", "count"),
        r"count \(compare\) in main: .*taken",
    ),
    "name of another computation": (name_twice, r"computation no: .*taken"),
    "callee after its caller": (lambda g: g.module.computations.reverse(), r"calls .*not before main"),
    "body of two loops": (shared_loop, r"again.*shares body with loop"),
    "root of another computation": (lose_root, r"root of main"),
    "no entry": (lose_entry, r"entry computation main"),
    "parameter numbers": (renumber, r"parameters of main are numbered \[0, 2\]"),
    "element outside the tuple": (lambda g: index(g, "element", 7), r"element .*element 7 of a tuple of 2"),
    "element of an array": (lambda g: set_operands(g, "out", "x"), r"out .*of a tuple of 0"),
    "element of another shape": (lambda g: index(g, "out", 1), r"out .*s32\[\] where f32\[4\]"),
    "element without operand": (lambda g: set_operands(g, "out"), r"out .*0 operands, not 1"),
    "tuple too short": (lambda g: set_operands(g, "result", "out"), r"result .*1 operands"),
    "tuple of other shapes": (lambda g: set_operands(g, "result", "out", "n"), r"result .*operand n is s32"),
    "loop without condition": (
        lambda g: set_called(g, "loop", "body"),
        r"loop .*calls 1 computations, not 2",
    ),
    "loop from another state": (lambda g: set_operands(g, "loop", "x"), r"loop .*initial state is f32\[4\]"),
    "body that takes another state": (
        lambda g: set_called(g, "loop", "function", "condition"),
        r"loop .*function",
    ),
    "body that returns another state": (body_of_another_shape, r"loop .*result of body is f32\[4\]"),
    "condition that is no predicate": (numeric_condition, r"loop .*condition returns no predicate"),
    "call without callee": (lambda g: set_called(g, "called"), r"called .*calls 0 computations, not 1"),
    "call with too few arguments": (lambda g: set_operands(g, "called"), r"called .*0 arguments for 1"),
    "call with another argument": (
        lambda g: set_operands(g, "called", "n"),
        r"called .*n for function is s32",
    ),
    "call of another result": (lambda g: resize(g, "called"), r"called .*result of function is f32\[4\]"),
    "fusion of another result": (lambda g: resize(g, "fusion"), r"fusion .*result of fused is f32\[4\]"),
    "branches without argument": (
        lambda g: set_operands(g, "branch", "flag", "x"),
        r"branch .*1 arguments for 2",
    ),
    "branch with another argument": (
        lambda g: set_operands(g, "branch", "flag", "x", "n"),
        r"branch .*n for no is s32",
    ),
    "product of one": (lambda g: set_operands(g, "outer", "x"), r"outer .*1 operands but needs at least 2"),
    "product over a dimension that is not there": (
        lambda g: set_operands(g, "outer", "x", "sum"),
        r"outer .*dimensions \[0\] of f32\[\]",
    ),
    "barrier of another shape": (lambda g: set_operands(g, "fence", "x"), r"fence .*its operand is f32\[4\]"),
    "body without schedule": (unscheduled_body, r"loop \(while\) runs body, which has no schedule"),
    "entry without schedule": (unscheduled_entry, r"the module runs main, which has no schedule"),
    "schedule too short": (lambda g: g.sequence("x", "n"), r"schedule of main lacks zero"),
    "schedule with one twice": (lambda g: g.sequence("x", "n", "n"), r"schedule of main holds n twice"),
    "schedule before an operand": (lambda g: g.sequence("x", "init"), r"main: init runs before n"),
    "schedule before a predecessor": (
        lambda g: g.sequence(
            *("x", "n", "zero", "init", "loop", "element", "called", "fusion", "flag", "branch", "pair"),
            *("fence", "out", "sum", "outer", "result"),
        ),
        r"main: out runs before sum",
    ),
    "schedule of something else": (
        lambda g: g.sequence("x", "given"),
        r"main holds given, which is not in it",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_names_the_instruction(rule: str) -> None:
    good = Good()
    damage, message = RULES[rule]
    damage(good)
    with pytest.raises(HloVerifyError, match=message):
        verify(good.module)


def test_a_schedule_that_still_holds_what_was_removed() -> None:
    good = Good()
    entry = good.module.entry
    sequence = list(good.module.schedule[entry])
    entry.instructions.remove(good["result"])
    entry.root = good["out"]
    with pytest.raises(HloVerifyError, match="holds result, which is not in it"):
        verify_sequence(entry, sequence)


def test_a_copy_of_a_scheduled_loop_is_scheduled() -> None:
    good = Good()
    good["loop"].called = [copy_computation(c) for c in good["loop"].called]
    assert "has no schedule" not in good.module.to_text()
    verify(good.module)


def test_signatures_compare_shapes_and_no_more() -> None:
    other = base()
    assert same_signature(base(), other)
    other.entry.root.proto.metadata.op_name = "changed"
    assert same_signature(base(), other)
    Builder(other.entry).parameter(1, VECTOR)
    assert not same_signature(base(), other)
    assert not same_signature(base(), Good().module)
