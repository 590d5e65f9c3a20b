"""Replaces collective-permutes by all-gathers, if devices swap arrays in pairs and the all-gather is faster.

Before, devices 0 and 1 on two stages:                After:
    y = bf16[4096,4096] collective-permute(x),            g = bf16[2,4096,4096] all-gather(x),
            source_target_pairs={{0,1},{1,0}}                     replica_groups={{0,1}}, dimensions={0}
                                                          y = bf16[4096,4096] dynamic-slice(g, 1 - position in the pair)

Contract
    Consumes  synchronous collective-permutes, after partitioning and before fusion. The two devices of each pair
              exchange their arrays. The pairs form an axis of a row-major mesh of all devices. For example, a pipeline
              of two stages has such permutes in its steady state.
    Makes     the all-gather and the slice from each such permute of at least `min_bytes` bytes. If there is a `model`,
              it must predict that the replacement is faster.
    Leaves    other collective-permutes, with a note for each reason.

Why it is legal: each device gathers its own x and its partner's x, and takes the partner's x. No value changes.

Why it is faster: NCCL uses fewer channels for point-to-point messages than for all-gathers. So the all-gather is faster
if data pass through host memory, without peer-to-peer access (docs/research_log.md). Over NVLink, both take the same
time, so permutes stay.

Cost: g has twice the bytes of y. The slice is a copy unless XLA fuses it.

The papers do not describe this replacement; their pipelines send messages point to point. docs/research_log.md states
the gain.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.analysis.dimension_factors import dense, reshaped
from dhelix.passes.communication import exchange
from dhelix.passes.communication.collective_matmul.pattern import row_major_axis
from dhelix.passes.communication.exchange import Decomposition
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, HloModule, Instruction, shapes


@dataclass(frozen=True)
class PermuteDecomposition(Decomposition):
    """Replaces swaps by all-gathers of pairs. Options: see `Decomposition`."""

    name = "permute-decomposition"

    def run(self, module: HloModule, context: PassContext) -> bool:
        return self.replace_all(module, context, "collective-permute", _unfit, _decompose)

    def why_none(self, module: HloModule) -> str:
        """Why all swaps stay if compute should hide them: there is no cost model. Returns "" if there is one.

        A faster all-gather takes no time from compute, so a replacement helps even if compute takes longer.
        """
        return "" if self.model is not None else exchange.UNMEASURED


def _unfit(permute: Instruction) -> str:
    """Why `permute` cannot be replaced; "" if it can."""
    if len(permute.operands) != 1 or shapes.is_tuple(permute.shape):
        return "it has several operands"
    if not permute.proto.channel_id:
        return "it runs over replicas, not partitions"
    if not exchange.is_swap(device_groups(permute)):
        return "its pairs do not swap"
    pairs = _pairs(permute)
    if 2 * len(pairs) != permute.computation.module.partitions:  # other devices would get zeros
        return "its pairs do not cover all devices"
    return "" if row_major_axis(pairs) is not None else "its pairs are not an axis of a row-major mesh"


def _pairs(permute: Instruction) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(pair for pair in device_groups(permute) if pair[0] < pair[1]))


def _decompose(permute: Instruction) -> None:
    """Replaces `permute` by an all-gather and a slice."""
    builder, (operand,), pairs = Builder(permute.computation), permute.operands, _pairs(permute)
    axis, kind, own = row_major_axis(pairs), permute.shape.element_type, list(permute.shape.dimensions)
    assert axis is not None  # checked by _unfit
    one = reshaped(builder, operand, [1, *own])
    gathered = builder.make("all-gather", dense(kind, [2, *own]), [one], dimensions=[0])
    gathered.proto.channel_id = permute.proto.channel_id
    gathered.proto.use_global_device_ids = True
    for pair in pairs:
        gathered.proto.replica_groups.add(replica_ids=pair)

    def number(value: int) -> Instruction:
        return builder.scalar(value, shapes.U32)

    device = builder.make("partition-id", shapes.scalar(shapes.U32))
    place = builder.binary("remainder", builder.binary("divide", device, number(axis[2])), number(2))
    starts = [builder.binary("subtract", number(1), place), *(number(0) for _ in own)]
    part = builder.make("dynamic-slice", dense(kind, [1, *own]), [gathered, *starts], dynamic_slice_sizes=[1, *own])
    taken = reshaped(builder, part, own)
    for made in (gathered, part, taken):
        made.proto.metadata.CopyFrom(permute.proto.metadata)
    exchange.put_in_place(permute, gathered, taken)
