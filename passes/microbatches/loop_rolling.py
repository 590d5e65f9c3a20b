"""Puts micro-batches that Python or `unroll=` has written out back into a loop, which strand_duplication takes apart.

Before:                                  After:
    g0, l0 = backward(w, slice(x, 0))        xs = concatenate(slice(x, 0), slice(x, 1), ...)
    g1, l1 = backward(w, slice(x, 1))        g = -0.0, ls = [-, -, ...]
    g = g0 + g1                              while k < N:
    g2, l2 = backward(w, slice(x, 2))            gk, lk = backward(w, xs[k])
    g = g + g2                                   g = g + gk
    ...                                          ls[k] = lk

Contract
    Consumes  N equal parts of one computation (`equal_parts`), which says what is proved of them.
    Makes     a `while` of N iterations. What differs by part is stacked in front of it, what is read of parts behind it
              is stacked by it. A sum on top of nothing starts as the operation's neutral element: -0.0 + g is g.
    Keeps     every value, and the order of additions.
    Leaves    what belongs to no part, and what inputs are made of.

Why it is legal: by the proof, iteration k computes what part k did, of the same operands.
Cost: memory for the stacks, which are of inputs (a copy of the batch, keys) and of small results.
No paper: it is what the writer of the program would do by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dhelix.passes.hlo import Builder, Computation, Instruction, Shape, shapes
from dhelix.passes.hlo.edit import copy_called, drop_dead, replace_all_uses
from dhelix.passes.microbatches.equal_parts import Parts, Result, Sum, Value, equal_parts

NAME = "microbatches"


def roll(computation: Computation) -> Instruction | None:
    """Puts the micro-batches that `computation` holds into a loop, and returns that; None where it holds none.

    Raises Unequal where they are not proved to be equal, and leaves them.
    """
    parts = equal_parts(computation)
    if parts is None:
        return None
    outside = Builder(computation)
    inputs = [v for v in parts.values if v.role == "input"]
    shared = [v for v in parts.values if v.role == "shared"]
    kept = list(dict.fromkeys(result.value for result in parts.results))
    start = [
        outside.scalar(0, shapes.S32),
        *(stack(outside, [i for i in v.row if i is not None]) for v in inputs),
        *(v.first for v in shared),
        *(_start(outside, one) for one in parts.sums),
        *(_filled(outside, 0.0, stacked(v.first.shape, parts.count)) for v in kept),
    ]
    initial = outside.tuple(start)
    body = _Body(parts, initial.shape, inputs, shared, kept)
    condition = Builder(computation.module.new_computation(f"{NAME}_condition"))
    counter = condition.element(condition.parameter(0, initial.shape), 0)
    bound = condition.scalar(parts.count, shapes.S32)
    goes_on = condition.make("compare", shapes.scalar(shapes.PRED), [counter, bound], comparison_direction="LT")
    loop = outside.make("while", initial.shape, [initial], NAME, [body.computation, condition.finish(goes_on)])
    loop.proto.metadata.op_name = f"{parts.name}/while" if parts.name else "while"
    _hand_over(parts, outside, loop, kept)
    return loop


def stacked(part: Any, count: int) -> Any:
    """The shape of `count` arrays of shape `part` along a new first dimension."""
    dimensions = [count, *part.dimensions]
    return Shape(
        element_type=part.element_type,
        dimensions=dimensions,
        layout={"minor_to_major": list(reversed(range(len(dimensions))))},
    )


def stack(builder: Builder, parts: Sequence[Instruction]) -> Instruction:
    slot = stacked(parts[0].shape, 1)
    slots = [builder.make("reshape", slot, [part]) for part in parts]
    return builder.make("concatenate", stacked(parts[0].shape, len(parts)), slots, dimensions=[0])


def slot_of(builder: Builder, whole: Instruction, index: Instruction, part: Any) -> Instruction:
    """Slot `index` of a stack of arrays of shape `part`."""
    zero = builder.scalar(0, index.shape.element_type)
    at = [index, *[zero] * len(part.dimensions)]
    slot = builder.make(
        "dynamic-slice", stacked(part, 1), [whole, *at], dynamic_slice_sizes=[1, *part.dimensions]
    )
    return builder.make("reshape", part, [slot])


def _write(builder: Builder, whole: Instruction, part: Instruction, index: Instruction) -> Instruction:
    zero = builder.scalar(0, index.shape.element_type)
    slot = builder.make("reshape", stacked(part.shape, 1), [part])
    return builder.make("dynamic-update-slice", whole.shape, [whole, slot, index, *[zero] * len(part.shape.dimensions)])


class _Body:
    """The loop's body: what the first part computes, of the elements of the state.

    The state is the counter, stacks of inputs, shared values, sums, and stacks of results.
    """

    def __init__(
        self, parts: Parts, state: Any, inputs: Sequence[Value], shared: Sequence[Value], kept: Sequence[Value]
    ) -> None:
        builder = Builder(parts.computation.module.new_computation(NAME))
        parameter = builder.parameter(0, state)
        elements = [builder.element(parameter, k) for k in range(len(state.tuple_shapes))]
        counter, *rest = elements
        made: dict[Value, Instruction] = {}
        for value, element in zip((*inputs, *shared), rest, strict=False):
            made[value] = element
        for value in inputs:
            made[value] = slot_of(builder, made[value], counter, value.first.shape)
        for value in _in_program_order(parts):
            if value.role == "computed":
                operands = [made[o] for o in value.operands]
                made[value] = builder.copy(value.first, operands, copy_called(value.first))
        sums = rest[len(inputs) + len(shared) :]
        results = [
            *(_step(builder, one, old, made[one.summand]) for one, old in zip(parts.sums, sums, strict=False)),
            *(_write(builder, old, made[v], counter) for v, old in zip(kept, sums[len(parts.sums) :], strict=True)),
        ]
        following = builder.binary("add", counter, builder.scalar(1, shapes.S32))
        unchanged = rest[: len(inputs) + len(shared)]
        self.computation = builder.finish(builder.tuple([following, *unchanged, *results]))


def _in_program_order(parts: Parts) -> list[Value]:
    """The values as the first part has them, where that leaves operands first: passes look for what comes first."""
    place = {i: n for n, i in enumerate(parts.computation.instructions)}
    order: dict[Value, int] = {}
    for value in parts.values:
        order[value] = max([place[value.first], *(order[o] for o in value.operands if o.role == "computed")])
    return sorted(parts.values, key=order.__getitem__)


def _step(builder: Builder, one: Sum, old: Instruction, summand: Instruction) -> Instruction:
    operation, *constraints = one.chain.path
    operands = [summand, summand]
    operands[one.chain.slot] = old
    made = builder.copy(operation, operands)
    for constraint in constraints:
        made = builder.copy(constraint, [made])
    return made


def _start(builder: Builder, one: Sum) -> Instruction:
    """What the first part is added to; the sharding that the sum is told to have is that of the start."""
    if one.start is not None:
        return one.start
    operation, *constraints = one.chain.path
    made = _filled(builder, _neutral(operation), operation.shape)
    for constraint in constraints:
        made = builder.copy(constraint, [made])
    return made


def _neutral(operation: Instruction) -> float:
    """`op(neutral, x)` is x, to the last bit: -0.0 + -0.0 is -0.0."""
    floating = shapes.is_floating(operation.shape)
    return {
        "add": -0.0 if floating else 0,
        "multiply": 1,
        "maximum": -math.inf,
        "minimum": math.inf,
        "and": 1,
        "or": 0,
    }[operation.opcode]


def _filled(builder: Builder, value: float, shape: Any) -> Instruction:
    """An array of one number, which all types hold but for infinity."""
    number = builder.number(value, shapes.F32)
    if shape.element_type != shapes.F32:
        scalar = shapes.scalar(shape.element_type)
        number = builder.make("convert", scalar, [number])
    return number if not shape.dimensions else builder.make("broadcast", shape, [number])


def _hand_over(parts: Parts, outside: Builder, loop: Instruction, kept: Sequence[Value]) -> None:
    """Readers of the parts read the loop; the parts go."""
    computation = parts.computation
    results = {
        one.chain.result: outside.element(loop, len(loop.shape.tuple_shapes) - len(kept) - len(parts.sums) + n)
        for n, one in enumerate(parts.sums)
    }
    stacks = {v: outside.element(loop, len(loop.shape.tuple_shapes) - len(kept) + n) for n, v in enumerate(kept)}
    results |= {r.instruction: _slot(outside, stacks[r.value], r) for r in parts.results}
    replace_all_uses(computation, results)
    drop_dead(computation)


def _slot(builder: Builder, whole: Instruction, result: Result) -> Instruction:
    part = result.instruction.shape
    ranges = [{"start": result.part, "limit": result.part + 1, "stride": 1}]
    ranges += [{"start": 0, "limit": size, "stride": 1} for size in part.dimensions]
    slot = builder.make("slice", stacked(part, 1), [whole], slice_dimensions=ranges)
    return builder.make("reshape", part, [slot])
