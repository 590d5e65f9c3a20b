"""A baseline order of the plain step: what Megatron-LM hides of tensor parallelism.

    forward     gather | product   attention   product | scatter | gather | product   product | scatter
    backward    gather | product   wgrad | ...   product | scatter + wgrad of that product | ...

Compute waits for each collective (`|`), with one exception: the reduce-scatter behind the product that gives the
gradient of a column-parallel layer's input runs beside this layer's weight gradients (`+`). Megatron-LM runs them on a
second stream and calls that asynchronous communication of tensor parallelism. Sends of ring attention run beside the
attention of the keys at hand, as in the program.

Contract
    Consumes  the scheduled plain step.
    Makes     another order of each computation with async collectives, whatever the evaluator says of it.
    Leaves    memory within the limits of `apply_order`; an order that needs more is not applied, and a note says so.

Which weight gradients wait for a reduce-scatter: weight gradients are operators that nothing in their computation waits
for. One that reads an all-gather is a row-parallel layer's, and runs as soon as it can. Any other waits for the next
reduction of the computation.

Why it is legal: only operators that nothing waits for are moved, behind what they wait for. Legality is that of any
order (`passes/ordering/order_rules.py`). Cost: none that matters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.evaluation.costs import CostModel, costs_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, Limits, apply_order
from dhelix.passes.ordering.order_search import OrderSearch
from dhelix.passes.ordering.strand_sequences import Operator, find_strands
from dhelix.profiles.hardware import H200, Hardware

_REDUCTIONS = ("reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class MegatronOrder:
    """The pass. Attributes are as in `CollectiveSchedule`. Costs only decide which instructions are operators."""

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = MEMORY_SLACK
    model: CostModel | None = None

    name = "megatron-order"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = costs_of(self.hardware, self.model)
        return apply_order(module, context, megatron_order, costs, self.memory_limit, self.memory_slack, None, None)


def megatron_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
) -> list[Instruction]:
    """The operators in XLA's order, with weight gradients beside the reductions that they may run beside."""
    body = find_strands(computation, sequence, costs, limits)
    kinds = [_kind(head) for head in body.heads]
    floating = _unread(body.operators)
    waiting = [o for o in body.operators if o.number in floating]
    laid: dict[int, None] = {}
    for operator in body.operators:
        if operator.number in floating:
            continue
        # 1. The weight gradients that need not wait for a reduction.
        _lay_ready(waiting, laid, lambda o: any(kinds[n] == "all-gather" for n in o.needs))
        # 2. The operator, and beside a reduction all others.
        laid[operator.number] = None
        if kinds[operator.number] in _REDUCTIONS:
            _lay_ready(waiting, laid, lambda o: True)
    laid.update((o.number, None) for o in waiting)
    return OrderSearch(body, costs, limits).sequence(laid)


def _unread(operators: Sequence[Operator]) -> set[int]:
    """The numbers of the computing operators that only operators like them wait for, such as weight gradients.

    Unlike in `Strand.floating`, async stores count, too.
    """
    read = {needed for operator in operators if operator.lane is not Lane.COMPUTE for needed in operator.needs}
    found: set[int] = set()
    for operator in reversed(operators):
        if operator.lane is Lane.COMPUTE and operator.number not in read:
            found.add(operator.number)
        else:
            read |= operator.needs
    return found


def _kind(head: Instruction) -> str:
    found = find_collective(head)
    return found.kind if found else ""


def _lay_ready(waiting: list[Operator], laid: dict[int, None], wanted: Callable[[Operator], bool]) -> None:
    """Moves the wanted operators that can run now from `waiting` to `laid`."""
    for operator in list(waiting):
        if wanted(operator) and operator.needs <= laid.keys():
            laid[operator.number] = None
            waiting.remove(operator)
