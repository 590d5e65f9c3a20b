"""Lower bounds on the time that a plan's bodies take in any order, for `dhelix plan --bound`.

    list(bounds(candidate))  # [BodyBound("layers of both strands", 15, 0.0123, 0.0121), ...]

A body is a computation that the plan orders. `passes/ordering/exact/` computes a lower bound for each body: with the
same costs, no legal order of the body takes less time. The bound holds for this program and these costs only. Another
program may be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.launch.plan.search import Candidate, microseconds
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.execution import executions
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import Computation
from dhelix.passes.ordering.exact.order import TooLargeError, exact_order
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.plans.plan_operators import PlanOperators

_EFFORT = 30.0  # limit of CP-SAT's deterministic time per body, roughly in seconds


@dataclass(frozen=True)
class BodyBound:
    """The lower bound for one body of a plan.

    Attributes:
      runs: how often a step runs the body.
      seconds: predicted time of one run in the plan's order.
      bound: every order takes at least this many seconds; None if the body is too large for the solver.
      why: the reason why `bound` is None; empty if there is a bound.
    """

    name: str
    runs: int
    seconds: float
    bound: float | None
    why: str = ""

    @property
    def left(self) -> float:
        """The most that another order of this body can save, in seconds per step; 0 without a bound."""
        return 0.0 if self.bound is None else self.runs * (self.seconds - self.bound)

    def to_json(self) -> dict[str, Any]:
        """The times of one run in microseconds, as JSON values. `bound_us` is null if there is no bound."""
        bound = None if self.bound is None else microseconds(self.bound)
        return {"body": self.name, "runs": self.runs, "order_us": microseconds(self.seconds), "bound_us": bound}


def bounds(candidate: Candidate) -> Iterator[BodyBound]:
    """Computes a bound for each body of the plan, one after the other. Raises DhelixError if OR-tools is missing."""
    found = dict[str, tuple[Computation, int]]()
    for computation, runs in executions(candidate.module).items():
        fingerprint = PlanOperators(computation, candidate.costs.operator_keys).fingerprint
        one, so_far = found.get(fingerprint, (computation, 0))
        found[fingerprint] = one, so_far + runs
    memory = Memory(candidate.module)
    for body in candidate.plan.bodies:
        if body.fingerprint in found:
            yield _bound(candidate, memory, body.name, *found[body.fingerprint])


def _bound(candidate: Candidate, memory: Memory, name: str, computation: Computation, runs: int) -> BodyBound:
    order, costs = candidate.module.schedule[computation], candidate.costs
    seconds = evaluate(order, costs).seconds
    limits = Limits(costs.hardware, memory.peak(computation, order), memory)
    try:
        exact = exact_order(computation, order, costs, limits, effort=_EFFORT)
    except TooLargeError as error:
        return BodyBound(name, runs, seconds, None, str(error))
    return BodyBound(name, runs, seconds, min(exact.bound, seconds))


def in_words(found: Sequence[BodyBound], step_seconds: float) -> list[str]:
    """A line of text for each body, and a line about all bodies together."""
    lines = []
    for body in found:
        of = f"{body.name} ({body.runs:,} x {1e6 * body.seconds:,.0f} µs)"
        if body.bound is None:
            lines.append(f"No bound for {of}: {body.why}.")
        else:
            share = 1.0 - body.bound / body.seconds
            lines.append(f"Bound for {of}: no order takes less than {1e6 * body.bound:,.0f} µs ({share:.1%} less).")
    bounded = [body for body in found if body.bound is not None]
    if bounded:
        left = sum(body.left for body in bounded)
        which = "these bodies" if len(bounded) == len(found) else "the bodies with a bound"
        lines.append(
            f"Other orders of {which} could save at most {1e3 * left:,.2f} ms of {1e3 * step_seconds:,.1f} ms per step"
            f" ({left / step_seconds:.1%})."
        )
    return lines
