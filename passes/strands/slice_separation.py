"""Makes each strand slice shared arrays itself, so that XLA copies a layer's weights while compute runs.

Before, in the merged layer loop:               After:
    a = dynamic-slice(w, l)      of beta            a  = dynamic-slice(w, l)
    b = dynamic-slice(w, L-1-l)  of alpha           w' = opt-barrier(w)
                                                    b  = dynamic-slice(w', L-1-l)

A slice whose start the host can compute becomes an asynchronous copy on its own stream, as in the plain step. XLA fuses
two slices of one array into one kernel, which runs on the compute stream before the products that wait for it. If both
strands run in the same direction, any kernel shared by both, such as one for the angles of rotary embeddings, would
make one strand wait for the other.

Contract
    Consumes  the layer loop of both strands that strand-duplication merged.
    Makes     for each loop-invariant array that both strands slice, a barrier before strand alpha's slices. If both
              strands run in the same direction, the barrier is before all of alpha's reads. An array that enters the
              loop twice counts as one, because XLA makes it one.
    Leaves    everything else. Residuals are sliced where the micro-batch says, which the host cannot compute in
              advance.

Why it is legal: a barrier returns its operand. It copies nothing, since the loop does not change the array.
Cost: copies and products share the memory bandwidth. Separation still pays (docs/research_log.md).
"""

from dataclasses import dataclass

from dhelix.passes.analysis.names import ALPHA, BACKWARD_NAME, BETA, merged_loops
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, HloModule, Instruction, WhileLoop, shapes


@dataclass(frozen=True)
class SliceSeparation:
    """No options."""

    name = "slice-separation"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in merged_loops(computation):
                count = _separate(WhileLoop(loop))
                if count:
                    context.note("each strand slices these arrays by itself", loop, arrays=count)
                    changed = True
        return changed


def _separate(loop: WhileLoop) -> int:
    """Separates the reads in `loop`. Returns the number of arrays that both strands read."""
    users = loop.body.users()
    count = 0
    arrays: dict[Instruction | int, list[Instruction]] = {}
    for read, k in loop.reads.items():
        if k in loop.invariants and shapes.element_count(read.shape) > 1:
            arrays.setdefault(loop.initial(k) or k, []).append(read)
    for reads in arrays.values():
        uses = [(u, r) for r in reads for u in users[r]]
        alpha, beta = ([(u, r) for u, r in uses if f"{strand}/" in u.op_name] for strand in (ALPHA, BETA))
        if not _same_way([u for u, _ in (*alpha, *beta)]):
            alpha, beta = ([(u, r) for u, r in one if u.opcode == "dynamic-slice"] for one in (alpha, beta))
        if not alpha or not beta:
            continue
        count += 1
        (behind,) = Builder(loop.body).barrier([alpha[0][1]])
        for user, read in alpha:
            user.operands = [behind if o is read else o for o in user.operands]
    loop.body.sort()
    return count


def _same_way(users: list[Instruction]) -> bool:
    """Whether all users are forward, or all are backward."""
    return len({BACKWARD_NAME in user.op_name for user in users}) < 2
