"""Modules for tests: an empty one to build in, loops of every kind, and random programs for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, shapes
from dhelix.tests.passes.hlo.interpreter import EFFECT

BASE = """HloModule base
ENTRY main {
  x = s32[4] parameter(0)
  ROOT y = s32[4] negate(x)
}
"""


def base() -> HloModule:
    return HloModule.from_text(BASE)


VECTOR = base().entry.root.shape


def vector(builder: Builder, value: int) -> Instruction:
    """A vector with `value` in each of its four elements."""
    return builder.make("broadcast", VECTOR, [builder.scalar(value, shapes.S32)])


def loop(
    start: int,
    bound: int | None,
    step: int,
    direction: str = "LT",
    *,
    element_type: int = shapes.S32,
    operation: str = "add",
    bound_in_state: bool = False,
    condition_calls: bool = False,
) -> Instruction:
    """A loop over (counter, vector, bound): `while counter <direction> bound: counter <operation>= step`.

    If `bound` is None, the bound is a parameter of the entry and is carried in the state.
    """
    module = base()
    entry = Builder(module.entry)
    scalar = shapes.scalar(element_type)
    limit = entry.parameter(1, scalar) if bound is None else entry.scalar(bound, element_type)
    initial = entry.tuple([entry.scalar(start, element_type), module.entry.parameters[0], limit])

    body = Builder(module.new_computation("body"))
    state = body.parameter(0, initial.shape)
    counter, values, carried = (body.element(state, k) for k in range(3))
    following = body.binary(operation, counter, body.scalar(step, element_type))
    body.finish(body.tuple([following, body.binary("add", values, values), carried]))

    condition = Builder(module.new_computation("condition"))
    state = condition.parameter(0, initial.shape)
    counter = condition.element(state, 0)
    in_state = bound_in_state or bound is None
    limit = condition.element(state, 2) if in_state else condition.scalar(bound or 0, element_type)
    owner = Builder(module.new_computation("less")) if condition_calls else condition
    a, b = (owner.parameter(0, scalar), owner.parameter(1, scalar)) if condition_calls else (counter, limit)
    root = owner.make("compare", shapes.scalar(shapes.PRED), [a, b], comparison_direction=direction)
    if condition_calls:
        owner.finish(root)
        root = condition.make("call", root.shape, [counter, limit], called=[owner.computation])
    condition.finish(root)

    made = entry.make("while", initial.shape, [initial], called=[body.computation, condition.computation])
    entry.finish(entry.element(made, 1))
    module.to_bytes()  # sorts it
    return made


def effect(builder: Builder, operand: Instruction) -> Instruction:
    made = builder.make("custom-call", operand.shape, [operand], custom_call_target=EFFECT)
    made.proto.custom_call_has_side_effect = True
    return made


@st.composite
def programs(draw: st.DrawFn) -> HloModule:
    """Random programs over int32 vectors: functions that call each other, loops, tuples, effects and control edges."""
    module = base()
    functions: list[Computation] = []
    for _ in range(draw(st.integers(0, 3))):
        builder = Builder(module.new_computation("function"))
        values = [builder.parameter(k, VECTOR) for k in range(draw(st.integers(1, 3)))]
        _fill(draw, builder, values, functions)
        functions.append(builder.finish(_root(draw, builder, values)))
    builder = Builder(module.entry)
    values = [module.entry.parameters[0]]
    _fill(draw, builder, values, functions)
    builder.finish(_root(draw, builder, values))
    module.to_bytes()
    return module


def _root(draw: st.DrawFn, builder: Builder, values: list[Instruction]) -> Instruction:
    """One value, possibly a parameter or a call, or a tuple of several."""
    chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return builder.tuple(chosen) if len(chosen) > 1 else chosen[0]


def _fill(draw: st.DrawFn, builder: Builder, values: list[Instruction], functions: list[Computation]) -> None:
    """Appends random values, all of them vectors, to `values`."""
    kinds = ["binary", "binary", "constant", "tuple", "effect", "loop"] + ["call"] * 3 * bool(functions)
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(kinds))
        first = len(builder.computation.instructions)
        values += _values(draw, builder, kind, values, functions)
        made = builder.computation.instructions[first:]
        earlier = builder.computation.instructions[:first]
        if made and draw(st.integers(0, 4)) == 0:
            made[-1].control_predecessors.append(draw(st.sampled_from(earlier)))


def _values(
    draw: st.DrawFn, builder: Builder, kind: str, values: list[Instruction], functions: list[Computation]
) -> list[Instruction]:
    def pick() -> Instruction:
        return draw(st.sampled_from(values))

    if kind == "binary":
        return [builder.binary(draw(st.sampled_from(["add", "subtract", "multiply", "maximum"])), pick(), pick())]
    if kind == "constant":
        return [vector(builder, draw(st.integers(-3, 3)))]
    if kind == "effect":
        return [effect(builder, pick())]
    if kind == "tuple":
        made = builder.tuple([pick(), pick()])
        return [builder.make("get-tuple-element", VECTOR, [made], tuple_index=draw(st.integers(0, 1)))]
    if kind == "loop":
        return _loop(draw, builder, pick())
    callee = draw(st.sampled_from(functions))
    arguments = [pick() for _ in callee.parameters]
    return _elements(builder, builder.make("call", callee.root.shape, arguments, called=[callee]))


def _elements(builder: Builder, value: Instruction) -> list[Instruction]:
    if not shapes.is_tuple(value.shape):
        return [value]
    return [builder.element(value, k) for k in range(len(value.shape.tuple_shapes))]


def _loop(draw: st.DrawFn, builder: Builder, start: Instruction) -> list[Instruction]:
    initial = builder.tuple([builder.scalar(0, shapes.S32), start])
    body = Builder(builder.module.new_computation("body"))
    state = body.parameter(0, initial.shape)
    counter, value = body.element(state, 0), body.element(state, 1)
    value = effect(body, value) if draw(st.booleans()) else body.binary("add", value, value)
    body.finish(body.tuple([body.binary("add", counter, body.scalar(1, shapes.S32)), value]))
    condition = Builder(builder.module.new_computation("condition"))
    counter = condition.element(condition.parameter(0, initial.shape), 0)
    bound = condition.scalar(draw(st.integers(0, 3)), shapes.S32)
    predicate = shapes.scalar(shapes.PRED)
    condition.finish(condition.make("compare", predicate, [counter, bound], comparison_direction="LT"))
    called = [body.computation, condition.computation]
    return [builder.element(builder.make("while", initial.shape, [initial], called=called), 1)]
