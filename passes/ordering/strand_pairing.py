"""Strand pairing: reorders two strands so that each hides the other's communication (DHelix section 4.2).

The pass cuts the operators of each strand into segments, and pairs the segments by dynamic programming:

    forward     | norm  all-gather      | product  attention  | product  reduce-scatter |
    backward    | product (wgrad)       | all-gather          | product  product        |

Contract
    Consumes  scheduled computations with async collectives. Two strands that share no value become two sequences of
              operators (`strand_sequences.py`). Otherwise all operators form one strand.
    Makes     another order of the same instructions; `plan_body` returns it as data.
    Leaves    XLA's order, if the evaluator finds no order that is faster. Legality and memory limits are those of
              `order_rules.py`.

1. Equation 2 is solved for pairs of candidate orders of the strands. The cuts are part of the search
   (`pairing_table.py`). P, the time of two segments from idle lanes to idle lanes, is simulated with the rates of
   measured pairs. It is simulated in two launch orders: with the compute of either strand first. Plans in which the
   live values at a barrier exceed the memory limit are left out.
2. Local search improves the result, because the cuts are barriers only in the model. It starts from the fastest of
   these orders: the plans, the order of `list_order`, and XLA's order. It moves single operators and waits, as long
   as the evaluator says that the whole order gets faster without barriers (`order_search.py`). A single strand is
   searched, too. Bodies of many layers are solved layer by layer (`layer_search.py`).
3. The result is the fastest order that fits into memory: the improved order, the order of `list_order`, or XLA's order.
   So, by the evaluator, the result is never slower than the other two orders if these fit.

The pass is deterministic: the order depends only on costs and sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import CostModel, costs_of
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.body_plan import BodyPlan, segments_of
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.layer_search import orders_by_layer
from dhelix.passes.ordering.order_rules import (
    MEMORY_SLACK,
    Limits,
    apply_order,
    few_in_flight,
    least_gain,
    starts_behind_ends,
)
from dhelix.passes.ordering.order_search import Order, OrderSearch
from dhelix.passes.ordering.pairing_table import pair
from dhelix.passes.ordering.strand_sequences import Operator, Strand, find_strands
from dhelix.profiles.hardware import H200, Hardware

PAIRED_NOTE, ORDERED_NOTE = (
    "operators of both strands are paired",
    "operators of one strand are ordered",
)  # messages of the notes
_WORK = 36_000  # limit on the work of the improvement (`OrderTiming.work`)
_WORK_SHORT = 18  # work for each pair of operators in a short body
_WORK_LAYER = 2_000  # work for a column of layers of a long body, and least work for a short body
_LONG = 120  # bodies with more operators are solved layer by layer


@dataclass(frozen=True)
class StrandPairing:
    """Pairs the operators of two strands.

    Attributes:
      hardware, memory_limit, memory_slack, min_gain, model, max_in_flight: the same as in `CollectiveSchedule`.
      max_segment: the largest number of operators of one strand in a segment.
    """

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = MEMORY_SLACK
    min_gain: float = 0.02
    model: CostModel | None = None
    max_segment: int = 3
    max_in_flight: int | None = None

    name = "strand-pairing"
    stage = Stage.POST_SCHEDULER
    strands = 2  # the largest number of strands

    def __post_init__(self) -> None:
        if self.max_segment < 1:
            raise DhelixError(f"max_segment={self.max_segment} leaves no segments; give 1 or more, such as 3")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise DhelixError(f"max_in_flight={self.max_in_flight} allows no collective; give 1 or more, or None")

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = costs_of(self.hardware, self.model)
        order = partial(pairing_order, max_segment=self.max_segment, strands=self.strands, context=context)
        limits = self.memory_limit, self.memory_slack, least_gain(self.min_gain, costs), self.max_in_flight
        return apply_order(module, context, order, costs, *limits)


def pairing_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    max_segment: int = 3,
    strands: int = 2,
    context: PassContext | None = None,
) -> list[Instruction]:
    """The order of `plan_body`, as a `Scheduler` for `apply_order`. Adds a note on that order to `context`."""
    plan = plan_body(computation, sequence, costs, limits, max_segment, strands)
    if context is not None:
        context.note(PAIRED_NOTE if plan.strands == 2 else ORDERED_NOTE, **plan.facts())
    return list(plan.order)


def plan_body(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    max_segment: int = 3,
    strands: int = 2,
) -> BodyPlan:
    """The fastest order found for one computation: a pairing of its strands, `list_order`, or `sequence`.

    If none of the three fits into memory, the result is the order that needs the least memory.

    Args:
      sequence: XLA's order.
      max_segment: the largest number of operators of one strand in a segment.
      strands: 1 treats all operators as one strand, even if two parts are independent.
    """
    listed = list_order(computation, sequence, costs, limits)
    body = find_strands(computation, sequence, costs, limits, strands)
    search = OrderSearch(body, costs, limits)
    # 1. Equation 2
    found, barriers = _find_orders(search, max_segment)
    number = {head: n for n, head in enumerate(body.heads)}
    if len(number) <= _LONG:
        found += [tuple(range(len(number))), tuple(number[i] for i in listed if i in number)]
    # 2. Local search
    starts = search.fitting(found)
    improved = starts[0][1] if starts else found[-1]
    if starts and len(number) <= _LONG:
        improved = search.improve(starts[0], min(_WORK, max(_WORK_LAYER, _WORK_SHORT * len(number) ** 2)))
    # 3. The fastest order that fits
    most = limits.max_in_flight
    orders = {
        "xla": few_in_flight(sequence, body.before, costs, most),
        "list": starts_behind_ends(few_in_flight(listed, body.before, costs, most), body.before, costs),
        "paired": starts_behind_ends(search.sequence(improved), body.before, costs),
    }
    seconds, peaks = {}, {}
    for name, order in orders.items():
        seconds[name] = simulate(computation, order, costs, limits.hardware, limits.bodies).seconds
        peaks[name] = limits.memory.peak(computation, order)
    fitting = [name for name in orders if peaks[name] <= limits.bytes]
    chosen = min(fitting, key=lambda name: seconds[name]) if fitting else min(peaks, key=lambda name: peaks[name])
    return BodyPlan(
        computation,
        2 if body.second.operators else 1,
        segments_of(body, orders[chosen], costs, limits),
        tuple(orders[chosen]),
        chosen,
        seconds["xla"],
        seconds["list"],
        seconds["paired"],
        barriers,
        peaks[chosen],
        limits.bytes,
    )


def _find_orders(search: OrderSearch, max_segment: int) -> tuple[list[Order], float | None]:
    """Orders from equation 2, and the seconds of the best plan.

    For a long body, the orders come from the layer search (`layer_search.py`), and the seconds are None.
    """
    body = search.body

    def solve(part: OrderSearch, first: Sequence[Operator], second: Sequence[Operator]) -> Order:
        orders, _ = _paired(part, body.first.part(first), body.second.part(second), max_segment)
        return part.improve(part.fitting(orders)[0], _WORK_LAYER)

    if len(body.operators) <= _LONG:
        return _paired(search, body.first, body.second, max_segment)
    return orders_by_layer(body, search.costs, search.limits, solve), None


def _paired(search: OrderSearch, first: Strand, second: Strand, max_segment: int) -> tuple[list[Order], float | None]:
    """Solves equation 2 for pairs of candidate orders. Returns the plans as orders, and the seconds of the best plan.

    The n-th candidate of one strand is paired with the n-th candidate of the other strand. All nine pairs would give a
    faster plan, but not a faster order after `OrderSearch.improve`.
    """
    orders: list[Order] = []
    best = math.inf
    for one, other in dict.fromkeys(zip(first.candidates(), second.candidates(), strict=True)):
        allowed = search.allowed(one, other)
        plan = pair(one, other, lambda f, s: search.segment(f, s)[0], max_segment, allowed, best)
        if plan is not None:
            best = plan.seconds
            paired = [(one[slice(*s.first)], other[slice(*s.second)]) for s in plan.segments]
            orders.append(tuple(n for segments in paired for n in search.segment(*segments)[1]))
    return orders, best if orders else None
