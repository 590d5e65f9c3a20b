"""Calls of cuDNN, made known to XLA before it schedules: the first half of a measuring program.

XLA builds cuDNN's graphs of a module once, before scheduling, and keeps them by a fingerprint of the call. A
call that only appears afterwards, as `operator-replay` makes it, finds no graph when it runs. So this pass puts
one call for each attention operator into the placeholder when it still can be seen:

    ENTRY main(p0: bf16[8388608], ...) -> f32[1] {
      call = (bf16[1,8,8192,128], f32[1,8,8192], u8[0]) custom-call(reshape of p0, ...)    as in the step
      root = f32[1] add(<the old root>, convert(dynamic-slice(call.0)))                    keeps it alive
    }

Legal because the placeholder means nothing: `operator-replay` replaces all of it after scheduling. The workspace,
the last of a call's results, is emptied: XLA gives it its size again. Cost: one call at compile time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dhelix.passes.evaluation.replay.operators import Buffer, Operator, arguments_of, is_constant, is_index
from dhelix.passes.evaluation.replay.program import Program
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, HloModule, Instruction, Shape, shapes

_GRAPH_CALL = "__cudnn$fmha"


@dataclass(frozen=True)
class LibraryCalls:
    """Puts the attention calls of `program` into its placeholder, whose arguments are `program.buffers`."""

    program: Program

    name = "library-calls"
    stage = Stage.PRE_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        calls = graph_calls(self.program)
        if not calls:
            return False
        builder = Builder(module.entry)
        arguments = arguments_of(module.entry)
        for operator in calls:
            free = {buffer: iter(found) for buffer, found in arguments.items()}
            call = _call(builder, operator, free)
            module.entry.root = builder.binary("add", module.entry.root, _element(builder, call, module.entry.root))
        context.note("library calls made known", calls=len(calls))
        return True


def graph_calls(program: Program) -> list[Operator]:
    """The operators of a program for which XLA needs a graph of cuDNN, each once."""
    operators = dict.fromkeys(operator for item in program.items for operator in item.operators)
    return [o for o in operators if o.core.proto.custom_call_target.startswith(_GRAPH_CALL)]


def _call(builder: Builder, operator: Operator, free: dict[Buffer, Iterator[Instruction]]) -> Instruction:
    values = {given: _value(builder, given, free) for given in operator.inputs}
    call = builder.copy(operator.core, [values[o] for o in operator.operands], [])
    call.proto.ClearField("metadata")  # it names stack frames of the step
    workspace = call.shape.tuple_shapes[len(call.shape.tuple_shapes) - 1]
    workspace.dimensions[0] = 0
    return call


def _value(builder: Builder, given: Instruction, free: dict[Buffer, Iterator[Instruction]]) -> Instruction:
    """Something to read in place of what the step gave."""
    if is_constant(given):
        value = builder.copy(given, [], [])
        value.proto.ClearField("metadata")
        return value
    if is_index(given.shape):
        return builder.scalar(0, given.shape.element_type)
    return builder.make("reshape", given.shape, [next(free[Buffer.of(given.shape)])])


def _element(builder: Builder, call: Instruction, like: Instruction) -> Instruction:
    """One element of the call's first result, of the shape of `like`."""
    result = builder.element(call, 0)
    flat = _vector(result.shape.element_type, shapes.element_count(result.shape))
    start = builder.scalar(0, shapes.S32)
    one = builder.make(
        "dynamic-slice",
        _vector(result.shape.element_type, 1),
        [builder.make("reshape", flat, [result]), start],
        dynamic_slice_sizes=[1],
    )
    return builder.make("convert", like.shape, [one])


def _vector(element_type: int, elements: int) -> Any:
    vector = Shape(element_type=element_type, dimensions=[elements])
    vector.layout.minor_to_major.append(0)
    return vector
