"""The bound of the exact model, for one order of the collectives at a time.

Which compute hides which collective depends mainly on the order of the collectives on their lane. If that order is left
open, the relaxation `model.Overlap` mixes several orders in fractions. This weakens its bound. A layer has few such
orders, since most of its collectives depend on one another: two strands of four collectives have 70 orders. So each
order gets its own bound, with constraints that hold in that order only. The least of these bounds counts.

    lane         | gather a |   | gather b | scatter c |
    compute      x     | y       | z                      | w

In the picture, y begins before a is done, and ends after a is done and before b is done. For each compute and each
collective, variables tell whether the compute begins, and whether it ends, after the collective is done. These
constraints hold for the variables:

- Compute meets a collective only if the compute ends after the previous collective is done and begins before this
  collective is done.
- Compute that depends on other compute begins after the other has ended.
- If compute begins before a is done and ends after b is done, b lies completely within that compute.
- A collective begins while compute runs only if the previous collective on the lane ends during that compute.

*The bound is valid.* Every legal order of instructions has one order of collectives per lane. The begin and end times
of the legal order define these variables, and all constraints are true statements about such times. If no legal order
with a given order of the collectives is faster than the best known order, that order of the collectives does not lower
the bound. CP-SAT's effort first goes to all orders of the collectives equally, then to the one with the least bound.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dhelix.passes.ordering.exact.model import NANO, Overlap
from dhelix.passes.ordering.exact.problem import Problem

_MOST = 250  # limit on the orders of collectives; if there are more, the order is left open
_ENOUGH = 0.02  # a gap below this fraction of the best known time is good enough with an open order
_OPEN, _FIRST = 0.18, 0.68  # fractions of the effort: open order, all orders equally; the rest raises the least bound
_AGAIN = 1.5  # growth of the effort each time the order with the least bound is solved again
_LEAST = 1e-3  # effort that each bound costs at least, so that the loop ends


class OrderedOverlap(Overlap):
    """`Overlap` with a fixed order of the collectives. Each of `lanes` lists the collectives of a lane in order."""

    def __init__(self, cp_sat: Any, problem: Problem, horizon: float, lanes: Sequence[Sequence[int]]) -> None:
        super().__init__(cp_sat, problem, horizon)
        compute = range(len(problem.compute))
        before = [problem.compute_before(x) for x in compute]
        for lane in lanes:
            for one, other in itertools.pairwise(lane):
                self.model.add(self.earlier[one, other] == 1)
            # By compute and collective: whether the compute begins, and whether it ends, after the collective is done.
            begins, ends = ([[self.model.new_bool_var("") for _ in lane] for _ in compute] for _ in range(2))
            for x in compute:
                self._place(x, lane, begins[x], ends[x])
                for y in before[x]:
                    for end, begin in zip(ends[y], begins[x], strict=True):
                        self.model.add(end <= begin)

    def _place(self, x: int, lane: Sequence[int], begins: Sequence[Any], ends: Sequence[Any]) -> None:
        """Constraints that place the begin and the end of compute `x` between the collectives of the lane."""
        model, compute = self.model, self.problem.compute[x]
        for n, c in enumerate(lane):
            ways = self.met.get((x, c), ())
            meets = sum(way.so for way in ways)
            model.add(begins[n] <= ends[n])
            model.add(meets + begins[n] <= 1)
            if n:
                within = ways[-1].so if ways and not compute.loop else meets
                model.add(begins[n] <= begins[n - 1])
                model.add(ends[n] <= ends[n - 1])
                model.add(meets <= ends[n - 1])
                model.add(ends[n] - begins[n - 1] <= within)
            if ways:
                model.add(meets + ends[n] <= 1 + self.last[x, c])
                model.add(self.last[x, c] <= ends[n])
            if ways and not compute.loop:
                model.add(ways[-1].so <= (self.last.get((x, lane[n - 1]), 0) if n else 0))
            if self.problem.precedes(compute, self.problem.collectives[c]):
                model.add(ends[n] == 0)
            if self.problem.follows(compute, self.problem.collectives[c]):
                model.add(begins[n] == 1)


def least_makespan(cp_sat: Any, problem: Problem, horizon: float, effort: float) -> int:
    """A lower bound, in nanoseconds, on the time of every order.

    If no order takes less than `horizon` seconds, the bound is `horizon` in nanoseconds.
    """
    bounds = _Bounds(cp_sat, effort)
    bound, solved = bounds.find(Overlap(cp_sat, problem, horizon), _OPEN * effort, 0)
    orders = list(itertools.islice(_orders(problem), _MOST + 1))
    if solved or bound >= (1.0 - _ENOUGH) * horizon * NANO or len(orders) > _MOST:
        return bound
    share = _FIRST * effort / len(orders)
    models = [OrderedOverlap(cp_sat, problem, horizon, order) for order in orders]
    found = [bounds.find(model, share, bound) for model in models]
    shares = [share] * len(models)
    while True:
        least = min(range(len(models)), key=lambda n: (*found[n], shares[n]))
        bound, solved = found[least]
        if solved or bounds.left <= 0.0:
            return bound
        shares[least] *= _AGAIN
        found[least] = bounds.find(models[least], shares[least], bound)


class _Bounds:
    """Finds lower bounds of models until the effort is spent. `left` is the effort that remains."""

    def __init__(self, cp_sat: Any, effort: float) -> None:
        self.cp_sat, self.left = cp_sat, effort

    def find(self, model: Overlap, effort: float, known: int) -> tuple[int, bool]:
        """Returns a lower bound of the makespan in nanoseconds, at least `known`, and whether it is final."""
        solver = self.cp_sat.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 0
        solver.parameters.optimize_with_lb_tree_search = True  # raises the bound instead of looking for solutions
        solver.parameters.max_deterministic_time = max(min(effort, self.left), 0.0)
        status = solver.solve(model.model)
        self.left -= max(solver.deterministic_time, _LEAST)
        if status == self.cp_sat.INFEASIBLE:
            return model.horizon, True
        return max(math.floor(solver.best_objective_bound), known), status == self.cp_sat.OPTIMAL


def _orders(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every order of the collectives of each lane that keeps the required launch order."""
    lanes: dict[Any, list[int]] = {}
    for n, collective in enumerate(problem.collectives):
        lanes.setdefault(collective.lane, []).append(n)
    before = [set(problem.launched_before(c)) for c in problem.collectives]

    def longer(order: tuple[int, ...], lane: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(lane):
            yield order
        for c in lane:
            if c not in order and before[c] <= set(order):
                yield from longer((*order, c), lane)

    return itertools.product(*(list(itertools.islice(longer((), lane), _MOST + 1)) for lane in lanes.values()))
