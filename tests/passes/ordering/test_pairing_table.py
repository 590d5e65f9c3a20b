"""Equation 2 (the pairing table) against brute force."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from dhelix.passes.evaluation.costs import InStep
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.ordering.order_search import OrderSearch
from dhelix.passes.ordering.pairing_table import Pairing, pair
from dhelix.passes.ordering.strand_sequences import Operator, find_strands
from dhelix.tests.passes.random_cases import random_case, unlimited


def operators(draw: random.Random, count: int, start: int) -> list[Operator]:
    lanes = [Lane.COMPUTE, Lane.COMPUTE, Lane.COMM, Lane.COMM_2]
    return [
        Operator(start + n, draw.choice(lanes), float(draw.randint(1, 9)), draw.choice([0.0, 0.5]))
        for n in range(count)
    ]


def segment_cost(draw: random.Random) -> Callable[[Sequence[Operator], Sequence[Operator]], float]:
    """A random time between the busiest lane and the sum of all operators, always the same for the same segments."""

    known: dict[tuple[int, ...], float] = {}

    def cost(first: Sequence[Operator], second: Sequence[Operator]) -> float:
        both = (*first, *second)
        key = tuple(o.number for o in both)
        if key not in known:
            busiest = max(sum(o.busy(lane) for o in both) for lane in Lane)
            known[key] = busiest + draw.random() * (sum(o.seconds + o.light for o in both) - busiest)
        return known[key]

    return cost


def brute_force(
    first: Sequence[Operator],
    second: Sequence[Operator],
    cost: Callable[[Sequence[Operator], Sequence[Operator]], float],
    longest: int,
    allowed: Callable[[int, int], bool],
) -> float:
    """The least sum over all ways to cut both sequences into segments; infinite if there is none."""

    def rest(i: int, j: int) -> float:
        if (i, j) == (len(first), len(second)):
            return 0.0
        ways = (
            cost(first[i:p], second[j:q]) + rest(p, q)
            for p in range(i, min(i + longest, len(first)) + 1)
            for q in range(j, min(j + longest, len(second)) + 1)
            if (p, q) != (i, j) and allowed(p, q)
        )
        return min(ways, default=math.inf)

    return rest(0, 0)


def test_the_plan_is_as_fast_as_the_fastest_of_all_segmentations() -> None:
    """1,000 instances of up to 4 x 5 operators. In half of them, a tenth of the states are forbidden."""
    draw = random.Random(0)
    infeasible = 0
    for _ in range(1000):
        first, second = operators(draw, draw.randint(0, 4), 0), operators(draw, draw.randint(1, 5), 9)
        longest, share = draw.choice([1, 2, 2, 3]), draw.choice([0.0, 0.1])
        forbidden = {(i, j) for i in range(6) for j in range(6) if draw.random() < share}
        cost = segment_cost(draw)

        def allowed(i: int, j: int, forbidden: set[tuple[int, int]] = forbidden) -> bool:
            return (i, j) not in forbidden

        plan = pair(first, second, cost, longest, allowed)
        least = brute_force(first, second, cost, longest, allowed)
        if least == math.inf:
            assert plan is None
            infeasible += 1
            continue
        assert plan is not None and plan.seconds == pytest.approx(least)
        check_plan(plan, first, second, longest)
    assert 10 < infeasible < 300


@pytest.mark.slow
def test_with_segments_that_the_evaluator_plays_it_is_as_fast_as_the_fastest_segmentation() -> None:
    """1,000 instances with random rates of pairs, so the order and the launch of both segments decide P."""
    draw = random.Random(3)
    for _ in range(1000):
        module, costs = random_case(draw).module(InStep(pause=3e-6, wait=1e-5))
        limits = unlimited(module)
        search = OrderSearch(find_strands(module.entry, module.schedule[module.entry], costs, limits), costs, limits)
        first, second = search.body.first.operators, search.body.second.operators
        assert first and second
        allowed = search.allowed(first, second)

        def cost(f: Sequence[Operator], s: Sequence[Operator], search: OrderSearch = search) -> float:
            return search.segment(f, s)[0]

        plan = pair(first, second, cost, 3, allowed)
        assert plan is not None
        assert plan.seconds == pytest.approx(brute_force(first, second, cost, 3, allowed))
        check_plan(plan, first, second, 3)


def check_plan(plan: Pairing, first: Sequence[Operator], second: Sequence[Operator], longest: int) -> None:
    """Checks that segments are contiguous, cover both sequences, and add up."""
    i = j = 0
    for segment in plan.segments:
        assert (segment.first[0], segment.second[0]) == (i, j)
        i, j = segment.first[1], segment.second[1]
        assert max(i - segment.first[0], j - segment.second[0]) <= longest
    assert (i, j) == (len(first), len(second))
    assert sum(s.seconds for s in plan.segments) == pytest.approx(plan.seconds)


def test_a_plan_that_is_too_slow_is_of_no_use() -> None:
    draw = random.Random(1)
    first, second = operators(draw, 4, 0), operators(draw, 4, 9)
    cost = segment_cost(draw)
    plan = pair(first, second, cost, 2)
    assert plan is not None
    assert pair(first, second, cost, 2, less_than=plan.seconds) is None
    again = pair(first, second, cost, 2, less_than=plan.seconds * (1.0 + 1e-9))
    assert again is not None and again.seconds == plan.seconds
