"""Keeps XLA from combining a collective of one strand with a collective of the other.

Before:                                          After:
    a = all-gather(x)    of strand alpha             a = all-gather(x), combiner_key="strand_alpha"
    b = all-gather(y)    of strand beta              b = all-gather(y), combiner_key="strand_beta"

XLA's combiners make one collective of several that do not depend on each other, up to 30 MiB of results; those of the
two strands are such. Then each strand waits for the other, and no two are left to run beside each other. Combiners
leave apart what has another `combiner_key`, a frontend attribute of XLA's own.

Contract
    Consumes  the partitioned program, before combiners, so that collectives which XLA's partitioner made are seen too.
    Makes     the attribute, on collectives whose name holds a strand. One that the user has set is kept in it.
    Leaves    everything else: collectives of one strand may still be combined, as may those of neither.

Why it is legal: it is a hint. It costs what combining would save, one launch of a kernel for each pair (DHelix section
4.1 pairs the strands' operators; a combined collective belongs to both).
"""

from dataclasses import dataclass

from dhelix.passes.analysis.collectives import keep_apart
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule

_COMBINED = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class StrandSeparation:
    """No options."""

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
