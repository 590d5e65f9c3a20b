"""Keeps the two strands in step, layer by layer, in models without layer loops (their layers are unrolled).

Before, in the strand loop (straight-line code):     After:
    dx3 = layer 3 backward(dx4)      alpha               dx3, x1, dw3 = opt-barrier(dx3, x1, dw3)
    dx2 = layer 2 backward(dx3)                          dx2 = layer 2 backward(dx3)
    x1  = layer 0 forward(x0)        beta                x2  = layer 1 forward(x1)
    x2  = layer 1 forward(x1)                            dx2, x2, dw2 = opt-barrier(dx2, x2, dw2)

The strand loop is the loop over micro-batches that runs both strands. In iteration i, strand alpha is B(i-1), the
backward pass of micro-batch i-1. Strand beta is F(i), the forward pass of micro-batch i.

Contract
    Consumes  a strand loop whose body holds operations of both strands and no loop with matrix products.
    Makes     one barrier for each pair of cuts: the n-th cut of forward and of backward. A cut is a value on which all
              later work of its strand depends: the hidden state between layers, or the gradient of that state. Between
              two matrix products there is at most one cut. The barrier also takes the results that strand alpha has
              finished by then, such as sums of weight gradients.
    Leaves    strand loops that hold layer loops (merged layer loops are in step already), and strands that depend on
              each other.

Why it is legal: a barrier returns its operands unchanged. Barriers create no cycle. The strands do not depend on each
other, and each strand's cuts are ordered. So a barrier depends only on earlier barriers.
Cost: a barrier itself costs nothing. Without barriers XLA's scheduler runs all of F(i) and then B(i-1), so the
residuals of two micro-batches are alive. With barriers, a residual of F(i) can reuse the buffer of a residual that
B(i-1) has read. If that buffer belongs to another layer, XLA later copies the residual to the buffer of its own layer.
This happens to about half of the residuals, once per micro-batch.
Source: DHelix, section 4.1 (arXiv 2411.15871).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.passes.analysis.names import ALPHA, BETA, LAYERS
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, graph, shapes

_WORK = frozenset("dot ragged-dot convolution".split())


@dataclass(frozen=True)
class StrandLockstep:
    """This pass has no options."""

    name = "strand-lockstep"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in [i for i in computation.instructions if i.opcode == "while"]:
                barriers = 0 if loop.name.startswith(LAYERS) else _tie(loop)
                if barriers:
                    context.note("strands in lockstep", loop, barriers=barriers)
                    changed = True
        return changed


def _tie(loop: Instruction) -> int:
    """Ties the strands in the body of `loop` by barriers. Returns the number of barriers."""
    body = loop.called[0]
    body.sort()
    alpha, beta = ([i for i in body.instructions if i.op_name.startswith(s)] for s in (ALPHA, BETA))
    if not alpha or not beta or any(i.opcode == "while" and _works(i) for i in body.instructions):
        return 0
    if not graph.descendants(body, alpha).isdisjoint(beta) or not graph.descendants(body, beta).isdisjoint(alpha):
        return 0  # a merged loop without matrix products, such as one that draws random bits, joins the strands
    state = WhileLoop(loop)
    read = [i for i, k in state.reads.items() if k not in state.invariants]
    pairs = _pair(_cuts(body, [*read, *beta]), _cuts(body, [*read, *alpha]))
    finished = _finished_before(body, alpha, [backward for _, backward in pairs])
    builder = Builder(body)
    behind: dict[Instruction, Instruction] = {}
    fences: set[Instruction] = set()
    for pair, results in zip(pairs, finished, strict=True):
        after = builder.barrier([*pair, *results])
        fences.add(after[0].operands[0].operands[0])
        behind.update(zip(pair, after[:2], strict=True))
        for result, tied in zip(results, after[2:], strict=True):  # only the root reads results from the barrier
            body.root.operands = [tied if o is result else o for o in body.root.operands]
    for instruction in body.instructions:
        if instruction not in fences:
            instruction.operands = [behind.get(o, o) for o in instruction.operands]
    body.sort()
    return len(pairs)


def _pair(forward: list[Instruction], backward: list[Instruction]) -> list[tuple[Instruction, Instruction]]:
    """Pairs the n-th cuts of both strands.

    If one strand has about r times as many cuts as the other (r = 2 under remat), takes every r-th cut of that strand.
    The remaining cuts get no partner. They lie outside of the layers.
    """
    if not forward or not backward:
        return []
    ratio = len(forward) / len(backward)
    every, other = max(1, round(ratio)), max(1, round(1 / ratio))
    return list(zip(forward[every - 1 :: every], backward[other - 1 :: other], strict=False))


def _cuts(body: Computation, strand: list[Instruction]) -> list[Instruction]:
    """The cuts of a strand, in order: values on which all later work of the strand depends.

    If there are several such values between two matrix products, the smallest value is the cut. Values before the first
    matrix product are not cuts, and the last value of the main path (`_main_path`) is not a cut.
    """
    last, path = _main_path(body, {i for i in strand if _carries(i)})
    users = body.users()
    position = {i: n for n, i in enumerate(body.instructions)}
    found: dict[int, Instruction] = {}
    work, open_until = 0, -1
    for i in (i for i in body.instructions if i in path):
        work += _works(i)
        if work and open_until <= position[i] and i is not last and not shapes.is_tuple(i.shape):
            best = found.get(work)
            if best is None or shapes.byte_size(i.shape) <= shapes.byte_size(best.shape):
                found[work] = i
        open_until = max([open_until, *(position[u] for u in users[i] if u in path)])
    return list(found.values())


def _main_path(body: Computation, members: set[Instruction]) -> tuple[Instruction | None, set[Instruction]]:
    """The last instruction of a strand's main path, and the main path.

    The longest chain of dependent `members` that ends in a matrix product determines the main path. The path consists
    of all members that depend on the first instruction of this chain, and on which the last instruction depends.

    Returns:
      The last instruction, and the main path. If no member is a matrix product, these are None and an empty set.
    """
    depth: dict[Instruction, int] = {}
    first: dict[Instruction, Instruction] = {}  # the start of the longest chain to each instruction
    for i in (i for i in body.instructions if i in members):
        before = max((o for o in i.operands if o in depth), key=lambda o: depth[o], default=None)
        depth[i] = 1 if before is None else depth[before] + 1
        first[i] = i if before is None else first[before]
    last = max((i for i in depth if _works(i)), key=lambda i: depth[i], default=None)
    if last is None:
        return None, set()
    path = {first[last]}
    for i in (i for i in body.instructions if i in members):
        if not path.isdisjoint(i.operands):
            path.add(i)
    leads_on = {last}
    for i in (i for i in reversed(body.instructions) if i in leads_on):
        leads_on.update(o for o in i.operands if o in path)
    return last, path & leads_on


def _finished_before(body: Computation, alpha: list[Instruction], cuts: list[Instruction]) -> list[list[Instruction]]:
    """For each cut of strand alpha, the elements of the new loop state that are finished when this cut is made.

    These elements depend on all earlier cuts but not on this cut.
    """
    number = {cut: n for n, cut in enumerate(cuts)}
    needed: dict[Instruction, int] = {}  # how many cuts an instruction depends on
    for i in body.instructions:
        needed[i] = max((needed[o] + (o in number) for o in i.operands), default=0)
    finished: list[list[Instruction]] = [[] for _ in cuts]
    members = set(alpha)
    for value in dict.fromkeys(body.root.operands):
        if value in members and value not in number and needed[value] < len(cuts):
            finished[needed[value]].append(value)
    return finished


def _carries(instruction: Instruction) -> bool:
    """Whether `instruction` can be a hidden state: a floating-point array, or a tuple of a call's results."""
    shape = instruction.shape
    return shapes.is_tuple(shape) or (shapes.is_floating(shape) and shapes.element_count(shape) > 1)


def _works(instruction: Instruction) -> bool:
    inside: Iterable[Instruction] = (i for c in instruction.called for i in graph.walk(c))
    return instruction.opcode in _WORK or any(i.opcode in _WORK for i in inside)
