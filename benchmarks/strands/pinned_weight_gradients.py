"""Pins weight gradients, for the ladder of figure 15 of DHelix (arXiv 2411.15871): no order may move them.

    dx = dot(dy, w)   dw = dot(x, dy)   next layer ...        dw runs directly behind the operator that it waits for

`StrandPairing` may let a weight gradient run anywhere until the end of its strand, to hide a collective of either
strand. Behind this pass it cannot: a control dependency puts each weight gradient before the next computing operator
of its strand. Collectives may still start before it.

Contract
    Consumes  scheduled computations with two strands (`strand_sequences.py`). Weight gradients are the floating
              operators: computing operators that nothing in their strand waits for.
    Makes     control dependencies, and XLA's order with weight gradients moved forward.
    Leaves    computations with one strand.

Why it is legal: a weight gradient depends on nothing behind the operator that it waits for.
Cost: orders that are slower; that is what the ladder measures.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import CostModel, costs_of
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.strand_sequences import Operator, Strand, find_strands
from dhelix.profiles.hardware import H200, Hardware


@dataclass(frozen=True)
class PinnedWeightGradients:
    """The pass. It runs before the pass that orders operators. Costs only decide which instructions are operators."""

    hardware: Hardware = H200
    model: CostModel | None = None

    name = "pinned-weight-gradients"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs, memory = costs_of(self.hardware, self.model), Memory(module)
        pinned = 0
        for computation, sequence in list(module.schedule.items()):
            limits = Limits(costs.hardware, memory.arguments, memory)
            body = find_strands(computation, sequence, costs, limits)
            if not body.second.operators:
                continue
            behind: dict[int, list[int]] = {}  # operators that stay in XLA's order, and the pinned ones behind each
            for strand in (body.first, body.second):
                fixed = -1
                for operator, following in _pinned_order(strand):
                    if operator.number not in strand.floating:
                        fixed = operator.number
                        continue
                    behind.setdefault(fixed, []).append(operator.number)
                    if following is not None:
                        body.heads[following].control_predecessors.append(body.heads[operator.number])
                        pinned += 1
            floating = body.first.floating | body.second.floating
            order = behind.pop(-1, [])
            for operator in body.operators:
                if operator.number not in floating:
                    order += [operator.number, *behind.get(operator.number, ())]
            needs = {operator.number: operator.needs for operator in body.operators}
            module.schedule[computation] = body.sequence(_after_needs(order, needs))
        if pinned:
            context.note("weight gradients run where they become ready", operators=pinned)
        return pinned > 0


def _after_needs(order: Sequence[int], needs: Mapping[int, Collection[int]]) -> list[int]:
    """`order`, where an operator that needs a later one comes directly behind it. Strands can share a buffer."""
    waiting, placed = list(order), []
    while waiting:
        ready = next(number for number in waiting if set(needs[number]) <= set(placed))
        waiting.remove(ready)
        placed.append(ready)
    return placed


def _pinned_order(strand: Strand) -> Iterator[tuple[Operator, int | None]]:
    """The operators with floating ones as early as possible, and for each the number of the next computing operator.

    The number is None if there is no such operator, or if the operator also needs the other strand (a shared buffer).
    """
    order = strand.placed(tuple(Lane))
    mine = {o.number for o in order}
    for place, operator in enumerate(order):
        following = (o.number for o in order[place + 1 :] if o.lane is Lane.COMPUTE)
        yield operator, next(following, None) if operator.needs <= mine else None
