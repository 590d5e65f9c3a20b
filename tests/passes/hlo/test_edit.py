"""Copies, inlined calls and dead code; reachability and the call graph."""

from __future__ import annotations

import pytest

from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph, shapes, verify
from dhelix.passes.hlo.edit import (
    copy_called,
    copy_computation,
    copy_instructions,
    drop_dead,
    has_side_effect,
    inline_calls,
    replace_uses,
    share_equal,
)
from dhelix.tests.passes.hlo.modules import VECTOR, base, effect, loop, vector

CALLS = """HloModule calls
inner {
  a = f32[4] parameter(0)
  b = f32[4] parameter(1)
  ROOT product = f32[4] multiply(a, b), metadata={op_name="mul"}
}
swap {
  first = f32[4] parameter(0)
  second = f32[4] parameter(1)
  ROOT both = (f32[4], f32[4]) tuple(second, first)
}
outer {
  p = f32[4] parameter(0)
  sine = f32[4] sine(p), metadata={op_name="sin"}
  pair = (f32[4], f32[4]) call(sine, p), to_apply=swap
  left = f32[4] get-tuple-element(pair), index=0
  right = f32[4] get-tuple-element(pair), index=1
  ROOT call = f32[4] call(left, right), to_apply=inner, metadata={op_name="jit(inner)"}
}
same {
  ROOT q = f32[4] parameter(0)
}
ENTRY main {
  x = f32[4] parameter(0)
  one = f32[4] call(x), to_apply=outer, metadata={op_name="jit(step)/jit(outer)"}
  two = f32[4] call(one), to_apply=outer, metadata={op_name="jit(step)/jit(outer)"}
  three = f32[4] call(two), to_apply=same
  ROOT last = f32[4] call(three), to_apply=outer
}
"""


def lines(computation: Computation) -> list[str]:
    """Opcodes and positions of operands: what a computation does, independent of names."""
    position = {i: n for n, i in enumerate(computation.instructions)}
    return [f"{i.opcode}({','.join(str(position[o]) for o in i.operands)})" for i in computation.instructions]


def opcodes(computation: Computation) -> list[str]:
    return [i.opcode for i in computation.instructions]


def test_calls_are_inlined_through_tuples_parameters_and_roots() -> None:
    module = HloModule.from_text(CALLS)
    assert inline_calls(module.entry) == 3 + 1 + 3 * 2
    # swap(sine, p) = (p, sine); users read its elements directly, so the tuple is dead
    drop_dead(module.entry)
    wanted = [
        "parameter()",
        "sine(0)",
        "multiply(0,1)",
        "sine(2)",
        "multiply(2,3)",
        "sine(4)",
        "multiply(4,5)",
    ]
    assert lines(module.entry) == wanted
    assert module.entry.root is module.entry.instructions[-1]
    assert len(module.clone().computations) == 1
    verify(module)


def test_inlined_names_stand_under_the_name_of_the_call() -> None:
    module = HloModule.from_text(CALLS)
    inline_calls(module.entry)
    drop_dead(module.entry)
    names = [i.op_name for i in module.entry.instructions[1:]]
    step = ["jit(step)/jit(outer)/sin", "jit(step)/jit(outer)/jit(inner)/mul"]
    assert names == [*step, *step, "sin", "jit(inner)/mul"]  # the last call has no op_name
    callee = HloModule.from_text(CALLS)
    inline_calls(callee.entry)
    outer = next(i.called[0] for i in HloModule.from_text(CALLS).entry.instructions if i.called)
    assert [i.op_name for i in outer.instructions] == ["", "sin", "", "", "", "jit(inner)"]


def test_loops_in_what_is_called_are_copied_and_named() -> None:
    made = loop(0, 3, 1, condition_calls=True)
    module = made.computation.module
    function = module.entry
    made.called[0].root.operands[1].proto.metadata.op_name = "while/body/add"
    main = Builder(module.new_computation("main"))
    x = main.parameter(0, VECTOR)
    calls = [main.make("call", VECTOR, [x, x][:1], called=[function]) for _ in range(2)]
    for n, call in enumerate(calls):
        call.proto.metadata.op_name = f"jit(f{n})"
    module.entry = main.finish(main.binary("add", *calls))
    module.to_bytes()
    assert inline_calls(module.entry) == 2
    module.to_bytes()
    verify(module)  # each loop has its own body
    loops = [i for i in module.entry.instructions if i.opcode == "while"]
    bodies = [i.called[0].root.operands[1].op_name for i in loops]
    assert bodies == ["jit(f0)/while/body/add", "jit(f1)/while/body/add"]


def test_calls_that_must_stay_stay() -> None:
    module = HloModule.from_text(CALLS)
    assert inline_calls(module.entry, keep=lambda call: call.called[0].name == "outer") == 1
    assert opcodes(module.entry) == ["parameter", "call", "call", "call"]
    assert inline_calls(module.entry, keep=lambda call: call.called[0].name.startswith("inner")) == 3 + 3
    assert sum(o == "call" for o in opcodes(module.entry)) == 3
    module.to_bytes()
    verify(module)


def test_control_edges_of_calls_reach_all_that_is_inlined() -> None:
    module = base()
    function = Builder(module.new_computation("function"))
    p = function.parameter(0, VECTOR)
    effect(function, p)
    function.finish(function.binary("add", p, p))
    entry = Builder(module.entry)
    x = module.entry.parameters[0]
    before = effect(entry, x)
    call = entry.make("call", VECTOR, [x], called=[function.computation])
    call.control_predecessors = [before]
    after = effect(entry, x)
    after.control_predecessors = [call]
    entry.finish(entry.binary("add", call, after))
    inline_calls(module.entry)
    inlined = [i for i in module.entry.instructions if i.control_predecessors == [before]]
    assert [i.opcode for i in inlined] == ["custom-call", "add"]
    assert after.control_predecessors == inlined
    verify(module)


def test_a_copy_keeps_attributes_control_edges_and_the_kind_of_computation() -> None:
    text = """HloModule m
fused {
  p = f32[4] parameter(0)
  ROOT r = f32[4] sine(p)
}
ENTRY main {
  x = f32[4] parameter(0)
  a = f32[4] fusion(x), kind=kLoop, calls=fused, backend_config={"k":1}, frontend_attributes={f="1"}
  ROOT b = f32[4] negate(x), control-predecessors={a}
}
"""
    module = HloModule.from_text(text)
    copy = copy_computation(module.entry)
    a, b = copy.instructions[1:]
    assert b.control_predecessors == [a] and copy.root is b
    assert a.called[0] is not module.entry.instructions[1].called[0]
    assert a.proto.backend_config == b'{"k":1}' and a.proto.frontend_attributes.map["f"] == "1"
    fused = module.computations[0].proto.SerializeToString()
    copied = a.called[0].proto
    copied.name, copied.id = "fused", module.computations[0].id
    copied.root_id = module.computations[0].proto.root_id
    assert copied.SerializeToString() == fused  # with is_fusion_computation, which the schema does not know
    assert {i.name for i in copy.instructions}.isdisjoint(i.name for i in module.entry.instructions)


def test_computations_that_are_applied_are_shared_by_copies() -> None:
    text = """HloModule m
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
ENTRY main {
  x = f32[4] parameter(0)
  z = f32[] constant(0)
  ROOT r = f32[] reduce(x, z), dimensions={0}, to_apply=add
}
"""
    module = HloModule.from_text(text)
    root = module.entry.root
    assert copy_called(root) is root.called
    module.entry.root = Builder(module.entry).copy(root, root.operands, copy_called(root))
    verify(module.clone())
    assert len(module.clone().computations) == 2


def test_copies_read_what_the_map_says() -> None:
    module = base()
    builder = Builder(module.entry)
    x = module.entry.parameters[0]
    a = builder.binary("add", x, x)
    b = builder.binary("add", a, x)
    b.control_predecessors = [a, module.entry.root]
    y = vector(builder, 3)
    copies: dict[Instruction, Instruction] = {x: y, a: y}
    copy_instructions(builder, [a, b], copies)
    assert copies[a] is y and copies[b].operands == [y, y]
    assert copies[b].control_predecessors == [y]  # a's replacement; the other predecessor is not copied


def test_uses_are_replaced_everywhere_but_in_the_replacement() -> None:
    module = base()
    builder = Builder(module.entry)
    x, y = module.entry.parameters[0], module.entry.root
    a = builder.binary("add", y, y)
    new = builder.binary("add", y, x)
    replace_uses(module.entry, y, new)
    assert a.operands == [new, new] and new.operands == [y, x] and module.entry.root is new
    module.to_bytes()
    verify(module)
    assert module.entry.instructions.index(new) < module.entry.instructions.index(a)


EFFECTS = """HloModule m
pure {
  p = f32[] parameter(0)
  ROOT n = f32[] negate(p)
}
shouts {
  q = f32[] parameter(0)
  ROOT c = f32[] custom-call(q), custom_call_target="shout", custom_call_has_side_effect=true
}
ENTRY main {
  x = f32[] parameter(0)
  unused = f32[] parameter(1)
  quiet = f32[] custom-call(x), custom_call_target="quiet"
  loud = f32[] custom-call(x), custom_call_target="loud", custom_call_has_side_effect=true
  a = f32[] call(x), to_apply=pure
  b = f32[] call(x), to_apply=shouts
  before = f32[] sine(x)
  dead = f32[] cosine(before)
  start = token[] after-all()
  out = token[] outfeed(x, start), outfeed_shape=f32[]
  fed = (f32[], token[]) infeed(start)
  rng = f32[] rng(x, x), distribution=rng_uniform
  ROOT r = f32[] negate(x), control-predecessors={before}
}
"""


def test_dead_code_goes_but_effects_and_what_they_need_stay() -> None:
    module = HloModule.from_text(EFFECTS)
    entry = module.entry
    loud = {i.name for i in entry.instructions if has_side_effect(i)}
    assert loud == {"loud", "b", "out", "fed", "rng"}
    entry.instructions.reverse()  # order does not matter
    assert drop_dead(entry) == 3
    assert {i.name for i in entry.instructions} == {"x", "unused", "before", "start", "r"} | loud
    verify(module.clone())


def test_dead_code_leaves_the_schedule_too() -> None:
    module = HloModule.from_text(EFFECTS.replace("HloModule m", "HloModule m, is_scheduled=true"))
    drop_dead(module.entry)
    verify(module)
    assert len(module.schedule[module.entry]) == len(module.entry.instructions)


def test_reachability_goes_over_data_and_control() -> None:
    entry = HloModule.from_text(EFFECTS).entry
    by_name = {i.name: i for i in entry.instructions}
    after = graph.descendants(entry, [by_name["before"]])
    assert {i.name for i in after} == {"before", "dead", "r"}
    assert {i.name for i in graph.ancestors(entry, [by_name["r"]])} == {"r", "before", "x"}
    assert graph.ancestors(entry, []) == graph.descendants(entry, []) == set()
    users = entry.users()
    assert [i.name for i in users[by_name["start"]]] == ["out", "fed"]
    assert users[by_name["rng"]] == [] and users[by_name["x"]].count(by_name["rng"]) == 1


def test_the_call_graph_is_walked_and_turned_around() -> None:
    module = HloModule.from_text(CALLS)
    called = {c.name: [i.name for i in found] for c, found in graph.callers(module).items()}
    assert called == {
        "inner": ["call"],
        "swap": ["pair"],
        "outer": ["one", "two", "last"],
        "same": ["three"],
        "main": [],
    }
    names = [i.name for i in graph.walk(module.entry)]
    assert names.count("sine") == 3 and names.index("one") < names.index("sine") < names.index("two")
    only = graph.walk(module.entry, into=lambda i: i.called[0].name == "same")
    assert [i.name for i in only] == ["x", "one", "two", "three", "q", "last"]


def test_what_the_builder_makes_is_read_by_xla() -> None:
    module = base()
    builder = Builder(module.entry)
    x = module.entry.parameters[0]
    pair = builder.tuple([x, builder.scalar(-5, shapes.S64)])
    assert builder.element(pair, 0) is x  # reads the operand directly
    fenced = builder.barrier([x, builder.scalar(True, shapes.PRED), builder.scalar(7, shapes.U32)])
    assert [shapes.text(v.shape) for v in fenced] == ["s32[4]", "pred[]", "u32[]"]
    builder.finish(builder.tuple([*fenced, pair, builder.scalar((1 << 64) - 1, shapes.U64)]))
    module.to_bytes()
    verify(module)
    text = module.to_text()
    for constant in (
        "s64[] constant(-5)",
        "pred[] constant(true)",
        "u32[] constant(7)",
        f"constant({(1 << 64) - 1})",
    ):
        assert constant in text


def test_a_loop_like_another_takes_its_name_but_not_its_facts() -> None:
    made = loop(0, 3, 1)
    made.proto.metadata.op_name = "jit(step)/while"
    made.proto.backend_config = b'{"known_trip_count":{"n":"3"}}'
    body, condition = copy_called(made)
    again = Builder(made.computation).while_loop(made.operands[0], body, condition, made, "again")
    assert again.op_name == "jit(step)/while" and again.proto.backend_config == b""
    replace_uses(made.computation, made, again)
    verify(made.computation.module.clone())


@pytest.mark.parametrize("depth", [12])
def test_calls_that_share_functions_cost_no_more_than_there_are_functions(depth: int) -> None:
    module = base()
    function: Computation | None = None
    for _ in range(2 * depth):  # 2 ** 24 paths
        builder = Builder(module.new_computation("function"))
        p = builder.parameter(0, VECTOR)
        called = [] if function is None else [function]
        left, right = (builder.make("call" if called else "negate", VECTOR, [p], called=called) for _ in range(2))
        function = builder.finish(builder.binary("add", left, right))
    assert function is not None
    call = Builder(module.entry).make("call", VECTOR, [module.entry.root], called=[function])
    assert not has_side_effect(call)
    drop_dead(module.entry)
    assert call not in module.entry.instructions


def test_what_is_computed_twice_is_computed_once() -> None:
    """Except effects and calls, and only if the operands are the same."""
    builder = Builder(base().entry)
    one, again, other = vector(builder, 1), vector(builder, 1), vector(builder, 2)
    sums = [builder.binary("add", one, other), builder.binary("add", again, other), builder.binary("add", other, one)]
    effects = [effect(builder, one), effect(builder, again)]
    builder.finish(builder.tuple([*sums, *effects]))
    share_equal(builder.computation)
    verify(builder.module)
    first, second, third, *both = builder.computation.root.operands
    assert first is second and third is not first
    assert len(set(both)) == 2 and both[0].operands == both[1].operands
