"""The exact model of a small body: an order found by OR-tools' CP-SAT, and a lower bound on the time of any order.

A search tells how fast its order is, but not how much faster another order could be. Here an integer program covers all
legal orders of a computation's instructions. Its relaxation gives the lower bound:

    found = exact_order(computation, sequence, costs, limits)
    found.seconds        # 6.41e-3: the evaluator's time of found.order
    found.bound          # 6.33e-3: no order is faster by the evaluator; found.gap is 1.2 %

The model suits bodies of about a hundred instructions. No pass uses the model for scheduling. `dhelix plan --bound`
reports the most that another order could gain.

The model has one interval for each instruction that takes time (`problem.py`). Either compute x and collective c do not
overlap, or they meet in one of three ways: c was running before x began, c began with x ("first"), or c began while x
ran ("second"). They overlap for y seconds at rates r_x and r_c, which depend on the way. T_x and T_c are the times of x
and of c alone. p is the pause before x, and w is the time that c waits for its last GPU. The rest of c runs while
compute pauses (for q seconds) or waits for c (for e seconds):

    length of x      p + T_x + sum (1 - r_x) y              slowed by its collectives
    e                T_c + w - sum r_c y - q                what is left of c after overlaps and pauses
    length of c      sum y + q + e
    makespan         at least (sum of lengths of x) + (sum of pauses before c) + (sum of e of one lane);
                     at least every end

More constraints follow from how the evaluator works:

- Collectives of a lane run one at a time.
- x meets at most one collective of a lane that began before or with x. A second collective may follow only if the first
  ends while x runs.
- c begins with or during at most one x. If x begins with c or after c, and ends before c is done, all of x overlaps
  with c.
- If c depends on x, x meets no collective that runs after c on the lane of c. If x depends on c, x meets no collective
  that runs before c on the lane of c.

There are two programs (`model.py`). The smaller one (`Overlap`) does not say when anything begins or ends, and reaches
its bound quickly. The complete program (`Schedule`) yields orders. If `Overlap` leaves a large gap, each order of the
collectives gets its own bound (`bound.py`). Of the bounds of both programs, the greater one counts.

*The bound is valid.* Every legal order, simulated by the evaluator, gives numbers that satisfy all constraints, with
the evaluator's makespan. So the least makespan of the model is not above the time of the fastest order. A lower bound
of CP-SAT is not above the least makespan, even if CP-SAT stops early. The model ignores some effects that the evaluator
knows. This only enlarges the set of solutions and lowers the bound. The ignored effects are:

- Memory is limited.
- A collective begins as soon as it can.
- Compute that overlaps with collectives of both lanes runs at the lower rate. (The model applies the rate of each lane
  separately.)
- Only collectives in flight run while compute pauses for a launch. (The model lets any collective run then.)

The length of a loop is the time of the compute in it. A loop slows no collective, and no collective slows a loop. Times
are whole nanoseconds, and each constraint is loosened by the possible rounding loss.

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

_MOST = 250  # limit on instructions that take time; larger models need gigabytes of memory
_SHARE = 0.85  # fraction of the effort that `Overlap` gets


class TooLargeError(DhelixError):
    """A computation has more timed instructions than the model takes."""


@dataclass(frozen=True)
class ExactOrder:
    """The best order found, and a lower bound on the time of every order.

    Attributes:
      seconds: evaluator's time of `order`.
      bound: lower bound in seconds on the evaluator's time of every legal order.
      solved: whether the complete model was solved to optimality. If so, a remaining gap is due to the model.
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
    """Finds the fastest order that fits into memory, and a lower bound on the time of every order.

    The candidates are `sequence`, `start` and orders from the model. `sequence` counts even if it does not fit.

    Args:
      sequence: a legal order, which defines the order of accesses to shared buffers.
      start: an order to begin with, such as the order of `pairing_order`; by default `sequence`.
      effort: CP-SAT's deterministic time. Its unit is roughly a second.

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
    """Returns a lower bound of the makespan in nanoseconds, and whether a solution reaches this bound."""
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
    """The fastest of the offered orders that fit into memory. The first order counts even if it does not fit."""

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
