"""Redundant sharding constraints, on small HLO modules; tests of whole steps are in tests/runtime/test_meshes.py."""

import re

import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.strands.microbatches.constraint_folding import fold_constraints


def constraint(name: str, shape: str, operand: str, *split: str, unreduced: str = "") -> str:
    axes = ", ".join(f'{{\\"{axis}\\"}}' if axis else "{}" for axis in split)
    still_open = f', unreduced={{\\"{unreduced}\\"}}' if unreduced else ""
    attributes = f'frontend_attributes={{xla.sdy.sharding="#sdy.sharding_per_value<[<@mesh, [{axes}]{still_open}>]>"}}'
    attributes += ", custom_call_has_side_effect=true" if unreduced else ""
    return f'  {name} = {shape} custom-call({operand}), custom_call_target="Sharding", {attributes}\n'


STACK = "f32[4,8,16]"
BODY = f"""HloModule m
write {{ stack = {STACK} parameter(0)
  row = f32[8,16] parameter(1)
  l = s32[] parameter(2)
  zero = s32[] constant(0)
  slot = f32[1,8,16] reshape(row)
{constraint("slot_c", "f32[1,8,16]", "slot", "", "dp", "tp")}
  new = {STACK} dynamic-update-slice(stack, slot_c, l, zero, zero)
{constraint("ROOT new_c", STACK, "new", "", "dp", "tp")}}}
body {{ state = (s32[], f32[8,16], {STACK}) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  x = f32[8,16] get-tuple-element(state), index=1
  stack = {STACK} get-tuple-element(state), index=2
  zero = s32[] constant(0)
  one = s32[] constant(1)
{constraint("l_c", "s32[]", "l")}  next = s32[] add(l_c, one)
  part = f32[1,8,16] dynamic-slice(stack, l, zero, zero), dynamic_slice_sizes={{1,8,16}}
{constraint("part_c", "f32[1,8,16]", "part", "", "dp", "tp")}  row = f32[8,16] reshape(part_c)
{constraint("row_c", "f32[8,16]", "row", "dp", "tp")}  y = f32[8,16] multiply(x, row_c)
{constraint("y_c", "f32[8,16]", "y", "dp", "tp")}
{constraint("y_again", "f32[8,16]", "y_c", "dp", "tp")}
  new = {STACK} call(stack, y_again, l), to_apply=write
{constraint("new_c", STACK, "new", "", "dp", "tp")}
  ROOT result = (s32[], f32[8,16], {STACK}) tuple(next, y_again, new_c) }}
condition {{ state = (s32[], f32[8,16], {STACK}) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  four = s32[] constant(4)
  ROOT more = pred[] compare(l, four), direction=LT }}
ENTRY e {{ x = f32[8,16] parameter(0)
  zero = s32[] constant(0)
  nothing = f32[] constant(0)
  zeros = {STACK} broadcast(nothing), dimensions={{}}
{constraint("start", STACK, "zeros", "", "dp", "tp")}{constraint("x_c", "f32[8,16]", "x", "dp", "tp")}
  state = (s32[], f32[8,16], {STACK}) tuple(zero, x_c, start)
  loop = (s32[], f32[8,16], {STACK}) while(state), condition=condition, body=body
  stack = {STACK} get-tuple-element(loop), index=2
{constraint("ROOT stack_c", STACK, "stack", "", "dp", "tp")}}}
"""


def left(text: str) -> list[str]:
    module = HloModule.from_text(text)
    before = module.to_text().count('"Sharding"')
    count = fold_constraints(module)
    after = module.to_text()  # also verifies it
    found = [i.name for c in module.computations for i in c.instructions if i.proto.custom_call_target == "Sharding"]
    assert len(found) == before - count and len(found) == after.count('"Sharding"')
    return sorted(found)


def test_what_starts_a_loops_state_says_it_for_all_that_moves_it() -> None:
    assert left(BODY) == ["start", "x_c", "y_c"]


@pytest.mark.parametrize(
    ("name", "shape", "operand", "split", "stay"),
    [
        ("row_c", "f32[8,16]", "row", ("dp", ""), {"row_c"}),  # the row is gathered before its use
        ("row_c", "f32[8,16]", "row", ("tp", "dp"), {"row_c"}),
        ("y_c", "f32[8,16]", "y", ("", "tp"), {"y_c", "y_again"}),  # the constraint says where a sum is taken
        ("start", STACK, "zeros", ("", "", "tp"), {"start", "part_c", "new_c", "stack_c"}),
    ],
)
def test_what_says_something_stays(name: str, shape: str, operand: str, split: tuple[str, ...], stay: set[str]) -> None:
    line = next(line for line in BODY.splitlines(keepends=True) if re.match(rf"  {name} = ", line))
    assert stay <= set(left(BODY.replace(line, constraint(name, shape, operand, *split))))


def test_accumulators_are_split_as_they_start_and_what_layers_hand_on_keeps_its_constraint() -> None:
    line = next(line for line in BODY.splitlines(keepends=True) if line.startswith("  y_again"))
    adding = BODY.replace(line, "").replace("y_again", "y").replace("tuple(next, y,", "tuple(next, y_c,")
    assert "y_c" not in left(adding)  # x is read once
    other = constraint("row_c", "f32[8,16]", "row", "", "tp")
    line = next(line for line in adding.splitlines(keepends=True) if line.startswith("  row_c"))
    assert "y_c" in left(adding.replace(line, other))  # the added value is split differently
    handing_on = adding.replace("multiply(x, row_c)", "multiply(x, x)")
    assert "y_c" in left(handing_on)


def test_one_that_is_there_for_its_place_stays() -> None:
    held = BODY.replace("custom-call(l), ", "custom-call(l), control-predecessors={one}, ")
    assert "l_c" in left(held)


@pytest.mark.parametrize("unreduced", ["", "pp"])
def test_sums_that_are_open_stay_so_where_the_program_says_it(unreduced: str) -> None:
    """The constraint at an accumulator's start does not hold for the loop. Without a constraint in the loop, each
    addition would be reduced. A constraint directly after an equal one is redundant.
    """

    def open_sum(name: str, shape: str, operand: str) -> str:
        return constraint(name, shape, operand, *[""] * shape.count(","), "", unreduced=unreduced)

    text = f"""HloModule m
body {{ state = (s32[], f32[8]) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  total = f32[8] get-tuple-element(state), index=1
{open_sum("read", "f32[8]", "total")}  new = f32[8] add(read, read)
{open_sum("new_c", "f32[8]", "new")}{open_sum("again", "f32[8]", "new_c")}
  ROOT result = (s32[], f32[8]) tuple(l, again) }}
condition {{ state = (s32[], f32[8]) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  four = s32[] constant(4)
  ROOT more = pred[] compare(l, four), direction=LT }}
ENTRY e {{ zero = s32[] constant(0)
  x = f32[8] parameter(0)
{open_sum("start", "f32[8]", "x")}  state = (s32[], f32[8]) tuple(zero, start)
  loop = (s32[], f32[8]) while(state), condition=condition, body=body
  total = f32[8] get-tuple-element(loop), index=1
{constraint("reduced", "f32[8]", "total", "")}
  ROOT result = f32[8] negate(reduced) }}
"""
    kept = left(text)
    assert kept == (["new_c", "read", "reduced", "start"] if unreduced else ["new_c", "start"])


def test_open_sums_of_scalars_stay_too() -> None:
    text = f"""HloModule m
ENTRY e {{ x = f32[] parameter(0)
{constraint("one", "f32[]", "x")}{constraint("partial", "f32[]", "one", unreduced="dp")}
{constraint("whole", "f32[]", "partial")}{constraint("again", "f32[]", "whole")}
  ROOT y = f32[] negate(again) }}
"""
    assert left(text) == ["partial", "whole"]
