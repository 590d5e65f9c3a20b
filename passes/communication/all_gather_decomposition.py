"""Replaces all-gathers by an all-to-all of copies, where the all-to-all is faster.

Before:                                          After, over n = 4 devices:
    y = bf16[1,8192,4096] all-gather(x),             c = bf16[1,4,2048,4096] broadcast(x)
            dimensions={1}                           t = bf16[1,8192,4096] reshape(c)
                                                     y = bf16[1,8192,4096] all-to-all(t), dimensions={1}

Contract
    Consumes  synchronous all-gathers of one array, after partitioning and before fusion.
    Makes     the three instructions on the right from each all-gather of at least `min_bytes` bytes. If there is a
              `model`, it must predict that the replacement is faster.
    Leaves    other all-gathers, with a note for each reason.

Why it is legal: every part of t is x. So the part that arrives from device k is device k's x. It lies at the position
where the all-gather puts it. No value changes.

Why it is faster: NCCL gathers in a ring. A device's data pass through all other devices. Without peer-to-peer access,
each hop goes through host memory. In an all-to-all, the data go to each device directly, with more bandwidth on GPUs
without peer-to-peer access (docs/design/profiling.md). Over NVLink and between nodes, all-gathers are at least as fast
as all-to-alls, so they stay.

Cost: the copies are as large as the gathered array. They are written once, and need memory while they live.

The DHelix paper does not describe this replacement; it uses NCCL's collectives as they are. docs/research_log.md states
the gain.
"""

from dataclasses import dataclass

from dhelix.passes.communication import exchange
from dhelix.passes.communication.exchange import Decomposition, array
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, HloModule, Instruction


@dataclass(frozen=True)
class AllGatherDecomposition(Decomposition):
    """Replaces all-gathers by an all-to-all of copies. Options: see `Decomposition`."""

    name = "all-gather-decomposition"

    def run(self, module: HloModule, context: PassContext) -> bool:
        return self.replace_all(module, context, "all-gather", exchange.why_not, _decompose)


def _decompose(gather: Instruction) -> None:
    """Replaces `gather` by broadcast, reshape and all-to-all."""
    builder, (operand,), dimension = Builder(gather.computation), gather.operands, gather.proto.dimensions[0]
    kind, own = gather.shape.element_type, list(operand.shape.dimensions)
    parts = [*own[:dimension], gather.shape.dimensions[dimension] // own[dimension], *own[dimension:]]
    kept = [n for n in range(len(parts)) if n != dimension]
    copies = builder.make("broadcast", array(kind, parts), [operand], dimensions=kept)
    joined = builder.make("reshape", array(kind, gather.shape.dimensions), [copies])
    exchanged = exchange.all_to_all(builder, joined, gather)
    for made in (copies, joined, exchanged):
        made.proto.metadata.CopyFrom(gather.proto.metadata)
    exchange.put_in_place(gather, copies, exchanged)
