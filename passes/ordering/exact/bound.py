"""The bound of the exact model, one order of collectives at a time.

What hides what depends first of all on the order in which collectives use their lane. Left open, that is where the
relaxation of `model.Overlap` cheats: a half of each order is no order. Layers have few orders, since most of
their collectives need one another: two strands of four collectives have 70. So each order is bounded by itself, with
constraints that hold in that order alone, and the least of these bounds counts:

    lane         | gather a |   | gather b | scatter c |
    compute      x     | y       | z                      | w

x begins before a is done and ends after, y ends before b is done: for each end of a collective it is said what compute
has begun by then and what has ended after it. From that follows what can meet what: compute meets a collective only if
it ends after the one before it is done and begins before this one is; what needs y begins after y ended; what began
before a was done and ends after b is done has b within itself; and a collective begins while compute runs only if the
one before it on the lane ends there.

*The bound is valid*: every legal order of instructions has one order of collectives per lane, and times of begin and
end from which these variables follow; all constraints are statements about such times. An order of collectives in which
nothing beats the best known order adds nothing. CP-SAT's effort goes first to all orders alike, then always to the one
whose bound is the least.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dhelix.passes.ordering.exact.model import NANO, Overlap
from dhelix.passes.ordering.exact.problem import Problem

_MOST = 250  # orders of collectives; where there are more, the order is left open
_ENOUGH = 0.02  # share of the best known time; where the bound with an open order leaves no more, it is enough
_OPEN, _FIRST = 0.18, 0.68  # shares of the effort: for the open order, for all orders alike; the rest for the worst
_AGAIN = 1.5  # how many times as long the worst is bounded each time
_LEAST = 1e-3  # effort that a bound counts as, so that an end comes


class OrderedOverlap(Overlap):
    """`Overlap` where the collectives of each of `lanes` run in this order."""

    def __init__(self, cp_sat: Any, problem: Problem, horizon: float, lanes: Sequence[Sequence[int]]) -> None:
        super().__init__(cp_sat, problem, horizon)
        compute = range(len(problem.compute))
        before = [problem.compute_before(x) for x in compute]
        for lane in lanes:
            for one, other in itertools.pairwise(lane):
                self.model.add(self.earlier[one, other] == 1)
            # By compute and collective of the lane: whether it begins when that is done, and ends after that is done.
            begins, ends = ([[self.model.new_bool_var("") for _ in lane] for _ in compute] for _ in range(2))
            for x in compute:
                self._place(x, lane, begins[x], ends[x])
                for y in before[x]:
                    for end, begin in zip(ends[y], begins[x], strict=True):
                        self.model.add(end <= begin)

    def _place(self, x: int, lane: Sequence[int], begins: Sequence[Any], ends: Sequence[Any]) -> None:
        """What follows for compute x from when it begins and ends."""
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
    """Nanoseconds that no order takes less than, or `horizon` seconds if nothing is faster than that."""
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
    """Bounds of models, until the effort is spent."""

    def __init__(self, cp_sat: Any, effort: float) -> None:
        self.cp_sat, self.left = cp_sat, effort

    def find(self, model: Overlap, effort: float, known: int) -> tuple[int, bool]:
        """Nanoseconds that the makespan is not below, `known` or more, and whether more effort cannot raise them."""
        solver = self.cp_sat.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 0
        solver.parameters.optimize_with_lb_tree_search = True  # raises the bound, and looks for no solution
        solver.parameters.max_deterministic_time = max(min(effort, self.left), 0.0)
        status = solver.solve(model.model)
        self.left -= max(solver.deterministic_time, _LEAST)
        if status == self.cp_sat.INFEASIBLE:
            return model.horizon, True
        return max(math.floor(solver.best_objective_bound), known), status == self.cp_sat.OPTIMAL


def _orders(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every order of the collectives of each lane that keeps the order in which they must be launched."""
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
