"""All-gathers as an all-to-all of copies, where that is faster: through host memory.

Before:                                          After, over n = 4 devices:
    y = bf16[1,8192,4096] all-gather(x),             c = bf16[1,4,2048,4096] broadcast(x)
            dimensions={1}                           t = bf16[1,8192,4096] reshape(c)
                                                     y = bf16[1,8192,4096] all-to-all(t), dimensions={1}

Contract
    Consumes  plain all-gathers of one array, after partitioning and before fusion.
    Makes     of each of `min_bytes` or more that `model`, if there is one, prices higher than what takes its place, the
              three instructions on the right.
    Leaves    the others, with a note for each reason.

Why it is legal: every part of t is x, so what comes from device k is device k's x, in the place where the all-gather
puts it. No number is touched.

Why at all: NCCL gathers in a ring, in which what device k has passes through all others, and through host memory each
time. With an all-to-all it goes there directly: 29 GB/s of bus bandwidth instead of 23 on 4 H200s without peer-to-peer
(docs/profiles.md). Over NVLink, and between nodes, all-gathers are as fast or faster, and stay. It costs writing the
gathered array once more, and its bytes once more while it lives.

Beyond the paper, whose collectives are NCCL's. docs/benchmarks.md says what it brings.
"""

from dataclasses import dataclass

from dhelix.passes.communication import exchange
from dhelix.passes.communication.exchange import Decomposition, array
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, HloModule, Instruction


@dataclass(frozen=True)
class AllGatherDecomposition(Decomposition):
    """All-gathers as all-to-all of copies; options as of `Decomposition`."""

    name = "all-gather-decomposition"

    def run(self, module: HloModule, context: PassContext) -> bool:
        return self.replace_all(module, context, "all-gather", exchange.why_not, _decompose)


def _decompose(gather: Instruction) -> None:
    """Puts the three instructions in the place of `gather`."""
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
