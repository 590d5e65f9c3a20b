"""Adds the cuDNN calls of a measuring program before XLA schedules the program, so that XLA builds their graphs.

XLA builds a module's cuDNN graphs once, before scheduling, and looks them up by a fingerprint of the call. The pass
`operator-replay` makes its calls after scheduling. Such a call would find no graph when it runs. So this pass adds one
call for each attention operator to the placeholder (the program that `operator-replay` will fill) before XLA builds the
graphs:

    ENTRY main(p0: bf16[8388608], ...) -> f32[1] {
      call = (bf16[1,8,8192,128], f32[1,8,8192], u8[0]) custom-call(reshape of p0, ...)    as in the step
      root = f32[1] add(<the old root>, convert(dynamic-slice(call.0)))                    keeps it alive
    }

Contract: the pass keeps the parameters and the result's shape. It changes nothing if the program has no attention
operators. A call's last result is its workspace. The pass sets the workspace's size to 0, and XLA sets it again. The
pass is legal because nothing uses the placeholder's result: `operator-replay` replaces all instructions after
scheduling. Cost: XLA compiles one more call per attention operator.
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
    """Adds the attention calls of `program` to its placeholder, whose arguments are `program.buffers`."""

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
        context.note("library calls added", calls=len(calls))
        return True


def graph_calls(program: Program) -> list[Operator]:
    """The operators of a program for which XLA needs a cuDNN graph, each once."""
    operators = dict.fromkeys(operator for item in program.items for operator in item.operators)
    return [o for o in operators if o.core.proto.custom_call_target.startswith(_GRAPH_CALL)]


def _call(builder: Builder, operator: Operator, free: dict[Buffer, Iterator[Instruction]]) -> Instruction:
    values = {given: _value(builder, given, free) for given in operator.inputs}
    call = builder.copy(operator.core, [values[o] for o in operator.operands], [])
    call.proto.ClearField("metadata")  # metadata refers to stack frames of the step's module
    workspace = call.shape.tuple_shapes[len(call.shape.tuple_shapes) - 1]
    workspace.dimensions[0] = 0
    return call


def _value(builder: Builder, given: Instruction, free: dict[Buffer, Iterator[Instruction]]) -> Instruction:
    """A value that replaces the step's operand `given`: the same constant, index 0, or a buffer."""
    if is_constant(given):
        value = builder.copy(given, [], [])
        value.proto.ClearField("metadata")
        return value
    if is_index(given.shape):
        return builder.scalar(0, given.shape.element_type)
    return builder.make("reshape", given.shape, [next(free[Buffer.of(given.shape)])])


def _element(builder: Builder, call: Instruction, like: Instruction) -> Instruction:
    """The first element of the call's first result, converted to the type of `like`."""
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
