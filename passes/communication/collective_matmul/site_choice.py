"""Beside strands: a collective matmul, or a collective that the other strand's compute hides, by pattern and place.

    forward     | product             | product, attention    |          | KERNEL (gathers)       | product, attention
    backward    | all-gather          | product               |          |          | product     |
                  hidden: costs little, and slows the product            no all-gather, but nothing runs beside it

A collective matmul is taken for what it saves alone where a program has one strand. With two, what it saves may be
hidden anyhow, and while it runs nothing else can: its kernel holds the whole GPU
(`passes/ordering/exclusive_kernels.py`). So here the evaluator decides, by what it says of the whole step when the
orders are searched anew.

    F(0)           one strand        KERNEL products  KERNEL products ...    nothing would hide the collectives
    B(i-1), F(i)   co-executed       products beside collectives ...         the other strand does
    B(M-1)         one strand        one or the other                        products for gradients of weights may

The same pattern stands in both places, and is decided for in each (`Placed`).

1. `mark` (PRE_SCHEDULER): sites that a form would be taken for. Their numbers become part of the names of collectives
   and products, since names are what survives until the module is scheduled.
2. `Trial` (POST_SCHEDULER, the same program, all collectives in place): what the step takes if the sites of some
   patterns were collective matmuls: the last of the products takes what the form takes, as a kernel that nothing runs
   beside, and the collective nothing. So no program is made for a choice; what a form copies is left out.
3. `choose`: patterns flip one by one while the prediction falls. First, where one strand runs, from all of them and by
   the search for orders, which hides collectives there that a quick order leaves bare. Then, where two do, by a quick
   order, since the search takes long there: from none and from all. The places are computations of their own, so
   neither changes what is best in the other.

Nothing is changed here. It costs at most MOST evaluations by a quick order, and a third as many and five by the search,
8 to 15 s for a step of 8 layers in a loop, and is deterministic.
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
"""Evaluations of a step by the quick order; fewer of a long one."""
_PLAYED = 60_000  # instructions, over all of these evaluations
MARGIN = 0.005
"""Share of the time that collective matmuls must save beside strands: of the step's where any is co-executed, else of
what the rest is of it. Of three programs that were measured the predicted ratios are within 0.4 %."""
_GAIN = 1e-4  # share of the same time that a flip must save
_SITE = "dhelix_site_"
_NUMBER = re.compile(rf"/{_SITE}(\d+)")


@dataclass(frozen=True)
class Candidate:
    """A site of a program, and what could take its place."""

    placed: Placed
    form: Form


def mark(module: HloModule, forms: Forms) -> list[Candidate]:
    """The sites of a module that another form than the monolithic one would be taken for. Their numbers in this list
    become part of the names of their collectives and products."""
    found: list[Candidate] = []
    for _, matches in find_all(module, Counter()):
        for match, placed in matches:
            try:
                form = forms.choose(placed)
            except DhelixError:  # the pass will leave it, too
                continue
            if form == MONOLITHIC:
                continue
            for instruction in (match.collective, *(product.dot for product in match.products)):
                instruction.proto.metadata.op_name += f"/{_SITE}{len(found)}"
            found.append(Candidate(placed, form))
    return found


@dataclass(frozen=True, eq=False)
class _Scheduled:
    """A site in the scheduled module."""

    candidate: Candidate
    collective: Instruction
    products: tuple[Instruction, ...]


class Trial:
    """A scheduled program with all collectives in place, whose sites are weighed.

    Attributes:
      placed: of sites that were found again, in the order of their keys.
      most: quick evaluations that it is worth.
      alone: share of the sites' communication that is not co-executed.
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
        """Plays the step once, after which what does not change is known."""
        step = simulate_module(self._module, self._costs.hardware, self._costs)
        times = {one.instruction: one.alone for one in step.collectives}
        seconds = {True: 0.0, False: 0.0}
        for site in self._kernels:
            seconds[site.candidate.placed.co_executed] += times.get(site.collective.name, 0.0)
        return seconds[False] / (sum(seconds.values()) or 1.0)

    def seconds(self, taken: Collection[Placed], order: Scheduler) -> float:
        """What the step is predicted to take with collective matmuls at the sites of `taken`; infinite if no order of
        that keeps within memory."""
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
        """`order`, asked once about a computation with the same kernels in it; what it calls may have others."""

        def remembered(computation: Computation, *arguments: Any) -> list[Instruction]:
            asked = order, computation, frozenset(i for i in instead if i.computation is computation)
            if asked not in self._orders:
                self._orders[asked] = order(computation, *arguments)
            return self._orders[asked]

        return remembered


def _scheduled(module: HloModule, candidates: Sequence[Candidate]) -> Iterator[_Scheduled]:
    """Where the sites stand in a scheduled module. Left out are those that cannot be told: combined with others."""
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
    """The sites in the name of an instruction, and of what it holds."""
    inside = (i for called in instruction.called for i in called.instructions)
    found = (_NUMBER.findall(i.op_name) for i in (instruction, *inside))
    return sorted({int(number) for numbers in found for number in numbers})


@dataclass(frozen=True)
class Weighed:
    """What was decided.

    Attributes:
      taken: patterns and places whose sites are to be collective matmuls; `paired`: those that are not.
      seconds: that the step is predicted to take with collectives at all sites, `seconds_all` with collective matmuls
        at all, and `seconds_taken` with them where they are taken.
      alone: share of the sites' communication that is not co-executed.
    """

    taken: tuple[Placed, ...]
    paired: tuple[Placed, ...]
    seconds: float
    seconds_all: float
    seconds_taken: float
    alone: float

    def checked(self, seconds: float) -> Weighed:
        """The same, if a step that is predicted to take `seconds` as decided is worth it; else nothing is taken."""
        differs = 1.0 if any(placed.co_executed for placed in self.taken) else self.alone
        if not self.taken or seconds < (1.0 - MARGIN * differs) * self.seconds:
            return replace(self, seconds_taken=seconds)
        paired = tuple(sorted((*self.taken, *self.paired), key=_in_order))
        return replace(self, taken=(), paired=paired, seconds_taken=self.seconds)

    def __str__(self) -> str:
        times = (f"{1e3 * seconds:.1f}" for seconds in (self.seconds, self.seconds_all, self.seconds_taken))
        said = "{} ms with collectives at all sites, {} with collective matmuls at all, {} as chosen".format(*times)
        taken, stay = ("; ".join(placed.key for placed in part) or "none" for part in (self.taken, self.paired))
        return f"{said}: collective matmuls: {taken}. Collectives: {stay}"


def choose(trial: Trial, quick: Scheduler, searched: Scheduler) -> Weighed:
    """Which patterns are predicted to pay as collective matmuls, at which places.

    Args:
      quick: the orders that choices are compared by where two strands run; `searched`: elsewhere, and at last.
    """
    none, every = frozenset[Placed](), frozenset(trial.placed)
    timed = {none: trial.seconds(none, searched)}
    if math.isinf(timed[none]):  # no order keeps within memory, and the step will not run like this
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
    return next((found for found in decided if found.taken), decided[0])  # what is fastest may not be worth it


def _asked_once(trial: Trial, order: Scheduler, most: int) -> Callable[[frozenset[Placed]], float]:
    """What a choice takes by `order`; infinite beyond `most` choices."""
    known: dict[frozenset[Placed], float] = {}

    def seconds(taken: frozenset[Placed]) -> float:
        if taken not in known:
            known[taken] = trial.seconds(taken, order) if len(known) < most else math.inf
        return known[taken]

    return seconds


def _descended(
    taken: frozenset[Placed], free: Sequence[Placed], gain: float, seconds: Callable[[frozenset[Placed]], float]
) -> frozenset[Placed]:
    """From `taken`, one of `free` more or less as long as that saves a share of `gain`, in turn until none has."""
    best, tried = seconds(taken), 0
    for placed in cycle(free):
        if tried == len(free):
            break
        other, tried = taken ^ {placed}, tried + 1
        if seconds(other) < best * (1.0 - gain):
            taken, best, tried = other, seconds(other), 1
    return taken
