"""The exact model of a small body: an order by OR-tools' CP-SAT, and a time that no order can beat.

A search says how fast its order is, and not how much faster another one could be. Here all legal orders of a
computation's instructions are one integer program, whose relaxation bounds them from below:

    found = exact_order(computation, sequence, costs, limits)
    found.seconds        # 6.41e-3: what the evaluator says of found.order
    found.bound          # 6.33e-3: what it says of no order less than; found.gap is 1.2 %

On bodies of a hundred instructions. No pass schedules with it: `dhelix plan --bound` says by it how much any order
could still gain.

The model has one interval for each instruction that takes time (`problem.py`). Of compute x and collective c,
x ends before c begins, begins after c is done, or meets it: running, launched first, or launched second. With y seconds
beside each other at rates r_x and r_c (of that way to meet), T + w seconds of c alone and a pause of p before x

    length of x      p + T_x + sum (1 - r_x) y              what collectives cost it
    e                T + w - sum r_c y - q                  in q of it compute pauses, in e it waits
    length of c      sum y + q + e
    makespan         at least sum of lengths of x + sum of pauses before c + sum of e of one lane, and every end

and what follows from how orders are played: collectives of a lane take turns; x meets one at most that was there before
it or began with it, and others only if that one is done meanwhile; c begins beside one x at most, and what it outlasts
lies beside it as a whole; x that c must wait for meets no collective that comes after c on its lane, and no x that
waits for c meets an earlier one. Two programs are made of that (`model.py`): one without times, whose bound is
soon there, and the whole one, whose solutions are orders. Where the first leaves much open, it is bounded for each
order of the collectives by itself (`bound.py`). The greatest bound counts.

*The bound is valid*: every legal order, played by the evaluator, gives numbers that meet all constraints with the
makespan that the evaluator says. So the least makespan of the model is not above the fastest order's, and a lower bound
of CP-SAT's is one of both, however early it stops. What the evaluator does and the model does not know makes the set
of solutions larger, and so the bound only lower: memory; that a collective begins as soon as it can; that beside
collectives of both lanes the lower of two rates counts (each lane's for itself does); what runs while compute stands
still for a launch. Loops count as what they compute, and slow nothing. Times are whole nanoseconds; what rounding may
lose is given back in each constraint.

CP-SAT runs on one thread for a deterministic amount of work and with a fixed seed: the same order on every host.
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
_SHARE = 0.85  # of the effort goes to the bound that needs no times


class TooLargeError(DhelixError):
    """A computation has more timed instructions than the model takes."""


@dataclass(frozen=True)
class ExactOrder:
    """The best order that was found, and how much is left.

    Attributes:
      seconds: of `order`, by the evaluator.
      bound: seconds that no legal order takes less than, by the evaluator.
      solved: whether the model was solved to its end; a gap that is left then is the model's.
    """

    order: tuple[Instruction, ...]
    seconds: float
    bound: float
    solved: bool

    @property
    def gap(self) -> float:
        """What an order may at most save, as a share of `seconds`."""
        return 1.0 - self.bound / self.seconds if self.seconds else 0.0


def exact_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    start: Sequence[Instruction] | None = None,
    effort: float = 60.0,
) -> ExactOrder:
    """The fastest order that the model, `start` and `sequence` lead to and that fits into memory, and the bound.

    Args:
      sequence: a legal order; it says in which order instructions meet in shared buffers.
      start: an order to begin with, such as `pairing_order`'s; by default `sequence`.
      effort: CP-SAT's deterministic time, about seconds.

    Raises TooLargeError for more than 250 instructions that take time, DhelixError where OR-tools is missing.
    """
    cp_sat = solver()
    problem = Problem(computation, sequence, costs, limits)
    timed = len(problem.compute) + len(problem.collectives)
    if timed > _MOST:
        raise TooLargeError(f"{computation.name} has {timed} timed instructions, and an exact model takes {_MOST}")
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
    """Nanoseconds that the makespan is not below, and whether it can be that."""
    engine = cp_sat.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.linearization_level = 2  # ten times faster to a proof on small bodies
    engine.parameters.random_seed = 0
    engine.parameters.max_deterministic_time = effort
    status = engine.solve(model.model, _callback(cp_sat, model, best))
    if status in (cp_sat.INFEASIBLE, cp_sat.MODEL_INVALID):
        name = model.problem.computation.name
        raise DhelixError(f"the exact model of {name} does not hold its known order: report this, with the module")
    return math.floor(engine.best_objective_bound), status == cp_sat.OPTIMAL


def solver() -> Any:
    """OR-tools' CP-SAT. Raises DhelixError where it is missing."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise DhelixError("an exact order needs OR-tools: pip install 'dhelix[plan]'") from None
    return cp_model


class _Best:
    """The fastest order so far that fits into memory; the first one counts even if it does not."""

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
        """Every solution is an order; how fast it is the evaluator says."""

        def on_solution_callback(self) -> None:
            times = ([self.value(v) for v in of] for of in (model.begin, model.end, model.issue, model.done))
            for order in best.problem.orders(*times):
                best.offer(order)

    return Solutions()
