"""A baseline order for strand pairing: Wavelet+ of DHelix section 6.1 (arXiv 2411.15871).

Operators of the two strands take turns in XLA's order, whatever they cost. Program and costs are those of strand
pairing:

    forward     norm   all-gather   product   attention   ...        norm, wgrad, all-gather, product, product, ...
    backward    wgrad  product      product   reduce-scatter         one of each at a time; the longer rest follows

So a collective overlaps with the operators that follow it, until one of them needs its result. If the next operator of
a strand needs an operator that has not been placed yet, the other strand continues. Bodies without two strands keep
XLA's order.

Legality and memory are as for any order (`passes/ordering/order_rules.py`). As a baseline, the order is applied even if
it is predicted to be slower. An order that needs more memory than allowed is not applied, and a note says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.evaluation.costs import CostModel, costs_of
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, Limits, apply_order
from dhelix.passes.ordering.order_search import OrderSearch
from dhelix.passes.ordering.strand_sequences import find_strands
from dhelix.profiles.hardware import H200, Hardware


@dataclass(frozen=True)
class RoundRobin:
    """The pass. Attributes are as in `CollectiveSchedule`. Costs only decide which instructions are operators."""

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = MEMORY_SLACK
    model: CostModel | None = None
    max_in_flight: int | None = None

    name = "round-robin"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = costs_of(self.hardware, self.model)
        limits = self.memory_limit, self.memory_slack, None, self.max_in_flight
        return apply_order(module, context, round_robin, costs, *limits)


def round_robin(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
) -> list[Instruction]:
    """Operators of both strands in turn, forward first; `sequence` itself if there are not two strands."""
    body = find_strands(computation, sequence, costs, limits)
    if not body.second.operators:
        return list(sequence)
    waiting = [list(body.first.operators), list(body.second.operators)]
    laid: dict[int, None] = {}
    turn = 0
    while any(waiting):
        able = [s for s in (turn, 1 - turn) if waiting[s] and waiting[s][0].needs <= laid.keys()]
        laid[waiting[able[0]].pop(0).number] = None
        turn = 1 - able[0]
    return OrderSearch(body, costs, limits).sequence(laid)
