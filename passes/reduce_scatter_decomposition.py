"""Reduce-scatters as an all-to-all and a sum of one's own, where the links are faster without NCCL's kernel.

Before:                                          After, over n devices:
    y = bf16[1,2048,4096] reduce-scatter(x),         t = bf16[1,8192,4096] all-to-all(x), dimensions={1}
            dimensions={1}, to_apply=add             r = bf16[1,4,2048,4096] reshape(t)
                                                     s = f32[1,2048,4096] reduce(convert(r), 0), dimensions={1}
                                                     y = bf16[1,2048,4096] convert(s)

Contract
    Consumes  plain reduce-scatters of one array of floats that add, after partitioning and before fusion.
    Makes     of each that `model` prices higher than what takes its place, or that has `min_bytes` where there is no
              model, the four instructions on the right. XLA fuses the last three with what reads y.
    Leaves    the others, with a note for each reason.

Why it is legal: part k of device d's operand is what d adds to device k's result. The all-to-all hands every device
its part of all operands, and it adds them in float32, in the order of the devices. So the sum is rounded once, where a
reduce-scatter in bfloat16 rounds after each addition; results differ in the last bits.

Why at all: a reduction runs on SMs, those of a GEMM beside it. An all-to-all on symmetric memory is done by copy
engines (`NCCL_CTA_POLICY=2`), which leave the SMs to the GEMM, and both send the same bytes. It costs one pass over
memory of 1 + 1/n of the operand, and needs the operand's bytes once more while it lives.

Beyond the paper: DHelix has no copy engines. docs/benchmarks.md says what it brings.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dhelix.passes.collectives import GROUP_FIELDS, find_collective
from dhelix.passes.costs import CostModel
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, Shape, edit, shapes
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.operator_keys import OperatorKeys
from dhelix.profiles import roofline
from dhelix.profiles.keys import CollectiveKey


@dataclass(frozen=True)
class ReduceScatterDecomposition:
    """Reduce-scatters as all-to-all and sum.

    Attributes:
      model: costs that decide. They count for their launch setting alone, so it must be the process's.
      min_bytes: without a model, the smallest operand on one device. Small messages cost latency, not bandwidth.
    """

    model: CostModel | None = None
    min_bytes: int = 4 << 20

    name = "reduce-scatter-decomposition"
    stage = Stage.PRE_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        done, left = 0, Counter[str]()
        sums: dict[int, Computation] = {}
        for computation in list(module.computations):
            for scatter in [i for i in computation.instructions if i.opcode == "reduce-scatter"]:
                reason = _unfit(scatter) or self._too_dear(scatter)
                if reason:
                    left[reason] += 1
                    continue
                _decompose(scatter, sums)
                done += 1
        for reason, count in sorted(left.items()):
            context.note(f"left alone: {reason}", count=count)
        if done:
            context.note("reduce-scatters are now all-to-alls and sums", count=done)
        return bool(done)

    def _too_dear(self, scatter: Instruction) -> str:
        if self.model is None:
            size = shapes.byte_size(scatter.operands[0].shape)
            return "" if size >= self.min_bytes else f"smaller than {self.min_bytes} bytes"
        hardware = self.model.hardware
        key = OperatorKeys(hardware.gpus_per_node, self.model.implementation)[scatter]
        if not isinstance(key, CollectiveKey):
            return "no key to look its cost up by"
        exchange = replace(key, kind="all-to-all")
        moved = key.bytes + key.bytes // key.group_size
        seconds = self.model.estimator.solo(exchange).seconds + roofline.memory_seconds(moved, hardware)
        return "" if seconds < self.model.estimator.solo(key).seconds else "not faster as all-to-all and sum"


def _unfit(scatter: Instruction) -> str:
    """Why `scatter` has no such form; "" if it has."""
    if len(scatter.operands) != 1 or shapes.is_tuple(scatter.shape):
        return "several arrays at once"
    if not shapes.is_floating(scatter.shape):
        return "not of floating point numbers"
    root = scatter.called[0].root
    if root.opcode != "add" or any(o.opcode != "parameter" for o in root.operands):
        return "another reduction than a sum"
    if not scatter.proto.channel_id:
        return "over replicas, not partitions"
    group = find_collective(scatter).group_size(default=0)  # type: ignore[union-attr]
    dimension = scatter.proto.dimensions[0]
    if group * scatter.shape.dimensions[dimension] != scatter.operands[0].shape.dimensions[dimension]:
        return "its groups do not say how many parts there are"
    return ""


def _decompose(scatter: Instruction, sums: dict[int, Computation]) -> None:
    """Puts the four instructions in the place of `scatter`. `sums`: computations that add, by element type."""
    computation, (operand,) = scatter.computation, scatter.operands
    builder, dimension = Builder(computation), scatter.proto.dimensions[0]
    size = scatter.shape.dimensions[dimension]
    by_part = [*scatter.shape.dimensions]
    by_part.insert(dimension, operand.shape.dimensions[dimension] // size)
    narrow = scatter.shape.element_type
    wide = narrow if narrow in (shapes.F32, shapes.F64) else shapes.F32
    if wide not in sums:
        sums[wide] = _sum(computation.module, wide)

    exchange = builder.make("all-to-all", _array(narrow, operand.shape.dimensions), [operand], dimensions=[dimension])
    exchange.proto.channel_id = scatter.proto.channel_id
    for field in GROUP_FIELDS:
        getattr(exchange.proto, field).MergeFrom(getattr(scatter.proto, field))
    parts = builder.make("reshape", _array(narrow, by_part), [exchange])
    if wide != narrow:
        parts = builder.make("convert", _array(wide, by_part), [parts])
    operands = [parts, builder.number(0.0, wide)]
    total = builder.make(
        "reduce", _array(wide, scatter.shape.dimensions), operands, called=[sums[wide]], dimensions=[dimension]
    )
    if wide != narrow:
        total = builder.make("convert", _array(narrow, scatter.shape.dimensions), [total])
    for made in (exchange, parts, total):
        made.proto.metadata.CopyFrom(scatter.proto.metadata)
    exchange.control_predecessors = scatter.control_predecessors
    for other in computation.instructions:
        other.control_predecessors = [total if p is scatter else p for p in other.control_predecessors]
    edit.replace_uses(computation, scatter, total)
    computation.instructions.remove(scatter)


def _sum(module: HloModule, element_type: int) -> Computation:
    builder = Builder(module.new_computation("sum"))
    a, b = (builder.parameter(n, shapes.scalar(element_type)) for n in (0, 1))
    return builder.finish(builder.binary("add", a, b))


def _array(element_type: int, dimensions: Iterable[int]) -> Any:
    return Shape(element_type=element_type, dimensions=dimensions)
