"""The exact model of a small body: an order found by OR-tools' CP-SAT, and a lower bound on the time of any order.

A search tells how fast its order is, but not how much faster another order could be. Here one integer program covers
all legal orders of a computation's instructions. Its relaxation gives the lower bound:

    found = exact_order(computation, sequence, costs, limits)
    found.seconds        # 6.41e-3: the evaluator's time of found.order
    found.bound          # 6.33e-3: no order is faster by the evaluator; found.gap is 1.2 %

It suits bodies of a hundred instructions. No pass uses it for scheduling; `dhelix plan --bound` reports how much any
order could still gain.

The model has one interval for each instruction that takes time (`problem.py`). Compute x and collective c do not
overlap, or they meet in one of three ways: c was running before x began, c began with x ("first"), or c began while x
ran ("second"). They overlap for y seconds at rates r_x and r_c, which depend on the way. T is the time of either alone,
w the wait of c for its last GPU, p the pause before x:

    length of x      p + T_x + sum (1 - r_x) y              lengthened by its collectives
    e                T_c + w - sum r_c y - q                compute pauses for q and waits for e of c's time
    length of c      sum y + q + e
    makespan         at least sum of lengths of x + sum of pauses before c + sum of e of one lane, and every end

More constraints follow from how the evaluator works:

- Collectives of a lane run one at a time.
- x meets at most one collective of a lane that began before it or with it. It meets a second one only if the first ends
  while x runs.
- c begins with or during at most one x. If x begins with c or later and ends before c is done, it lies within c.
- If c must wait for x, x meets no collective after c on its lane. If x must wait for c, x meets none before c.

There are two programs (`model.py`). The one without times reaches its bound quickly. The complete one yields orders. If
the first leaves a large gap, it is bounded separately for each order of the collectives (`bound.py`). The greatest
bound counts.

*The bound is valid.* Every legal order, simulated by the evaluator, gives numbers that satisfy all constraints, with
the evaluator's makespan. So the least makespan of the model is not above the time of the fastest order. A lower bound
of CP-SAT is below both, even if it stops early. Effects that the evaluator knows and the model ignores only enlarge the
set of solutions and lower the bound: memory; that a collective begins as soon as it can; that compute which overlaps
collectives of both lanes runs at the lower rate (the model applies the rate of each lane separately); what runs while
compute pauses for a launch. Loops count as their compute and slow nothing. Times are whole nanoseconds, and each
constraint is loosened by the possible rounding loss.

CP-SAT runs on one thread for a deterministic amount of work and with a fixed seed, so every host finds the same order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.ordering.exact.bound import least_makespan
from dhelix.passes.ordering.exact.model import NANO, Schedule
from dhelix.passes.ordering.exact.problem import Problem
from dhelix.passes.ordering.order_rules import Limits

_MOST = 250  # instructions that take time; larger models take gigabytes
_SHARE = 0.85  # fraction of the effort for the program without times


class TooLargeError(DhelixError):
    """A computation has more timed instructions than the model takes."""


@dataclass(frozen=True)
class ExactOrder:
    """The best order found, and a bound on any other.

    Attributes:
      seconds: evaluator's time of `order`.
      bound: lower bound in seconds on the evaluator's time of every legal order.
      solved: whether the complete model was solved to optimality; a remaining gap is then due to the model.
    """

    order: tuple[Instruction, ...]
    seconds: float
    bound: float
    solved: bool

    @property
    def gap(self) -> float:
        """The most that another order can save, as a fraction of `seconds`."""
        return 1.0 - self.bound / self.seconds if self.seconds else 0.0


def exact_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    start: Sequence[Instruction] | None = None,
    effort: float = 60.0,
) -> ExactOrder:
    """The fastest order found from the model, `start` and `sequence` that fits into memory, and the bound.

    Args:
      sequence: a legal order; it defines the order of accesses to shared buffers.
      start: an order to begin with, such as `pairing_order`'s; by default `sequence`.
      effort: CP-SAT's deterministic time, roughly seconds.

    Raises:
      TooLargeError: more than 250 instructions take time.
      DhelixError: OR-tools is missing.
    """
    cp_sat = solver()
    problem = Problem(computation, sequence, costs, limits)
    timed = len(problem.compute) + len(problem.collectives)
    if timed > _MOST:
        raise TooLargeError(f"{computation.name} has {timed} timed instructions; the exact model takes at most {_MOST}")
    best = _Best(problem, costs, limits)
    for order in (sequence, sequence if start is None else start):
        best.offer(order)
    bound = least_makespan(cp_sat, problem, best.seconds, effort * _SHARE)
    schedule = Schedule(cp_sat, problem, best.seconds)
    schedule.hint(evaluate(best.order, costs, limits.hardware, limits.bodies))
    schedule.model.add(schedule.makespan >= bound)
    bound, solved = _solve(cp_sat, schedule, effort * (1.0 - _SHARE), best)
    return ExactOrder(best.order, best.seconds, min(max(bound - schedule.slack, 0) / NANO, best.seconds), solved)


def _solve(cp_sat: Any, model: Schedule, effort: float, best: "_Best") -> tuple[int, bool]:
    """A lower bound of the makespan in nanoseconds, and whether it is reached."""
    engine = cp_sat.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.linearization_level = 2  # proves small bodies faster
    engine.parameters.random_seed = 0
    engine.parameters.max_deterministic_time = effort
    status = engine.solve(model.model, _callback(cp_sat, model, best))
    if status in (cp_sat.INFEASIBLE, cp_sat.MODEL_INVALID):
        name = model.problem.computation.name
        raise DhelixError(f"the exact model of {name} excludes a known order: please report this with the module")
    return math.floor(engine.best_objective_bound), status == cp_sat.OPTIMAL


def solver() -> Any:
    """OR-tools' CP-SAT. Raises DhelixError if it is missing."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise DhelixError("an exact order needs OR-tools: pip install 'dhelix[plan]'") from None
    return cp_model


class _Best:
    """The fastest order so far that fits into memory. The first one counts even if it does not fit."""

    def __init__(self, problem: Problem, costs: Mapping[Instruction, Cost], limits: Limits) -> None:
        self.problem, self.costs, self.limits = problem, costs, limits
        self.order: tuple[Instruction, ...] = ()
        self.seconds = float("inf")

    def offer(self, order: Sequence[Instruction]) -> None:
        seconds = evaluate(order, self.costs, self.limits.hardware, self.limits.bodies).seconds
        if self.order:
            fits = self.limits.memory.peak(self.problem.computation, order) <= self.limits.bytes
            if seconds >= self.seconds or not fits:
                return
        self.order, self.seconds = tuple(order), seconds


def _callback(cp_sat: Any, model: Schedule, best: _Best) -> Any:
    class Solutions(cp_sat.CpSolverSolutionCallback):
        """Turns each solution into orders, which the evaluator times."""

        def on_solution_callback(self) -> None:
            times = ([self.value(v) for v in of] for of in (model.begin, model.end, model.issue, model.done))
            for order in best.problem.orders(*times):
                best.offer(order)

    return Solutions()
