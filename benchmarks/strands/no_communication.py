"""Replaces every collective by a local copy of the same shapes. The step's time then bounds what overlap can reach.

Before:                                                    After, over n devices:
    g = bf16[1,8192,4096] all-gather(x), dimensions={1}        g = concatenate(x, x, ...)       n times
    s = bf16[1,2048,4096] reduce-scatter(y), dimensions={1}    s = dynamic-slice(y, 0, 0, 0)    the first part of y
    a = f32[1,8192] all-reduce(z)                              a = z

Contract
    Consumes  a module after partitioning and before fusion (PRE_SCHEDULER), or a lowered one with explicit collectives.
    Makes     the copy on the right from each collective, between optimization barriers.
    Refuses   collectives that have no such copy (`_COPIES`).

The results are wrong by design, so use the changed step for timing only. The barriers keep XLA from fusing copies with
their neighbours, so each collective's operand and result stay buffers. The rest of the step does not change. A gather's
copy still writes the gathered array to memory.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dhelix.passes.analysis.collectives import KINDS
from dhelix.passes.framework.manager import PassContext, PassRefusal, Stage
from dhelix.passes.hlo import Builder, HloModule, Instruction, edit, shapes


@dataclass(frozen=True)
class NoCommunication:
    """The pass: collectives become local copies."""

    name = "no-communication"
    stage = Stage.PRE_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        replaced = Counter[str]()
        for computation in list(module.computations):
            for collective in [i for i in computation.instructions if i.opcode in KINDS]:
                if collective.opcode not in _COPIES:
                    raise PassRefusal(f"no local copy stands for {collective.opcode}", collective)
                _replace(collective)
                replaced[collective.opcode] += 1
        for opcode, count in sorted(replaced.items()):
            context.note(f"{opcode}: a local copy", count=count)
        return bool(replaced)


def _replace(collective: Instruction) -> None:
    computation = collective.computation
    builder = Builder(computation)
    results = [*collective.shape.tuple_shapes] if shapes.is_tuple(collective.shape) else [collective.shape]
    operands = builder.barrier(collective.operands)
    copy = _COPIES[collective.opcode]
    made = builder.barrier([copy(builder, o, r) for o, r in zip(operands, results, strict=True)])
    value = builder.tuple(made) if shapes.is_tuple(collective.shape) else made[0]
    value.proto.metadata.CopyFrom(collective.proto.metadata)
    for other in computation.instructions:
        if collective in other.control_predecessors:
            other.control_predecessors = [value if p is collective else p for p in other.control_predecessors]
    edit.replace_uses(computation, collective, value)
    computation.instructions.remove(collective)


def _repeat(builder: Builder, operand: Instruction, result: Any) -> Instruction:
    """Concatenates copies of the operand until they have the result's shape."""
    dimension, count = _changed(operand, result)
    if count == 1:
        return operand
    return builder.make("concatenate", result, [operand] * count, dimensions=[dimension])


def _first_part(builder: Builder, operand: Instruction, result: Any) -> Instruction:
    if _changed(operand, result)[1] == 1:
        return operand
    zero = builder.scalar(0, shapes.S32)
    starts = [zero] * len(result.dimensions)
    return builder.make("dynamic-slice", result, [operand, *starts], dynamic_slice_sizes=result.dimensions)


def _same(builder: Builder, operand: Instruction, result: Any) -> Instruction:
    return operand


def _changed(operand: Instruction, result: Any) -> tuple[int, int]:
    """The dimension in which operand and result differ, and the factor; (0, 1) if the shapes are equal."""
    for dimension, (a, b) in enumerate(zip(operand.shape.dimensions, result.dimensions, strict=True)):
        if a != b:
            return dimension, max(a, b) // min(a, b)
    return 0, 1


_COPIES: dict[str, Callable[[Builder, Instruction, Any], Instruction]] = {
    "all-gather": _repeat,
    "reduce-scatter": _first_part,
    "all-reduce": _same,
    "all-to-all": _same,
    "collective-permute": _same,
    "collective-broadcast": _same,
}
