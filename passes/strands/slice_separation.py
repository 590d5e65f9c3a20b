"""Makes each strand slice shared arrays separately, so that XLA copies a layer's weights while compute runs.

Before, in the merged layer loop:               After:
    a = dynamic-slice(w, l)      of beta            a  = dynamic-slice(w, l)
    b = dynamic-slice(w, L-1-l)  of alpha           w' = opt-barrier(w)
                                                    b  = dynamic-slice(w', L-1-l)

If the host can compute where a slice starts, XLA makes the slice an asynchronous copy on its own stream. A step without
strands has such copies. But XLA fuses two slices of one array into one kernel on the compute stream, and matrix
products wait for this kernel. If both strands run in the same direction, other kernels can be common to both strands,
too. An example is the kernel that computes the angles of rotary embeddings. A common kernel would make one strand wait
for the other.

Contract
    Consumes  a layer loop that strand-duplication merged from loops of both strands.
    Makes     for each loop-invariant array that both strands slice, a barrier before strand alpha's slices. If both
              strands run in the same direction, the barrier is before all of alpha's reads. If an array enters the loop
              as two state elements, they count as one array, because XLA merges the two elements.
    Leaves    everything else. For example, it leaves slices of residuals. Their start index depends on the micro-batch,
              so the host cannot compute this index in advance.

Why it is legal: a barrier returns its operand. The barrier copies nothing, since the loop does not change the array.
Cost: copies and matrix products share the memory bandwidth. The step is still faster with separate slices
(docs/research_log.md).
"""

from dataclasses import dataclass

from dhelix.passes.analysis.names import ALPHA, BACKWARD_NAME, BETA, merged_loops
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, HloModule, Instruction, WhileLoop, shapes


@dataclass(frozen=True)
class SliceSeparation:
    """This pass has no options."""

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
    """Separates the two strands' reads of common arrays in `loop`. Returns the number of these arrays."""
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
    """Whether all users belong to forward passes, or all users belong to backward passes."""
    return len({BACKWARD_NAME in user.op_name for user in users}) < 2
