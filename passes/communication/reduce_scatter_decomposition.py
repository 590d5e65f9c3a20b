"""Reduce-scatters as an all-to-all and a sum of one's own, where the links are faster without NCCL's kernel.

Before:                                          After, over n devices:
    y = bf16[1,2048,4096] reduce-scatter(x),         t = bf16[1,8192,4096] all-to-all(x), dimensions={1}
            dimensions={1}, to_apply=add             r = bf16[1,4,2048,4096] reshape(t)
                                                     s = f32[1,2048,4096] reduce(convert(r), 0), dimensions={1}
                                                     y = bf16[1,2048,4096] convert(s)

Contract
    Consumes  plain reduce-scatters of one array of floats that add, after partitioning and before fusion.
    Makes     of each of `min_bytes` or more that `model`, if there is one, prices higher than what takes its place, the
              four instructions on the right. XLA fuses the last three with what reads y.
    Leaves    the others, with a note for each reason.

Why it is legal: part k of device d's operand is what d adds to device k's result. The all-to-all hands every device
its part of all operands, and it adds them in float32, in the order of the devices. So the sum is rounded once, where a
reduce-scatter in bfloat16 rounds after each addition; results differ in the last bits.

Why at all: a reduction runs on SMs, those of a GEMM beside it. An all-to-all on symmetric memory is done by copy
engines (`NCCL_CTA_POLICY=2`), which leave the SMs to the GEMM, and both send the same bytes; through host memory it is
faster. It costs one pass over memory of 1 + 1/n of the operand, and needs the operand's bytes once more while it lives.

Beyond the paper: DHelix has no copy engines. docs/benchmarks.md says what it brings.
"""

from dataclasses import dataclass
from functools import partial

from dhelix.passes.communication import exchange
from dhelix.passes.communication.exchange import Decomposition, array
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, shapes


@dataclass(frozen=True)
class ReduceScatterDecomposition(Decomposition):
    """Reduce-scatters as all-to-all and sum; options as of `Decomposition`."""

    name = "reduce-scatter-decomposition"

    def run(self, module: HloModule, context: PassContext) -> bool:
        sums: dict[int, Computation] = {}
        return self.replace_all(module, context, "reduce-scatter", _unfit, partial(_decompose, sums=sums))


def _unfit(scatter: Instruction) -> str:
    """Why `scatter` has no such form; "" if it has."""
    if not shapes.is_floating(scatter.shape):
        return "not of floating point numbers"
    root = scatter.called[0].root
    if root.opcode != "add" or any(o.opcode != "parameter" for o in root.operands):
        return "another reduction than a sum"
    return exchange.why_not(scatter)


def _decompose(scatter: Instruction, sums: dict[int, Computation]) -> None:
    """Puts the four instructions in the place of `scatter`. `sums`: computations that add, by element type."""
    builder, (operand,), dimension = Builder(scatter.computation), scatter.operands, scatter.proto.dimensions[0]
    size = scatter.shape.dimensions[dimension]
    by_part = [*scatter.shape.dimensions]
    by_part.insert(dimension, operand.shape.dimensions[dimension] // size)
    narrow = scatter.shape.element_type
    wide = narrow if narrow in (shapes.F32, shapes.F64) else shapes.F32
    if wide not in sums:
        sums[wide] = _sum(scatter.computation.module, wide)

    exchanged = exchange.all_to_all(builder, operand, scatter)
    parts = builder.make("reshape", array(narrow, by_part), [exchanged])
    if wide != narrow:
        parts = builder.make("convert", array(wide, by_part), [parts])
    operands = [parts, builder.number(0.0, wide)]
    total = builder.make(
        "reduce", array(wide, scatter.shape.dimensions), operands, called=[sums[wide]], dimensions=[dimension]
    )
    if wide != narrow:
        total = builder.make("convert", array(narrow, scatter.shape.dimensions), [total])
    for made in (exchanged, parts, total):
        made.proto.metadata.CopyFrom(scatter.proto.metadata)
    exchange.put_in_place(scatter, exchanged, total)


def _sum(module: HloModule, element_type: int) -> Computation:
    builder = Builder(module.new_computation("sum"))
    a, b = (builder.parameter(n, shapes.scalar(element_type)) for n in (0, 1))
    return builder.finish(builder.binary("add", a, b))
