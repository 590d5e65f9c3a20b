"""Chooses between collective matmuls and hidden collectives in programs with two strands.

    forward     | product             | product, attention    |          | KERNEL (gathers)       | product, attention
    backward    | all-gather          | product               |          |          | product     |
                  hidden: it takes little time, but slows the product    no all-gather, but nothing overlaps with KERNEL

KERNEL is a collective matmul. In a program with one strand, a collective matmul is chosen if it is faster when nothing
else runs. With two strands, the other strand may hide the collective anyway. Nothing can overlap with the collective
matmul, because its kernel occupies the whole GPU (`passes/ordering/exclusive_kernels.py`). So the predicted time of the
whole step decides, and each prediction makes a new order of the step. F(i) and B(i) are the forward and the backward
pass of micro-batch i of M:

    F(0)           one strand        KERNEL products  KERNEL products ...    nothing would hide the collectives
    B(i-1), F(i)   co-executed       products overlap with collectives       the other strand hides them
    B(M-1)         one strand        one or the other                        wgrad products may hide them

There are two kinds of places: one strand runs there, or both. A pattern that occurs at both kinds gets a decision for
each kind (`Placed`).

1. `mark` (PRE_SCHEDULER) finds the sites for which `Forms.choose` names a form. It appends the numbers of these sites
   to the names of collectives and products, because names survive until the module is scheduled.
2. `Trial` (POST_SCHEDULER, same program, all collectives in place) predicts the step's time with collective matmuls at
   the sites of some patterns. At such a site, the last product counts as a kernel that takes the form's time and
   overlaps with nothing. The collective and the other products take no time. So no program is built for a choice, and
   copies that a form makes are not counted.
3. `choose` changes the decision for one pattern at a time, while the prediction improves. Patterns at places with one
   strand come first. Their descent starts with all of them replaced. It uses the order search, which hides collectives
   that a quick order leaves exposed. Patterns at places with two strands come next. They have two descents: one starts
   with none replaced, one with all. Both use a quick order, because the search takes long there. The two kinds of
   places are separate computations, so a decision at one kind does not change what is best at the other.

No program is changed, except for the names. Cost: at most MOST evaluations with a quick order, and MOST / 3 + 5 with
the order search. The choice is deterministic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.communication.collective_matmul.collective_matmul import Forms, executed, find_all
from dhelix.passes.communication.collective_matmul.pattern import Placed
from dhelix.passes.evaluation.costs import CostModel, Kernel
from dhelix.passes.evaluation.operator_work import work_of
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, MemoryRefusal, Scheduler, apply_order
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site

MOST = 48
"""Maximum number of evaluations of a step with the quick order. Long steps get fewer evaluations (`_PLAYED`)."""
_PLAYED = 60_000  # maximum number of instructions that these evaluations simulate
MARGIN = 0.005
"""Fraction of the step's time that collective matmuls must save. If none of them is at a place where both strands run,
the fraction is multiplied by `Trial.alone`. The fraction exceeds the error of predicted ratios in measured programs."""
_GAIN = 1e-4  # fraction of the step's time that one change must save; times `Trial.alone` where only one strand runs
_SITE = "dhelix_site_"
_NUMBER = re.compile(rf"/{_SITE}(\d+)")


@dataclass(frozen=True)
class Candidate:
    """A site of a program, and the form that could replace it."""

    placed: Placed
    form: Form


# Step 1: mark the sites.


def mark(module: HloModule, forms: Forms) -> list[Candidate]:
    """Finds the sites of a module for which a form other than the monolithic one would be chosen.

    The names of a site's collective and products get a suffix: the site's index in the returned list.
    """
    found: list[Candidate] = []
    for _, matches in find_all(module, Counter()):
        for match, placed in matches:
            try:
                form = forms.choose(placed)
            except DhelixError:  # the pass will leave this site alone too
                continue
            if form == MONOLITHIC:
                continue
            for instruction in (match.collective, *(product.dot for product in match.products)):
                instruction.proto.metadata.op_name += f"/{_SITE}{len(found)}"
            found.append(Candidate(placed, form))
    return found


# Step 2: predict the step for a choice of sites.


@dataclass(frozen=True, eq=False)
class _Scheduled:
    """A site in the scheduled module."""

    candidate: Candidate
    collective: Instruction
    products: tuple[Instruction, ...]


class Trial:
    """Predicts the time of a step with collective matmuls at some sites.

    The module is a scheduled program with all collectives in place.

    Attributes:
      placed: pattern and place of each site that was found in the scheduled program, without duplicates, sorted.
      most: maximum number of evaluations with the quick order.
      alone: fraction of the sites' communication time at places where only one strand runs.
    """

    def __init__(
        self,
        module: HloModule,
        candidates: Sequence[Candidate],
        model: CostModel,
        memory_limit: int | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self._module, self._costs = module, model.costs()
        self._original = dict(module.schedule)
        self._limits = memory_limit, MEMORY_SLACK, 0.02, max_in_flight
        self._orders: dict[tuple[Scheduler, Computation, frozenset[Instruction]], list[Instruction]] = {}
        self._kernels: dict[_Scheduled, Kernel] = {}
        for site in _scheduled(module, candidates):
            pattern = site.candidate.placed.pattern
            if (kernel := self._costs.collective_matmul(pattern.site, site.candidate.form)) is not None:
                self._kernels[site] = kernel
        self.most = min(MOST, 2 + _PLAYED // sum(map(len, self._original.values())))
        found = {site.candidate.placed: None for site in self._kernels}
        self.placed = tuple(sorted(found, key=_in_order))
        self.alone = self._share_alone()

    def _share_alone(self) -> float:
        """Simulates the step once and returns `alone`. Later evaluations reuse the costs of this simulation."""
        step = simulate_module(self._module, self._costs.hardware, self._costs)
        times = {one.instruction: one.alone for one in step.collectives}
        seconds = {True: 0.0, False: 0.0}
        for site in self._kernels:
            seconds[site.candidate.placed.co_executed] += times.get(site.collective.name, 0.0)
        return seconds[False] / (sum(seconds.values()) or 1.0)

    def seconds(self, taken: Collection[Placed], order: Scheduler) -> float:
        """Predicted seconds of the step with collective matmuls at the sites of `taken`.

        The prediction is infinite if no order fits into memory.
        """
        instead: dict[Instruction, Kernel] = {}
        for site, kernel in self._kernels.items():
            if site.candidate.placed in taken:
                instead.update(dict.fromkeys((site.collective, *site.products), Kernel(0.0)))
                instead[site.products[-1]] = kernel
        costs = self._costs.with_kernels(instead)
        try:
            apply_order(self._module, PassContext(), self._remembered(order, instead), costs, *self._limits)
            return simulate_module(self._module, costs.hardware, costs).seconds
        except MemoryRefusal:
            return math.inf
        finally:
            self._module.schedule.update(self._original)

    def _remembered(self, order: Scheduler, instead: Collection[Instruction]) -> Scheduler:
        """`order` with a cache. The key of a result is the computation, together with its collective matmuls."""

        def remembered(computation: Computation, *arguments: Any) -> list[Instruction]:
            asked = order, computation, frozenset(i for i in instead if i.computation is computation)
            if asked not in self._orders:
                self._orders[asked] = order(computation, *arguments)
            return self._orders[asked]

        return remembered


def _scheduled(module: HloModule, candidates: Sequence[Candidate]) -> Iterator[_Scheduled]:
    """The sites in a scheduled module. Sites that cannot be identified (combined collectives) are left out."""
    collectives: dict[int, list[Instruction]] = {}
    products: dict[int, list[Instruction]] = {}
    for computation in executed(module.entry):
        for instruction in sequence_of(computation):
            collective = find_collective(instruction) is not None
            if collective or work_of(instruction).unit == "product":
                for number in _numbers(instruction):
                    (collectives if collective else products).setdefault(number, []).append(instruction)
    for number, candidate in enumerate(candidates):
        if len(collectives.get(number, ())) == 1 and number in products:
            yield _Scheduled(candidate, collectives[number][0], tuple(products[number]))


def _in_order(placed: Placed) -> tuple[Site, str]:
    return placed.pattern.site, repr(placed)


def _numbers(instruction: Instruction) -> list[int]:
    """Numbers of the sites in the names of an instruction and of the instructions that it contains."""
    inside = (i for called in instruction.called for i in called.instructions)
    found = (_NUMBER.findall(i.op_name) for i in (instruction, *inside))
    return sorted({int(number) for numbers in found for number in numbers})


@dataclass(frozen=True)
class Weighed:
    """A decision for all sites of a program.

    Attributes:
      taken: patterns and places whose sites become collective matmuls.
      paired: the other patterns and places. Their sites keep the collectives.
      seconds: predicted seconds of the step with collectives at all sites.
      seconds_all: predicted seconds with collective matmuls at all sites.
      seconds_taken: predicted seconds with collective matmuls at the sites of `taken`.
      alone: fraction of the sites' communication time at places where only one strand runs.
    """

    taken: tuple[Placed, ...]
    paired: tuple[Placed, ...]
    seconds: float
    seconds_all: float
    seconds_taken: float
    alone: float

    def checked(self, seconds: float) -> Weighed:
        """This decision if its predicted `seconds` save enough (`MARGIN`), else the decision that replaces nothing."""
        differs = 1.0 if any(placed.co_executed for placed in self.taken) else self.alone
        if not self.taken or seconds < (1.0 - MARGIN * differs) * self.seconds:
            return replace(self, seconds_taken=seconds)
        paired = tuple(sorted((*self.taken, *self.paired), key=_in_order))
        return replace(self, taken=(), paired=paired, seconds_taken=self.seconds)

    def __str__(self) -> str:
        times = (f"{1e3 * seconds:.1f}" for seconds in (self.seconds, self.seconds_all, self.seconds_taken))
        said = "{} ms with collectives everywhere, {} ms with collective matmuls everywhere, {} ms as chosen".format(
            *times
        )
        taken, stay = ("; ".join(placed.key for placed in part) or "none" for part in (self.taken, self.paired))
        return f"{said}. Collective matmuls: {taken}. Collectives: {stay}"


# Step 3: choose.


def choose(trial: Trial, quick: Scheduler, searched: Scheduler) -> Weighed:
    """Decides which patterns become collective matmuls, and at which places.

    Args:
      trial: the scheduled program.
      quick: the scheduler that compares choices where two strands run.
      searched: the scheduler that compares choices where one strand runs, and the final choices.
    """
    none, every = frozenset[Placed](), frozenset(trial.placed)
    timed = {none: trial.seconds(none, searched)}
    if math.isinf(timed[none]):  # no order fits into memory, so the step cannot run like this
        return Weighed((), trial.placed, math.inf, math.inf, math.inf, trial.alone)
    alone, together = ([p for p in trial.placed if p.co_executed is co_executed] for co_executed in (False, True))
    start = _descended(frozenset(alone), alone, _GAIN * trial.alone, _asked_once(trial, searched, trial.most // 3))
    seconds = _asked_once(trial, quick, trial.most)
    found = [_descended(start | taken, together, _GAIN, seconds) for taken in (none, frozenset(together))]
    timed.update((taken, trial.seconds(taken, searched)) for taken in dict.fromkeys((every, start, *found)) if taken)
    decided: list[Weighed] = []
    for best in sorted(timed, key=lambda taken: timed[taken]):
        parts = [tuple(p for p in trial.placed if (p in best) is inside) for inside in (True, False)]
        times = timed[none], timed[every], timed[best]
        decided.append(Weighed(parts[0], parts[1], *times, trial.alone).checked(timed[best]))
    return next((found for found in decided if found.taken), decided[0])  # the fastest choice may fail MARGIN


def _asked_once(trial: Trial, order: Scheduler, most: int) -> Callable[[frozenset[Placed]], float]:
    """A cached `Trial.seconds` with `order`. After `most` choices, it returns infinity for further choices."""
    known: dict[frozenset[Placed], float] = {}

    def seconds(taken: frozenset[Placed]) -> float:
        if taken not in known:
            known[taken] = trial.seconds(taken, order) if len(known) < most else math.inf
        return known[taken]

    return seconds


def _descended(
    taken: frozenset[Placed], free: Sequence[Placed], gain: float, seconds: Callable[[frozenset[Placed]], float]
) -> frozenset[Placed]:
    """Starts from `taken`. Adds or removes the elements of `free` in turn, and returns the best choice found.

    Keeps a change if it saves more than a fraction `gain` of the time.
    """
    best, tried = seconds(taken), 0
    for placed in cycle(free):
        if tried == len(free):
            break
        other, tried = taken ^ {placed}, tried + 1
        if seconds(other) < best * (1.0 - gain):
            taken, best, tried = other, seconds(other), 1
    return taken
