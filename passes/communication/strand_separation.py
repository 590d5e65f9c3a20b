"""Keeps XLA from combining a collective of one strand with a collective of the other strand.

Before:                                          After:
    a = all-gather(x)    of strand alpha             a = all-gather(x), combiner_key="strand_alpha"
    b = all-gather(y)    of strand beta              b = all-gather(y), combiner_key="strand_beta"

XLA's combiners merge independent collectives into one, up to 30 MiB of results. Collectives of the two strands are
independent. But if they are merged, each strand waits for the other, and nothing is left to overlap. Combiners never
merge collectives with different values of `combiner_key`, a frontend attribute of XLA.

Contract
    Consumes  the partitioned program before combiners run, so that it includes collectives of XLA's partitioner.
    Makes     the attribute on collectives whose name stack contains a strand's name. A value that the user set is kept
              as a part of the new value.
    Leaves    everything else. XLA may still combine collectives of the same strand, and collectives of no strand.

Why it is legal: the attribute is a hint. Cost: one kernel launch for each pair of collectives that XLA would have
combined. DHelix section 4.1 (arXiv 2411.15871) pairs operators of the two strands. A combined collective would belong
to both strands.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.collectives import keep_apart
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule

_COMBINED = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class StrandSeparation:
    """Sets XLA's attribute `combiner_key` on collectives of the strands, so that they stay apart. No options."""

    name = "strand-separation"
    stage = Stage.PRE_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        counts = dict.fromkeys((ALPHA, BETA), 0)
        for computation in module.computations:
            for instruction in computation.instructions:
                if instruction.opcode not in _COMBINED:
                    continue
                for strand in counts:
                    if f"{strand}/" in instruction.op_name:
                        keep_apart(instruction, strand)
                        counts[strand] += 1
        if any(counts.values()):
            context.note("collectives of the strands are not combined with each other", **counts)
        return any(counts.values())
