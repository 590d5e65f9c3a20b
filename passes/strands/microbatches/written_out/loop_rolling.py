"""Rolls unrolled micro-batches back into a loop, which strand_duplication consumes.

Before:                                  After:
    g0, l0 = backward(w, slice(x, 0))        xs = concatenate(slice(x, 0), slice(x, 1), ...)
    g1, l1 = backward(w, slice(x, 1))        g = -0.0, ls = [-, -, ...]
    g = g0 + g1                              while k < N:
    g2, l2 = backward(w, slice(x, 2))            gk, lk = backward(w, xs[k])
    g = g + g2                                   g = g + gk
    ...                                          ls[k] = lk

Contract
    Consumes  N equal parts of one computation. A part is the instructions of one micro-batch (`equal_parts`).
    Makes     a `while` of N iterations. Inputs that differ by part are stacked before the loop. The loop stacks results
              that are read after the loop. A sum without a start value starts with the neutral element of its
              operation. For additions this is -0.0, because -0.0 + g is g.
    Keeps     every value, and the order of additions.
    Leaves    instructions that belong to no part, and instructions that compute inputs.

Why it is legal: `equal_parts` proves that iteration k computes what part k computed, from the same operands.
Cost: memory for stacks of inputs (such as a copy of the batch, and random keys) and for stacks of small results.
This rewrite is not based on a paper. The author of a program would do it by hand.
"""

from __future__ import annotations

import math
from typing import Any

from dhelix.passes.hlo import Builder, Computation, Instruction, shapes
from dhelix.passes.hlo.edit import copy_called, drop_dead, replace_all_uses
from dhelix.passes.hlo.stacks import read_slot, stack, stack_of, static_slot, write_slot
from dhelix.passes.strands.microbatches.written_out.equal_parts import Parts, Sum, Value

NAME = "microbatches"
type Copies = dict[Value, Instruction]


def roll(parts: Parts) -> Instruction:
    """Replaces the parts by a loop and returns the loop."""
    computation, outside = parts.computation, Builder(parts.computation)
    inputs, shared, kept = parts.inputs, parts.shared, parts.kept
    start = [
        outside.scalar(0, shapes.S32),
        *(stack(outside, value.instances) for value in inputs),
        *(value.first for value in shared),
        *(start_of(outside, one) for one in parts.sums),
        *(empty(outside, value, parts.count) for value in kept),
    ]
    initial = outside.tuple(start)

    body = Builder(computation.module.new_computation(NAME))
    parameter = body.parameter(0, initial.shape)
    counter, *state = [body.element(parameter, k) for k in range(len(start))]
    places = len(inputs) + len(shared)
    made: Copies = dict(zip([*inputs, *shared], state[:places], strict=True))
    made |= {v: read_slot(body, made[v], counter, v.first.shape) for v in inputs}
    compute(body, parts, made)
    sums, stacks = state[places : places + len(parts.sums)], state[places + len(parts.sums) :]
    sums = [add(body, one, old, made) for one, old in zip(parts.sums, sums, strict=True)]
    stacks = [write_slot(body, old, made[v], counter) for v, old in zip(kept, stacks, strict=True)]
    following = body.binary("add", counter, body.scalar(1, shapes.S32))
    body.finish(body.tuple([following, *state[:places], *sums, *stacks]))

    condition = counts_to(computation.module.new_computation(f"{NAME}_condition"), initial, 0, parts.count)
    loop = outside.make("while", initial.shape, [initial], NAME, [body.computation, condition])
    loop.proto.metadata.op_name = f"{parts.name}/while" if parts.name else "while"
    results = [outside.element(loop, 1 + places + n) for n in range(len(sums) + len(stacks))]
    whole = dict(zip(kept, results[len(sums) :], strict=True))
    stands_for = {one.chain.result: total for one, total in zip(parts.sums, results, strict=False)}
    stands_for |= {r.instruction: static_slot(outside, whole[r.value], r.part) for r in parts.results}
    replace_all_uses(computation, stands_for)
    drop_dead(computation)
    return loop


def counts_to(computation: Computation, state: Instruction, index: int, bound: int) -> Computation:
    """Fills `computation` with a loop condition: element `index` of the loop's state is less than `bound`.

    The loop's state has the shape of `state`.
    """
    builder = Builder(computation)
    counter = builder.element(builder.parameter(0, state.shape), index)
    limit = builder.scalar(bound, shapes.S32)
    operands = [counter, limit]
    return builder.finish(builder.make("compare", shapes.scalar(shapes.PRED), operands, comparison_direction="LT"))


def compute(builder: Builder, parts: Parts, made: Copies) -> None:
    """Emits the instructions of one part. `made` holds inputs and shared values; the computed values are added to it.

    Instructions keep the order of the first part as far as operands allow, since other passes depend on this order.
    """
    place = {i: n for n, i in enumerate(parts.computation.instructions)}
    order = {value: -1 for value in parts.values if value.role != "computed"}
    computed = [value for value in parts.values if value.role == "computed"]
    for value in computed:
        order[value] = max([place[value.first], *(order[o] for o in value.operands)])
    for value in sorted(computed, key=order.__getitem__):
        operands = [made[o] for o in value.operands]
        made[value] = builder.copy(value.first, operands, copy_called(value.first))


def add(builder: Builder, one: Sum, old: Instruction, made: Copies) -> Instruction:
    """Emits one step of the sum `one`, which adds the summand to the sum's value `old`. Returns the new value."""
    operation, *constraints = one.chain.path
    operands = [made[one.summand], made[one.summand]]
    operands[one.chain.slot] = old
    total = builder.copy(operation, operands)
    for constraint in constraints:
        total = builder.copy(constraint, [total])
    return total


def start_of(builder: Builder, one: Sum) -> Instruction:
    """The start value of a sum. If there is none, the operation's neutral element, under the sum's constraints."""
    if one.start is not None:
        return one.start
    operation, *constraints = one.chain.path
    start = filled(builder, _neutral(operation), operation.shape)
    for constraint in constraints:
        start = builder.copy(constraint, [start])
    return start


def empty(builder: Builder, value: Value, slots: int) -> Instruction:
    """A stack of `slots` slots that are filled with zeros. Each slot has the shape of `value`."""
    return filled(builder, 0, stack_of(value.first.shape, slots))


def filled(builder: Builder, value: float, shape: Any) -> Instruction:
    """An array filled with one number."""
    number = builder.number(value, shapes.F32)
    if shape.element_type != shapes.F32:
        number = builder.make("convert", shapes.scalar(shape.element_type), [number])
    return builder.make("broadcast", shape, [number]) if shape.dimensions else number


def _neutral(operation: Instruction) -> float:
    """The number for which `operation(number, x)` is x to the last bit.

    For floating-point additions it is -0.0. It cannot be 0.0, because 0.0 + -0.0 is 0.0.
    """
    floating = shapes.is_floating(operation.shape)
    addition = -0.0 if floating else 0
    extremes = {"maximum": -math.inf, "minimum": math.inf}
    return {"add": addition, "multiply": 1, "and": 1, "or": 0, **extremes}[operation.opcode]
