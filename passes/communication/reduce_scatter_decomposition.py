"""Replaces reduce-scatters by an all-to-all and a local sum, where this is faster than NCCL's kernel.

Before:                                          After, over n devices:
    y = bf16[1,2048,4096] reduce-scatter(x),         t = bf16[1,8192,4096] all-to-all(x), dimensions={1}
            dimensions={1}, to_apply=add             r = bf16[1,4,2048,4096] reshape(t)
                                                     s = f32[1,2048,4096] reduce(convert(r), 0), dimensions={1}
                                                     y = bf16[1,2048,4096] convert(s)

Contract
    Consumes  synchronous reduce-scatters that sum one floating-point array, after partitioning and before fusion.
    Makes     the instructions on the right from each reduce-scatter of at least `min_bytes` bytes. If there is a
              `model`, it must predict that the replacement is faster. XLA fuses the last three steps with the users of
              y.
    Leaves    other reduce-scatters, with a note for each reason.

Why it is legal: part k of device d's operand is d's contribution to device k's result. The all-to-all gives each device
its part of all operands. The device adds them in float32 (float64 for float64), in device order. So a bfloat16 sum is
rounded to bfloat16 once. A bfloat16 reduce-scatter rounds after each addition, so results differ in the last bits.

Why it is faster: NCCL's reduction runs on SMs that an overlapping GEMM needs. An all-to-all on symmetric memory runs on
copy engines (`NCCL_CTA_POLICY=2`) and leaves the SMs to the GEMM. Both collectives send the same number of bytes.
Through host memory, the all-to-all itself is faster, too.

Cost: the sum reads as many bytes as the operand has, and writes 1/n of them. While t lives, it needs the operand's
bytes once more.

The DHelix paper does not describe this replacement; it uses no copy engines. docs/research_log.md states the gain.
"""

from dataclasses import dataclass
from functools import partial

from dhelix.passes.communication import exchange
from dhelix.passes.communication.exchange import Decomposition, array
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, shapes


@dataclass(frozen=True)
class ReduceScatterDecomposition(Decomposition):
    """Replaces reduce-scatters by all-to-all and sum. Options: see `Decomposition`."""

    name = "reduce-scatter-decomposition"

    def run(self, module: HloModule, context: PassContext) -> bool:
        sums: dict[int, Computation] = {}
        return self.replace_all(module, context, "reduce-scatter", _unfit, partial(_decompose, sums=sums))


def _unfit(scatter: Instruction) -> str:
    """Why `scatter` cannot be replaced; "" if it can."""
    if not shapes.is_floating(scatter.shape):
        return "its type is not floating point"
    root = scatter.called[0].root
    if root.opcode != "add" or any(o.opcode != "parameter" for o in root.operands):
        return "its reduction is not a sum"
    return exchange.why_not(scatter)


def _decompose(scatter: Instruction, sums: dict[int, Computation]) -> None:
    """Replaces `scatter` by an all-to-all and a sum. `sums` caches the computation that adds, by element type."""
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
