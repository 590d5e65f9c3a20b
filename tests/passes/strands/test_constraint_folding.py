"""Sharding constraints that say what is known, on small HLO modules; whole steps in tests/runtime/test_meshes.py."""

import re

import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.strands.constraint_folding import fold_constraints


def constraint(name: str, shape: str, operand: str, *split: str) -> str:
    axes = ", ".join(f'{{\\"{axis}\\"}}' if axis else "{}" for axis in split)
    attributes = f'frontend_attributes={{xla.sdy.sharding="#sdy.sharding_per_value<[<@mesh, [{axes}]>]>"}}'
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
    after = module.to_text()  # which verifies it
    found = [i.name for c in module.computations for i in c.instructions if i.proto.custom_call_target == "Sharding"]
    assert len(found) == before - count and len(found) == after.count('"Sharding"')
    return sorted(found)


def test_what_starts_a_loops_state_says_it_for_all_that_moves_it() -> None:
    assert left(BODY) == ["start", "x_c", "y_c"]


@pytest.mark.parametrize(
    ("name", "shape", "operand", "split", "stay"),
    [
        ("row_c", "f32[8,16]", "row", ("dp", ""), {"row_c"}),  # gathered before it is used
        ("row_c", "f32[8,16]", "row", ("tp", "dp"), {"row_c"}),
        ("y_c", "f32[8,16]", "y", ("", "tp"), {"y_c", "y_again"}),  # says where something is summed
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
    handing_on = adding.replace("multiply(x, row_c)", "multiply(x, x)")
    assert "y_c" in left(handing_on)


def test_one_that_is_there_for_its_place_stays() -> None:
    held = BODY.replace("custom-call(l), ", "custom-call(l), control-predecessors={one}, ")
    assert "l_c" in left(held)
