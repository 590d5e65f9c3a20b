"""Beside strands: a collective matmul, or a collective that the other strand's compute hides, for each kind of site.

    forward     | product             | product, attention    |          | KERNEL (gathers)       | product, attention
    backward    | all-gather          | product               |          |          | product     |
                  hidden: costs little, and slows the product            no all-gather, but nothing runs beside it

A collective matmul is taken for what it saves alone where a program has one strand. With two, what it saves may be
hidden anyhow, and while it runs nothing else can: its kernel holds the whole GPU (`passes/exclusive_kernels.py`). So
here the evaluator decides, by what it says of the whole step when the orders are searched anew.

1. `mark` (PRE_SCHEDULER): sites that a form would be taken for. Their numbers become part of the names of collectives
   and products, since names are what survives until the module is scheduled.
2. `Trial` (POST_SCHEDULER, the same program, all collectives in place): what the step takes if the sites of some
   patterns were collective matmuls: the last of the products takes what the form takes, as a kernel that nothing runs
   beside, and the collective nothing. So no program is made for a choice; what a form copies is left out.
3. `choose`: patterns flip one by one while the prediction falls, from none and from all of them.

Nothing is changed here. It costs at most MOST evaluations by a quick order and four by the search, 10 s for a step of 8
layers in a loop, and is deterministic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from dhelix.errors import DhelixError
from dhelix.passes.collective_matmul import Forms, executed, find_all
from dhelix.passes.collective_matmul_pattern import Pattern
from dhelix.passes.collectives import find_collective
from dhelix.passes.costs import CostModel, Kernel, sequence_of
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.manager import PassContext
from dhelix.passes.operator_work import work_of
from dhelix.passes.orders import MemoryRefusal, Scheduler, apply_order
from dhelix.passes.timeline import simulate_module
from dhelix.profiles.collective_matmul import MONOLITHIC, Form

MOST = 48
"""Evaluations of a step by the quick order; fewer of a long one."""
_PLAYED = 60_000  # instructions, over all of these evaluations
MARGIN = 0.005
"""Share of the step's time that collective matmuls must save beside strands. Of three programs that were measured the
predicted ratios are within 0.4 %."""
_GAIN = 1e-4  # share of the step's time that a flip must save
_SITE = "dhelix_site_"
_NUMBER = re.compile(rf"/{_SITE}(\d+)")


@dataclass(frozen=True)
class Candidate:
    """A site of a program, and what could take its place."""

    pattern: Pattern
    form: Form


def mark(module: HloModule, forms: Forms) -> list[Candidate]:
    """The sites of a module that another form than the monolithic one would be taken for. Their numbers in this list
    become part of the names of their collectives and products."""
    found: list[Candidate] = []
    for _, matches in find_all(module, Counter()):
        for match in matches:
            try:
                form = forms.choose(match.pattern)
            except DhelixError:  # the pass will leave it, too
                continue
            if form == MONOLITHIC:
                continue
            for instruction in (match.collective, *(product.dot for product in match.products)):
                instruction.proto.metadata.op_name += f"/{_SITE}{len(found)}"
            found.append(Candidate(match.pattern, form))
    return found


@dataclass(frozen=True, eq=False)
class _Place:
    """A site in the scheduled module."""

    candidate: Candidate
    collective: Instruction
    products: tuple[Instruction, ...]


class Trial:
    """A scheduled program with all collectives in place, whose sites are weighed.

    Attributes:
      patterns: of sites that were found again, in the order of their keys.
      most: quick evaluations that it is worth.
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
        self._limits = memory_limit, 0.03, 0.01, max_in_flight
        self._kernels: dict[_Place, Kernel] = {}
        for place in _places(module, candidates):
            site, form = place.candidate.pattern.site, place.candidate.form
            if (kernel := self._costs.collective_matmul(site, form)) is not None:
                self._kernels[place] = kernel
        simulate_module(module, self._costs.hardware, self._costs)  # so that what does not change is known
        found = {place.candidate.pattern: None for place in self._kernels}
        self.most = min(MOST, 2 + _PLAYED // sum(map(len, self._original.values())))
        self.patterns = tuple(sorted(found, key=lambda p: (p.site, repr(p))))

    def seconds(self, taken: Collection[Pattern], order: Scheduler) -> float:
        """What the step is predicted to take with collective matmuls at the sites of `taken`; infinite if no order of
        that keeps within memory."""
        instead: dict[Instruction, Kernel] = {}
        for place, kernel in self._kernels.items():
            if place.candidate.pattern in taken:
                instead.update(dict.fromkeys((place.collective, *place.products), Kernel(0.0)))
                instead[place.products[-1]] = kernel
        costs = self._costs.with_kernels(instead)
        try:
            apply_order(self._module, PassContext(), order, costs, *self._limits)
            return simulate_module(self._module, costs.hardware, costs).seconds
        except MemoryRefusal:
            return math.inf
        finally:
            self._module.schedule.update(self._original)


def _places(module: HloModule, candidates: Sequence[Candidate]) -> Iterator[_Place]:
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
            yield _Place(candidate, collectives[number][0], tuple(products[number]))


def _numbers(instruction: Instruction) -> list[int]:
    """The sites in the name of an instruction, and of what it holds."""
    inside = (i for called in instruction.called for i in called.instructions)
    found = (_NUMBER.findall(i.op_name) for i in (instruction, *inside))
    return sorted({int(number) for numbers in found for number in numbers})


@dataclass(frozen=True)
class Weighed:
    """What was decided.

    Attributes:
      taken: patterns whose sites are to be collective matmuls; `paired`: those that are not.
      seconds: that the step is predicted to take with collectives at all sites, `seconds_all` with collective matmuls
        at all, and `seconds_taken` with them where they are taken.
    """

    taken: tuple[Pattern, ...]
    paired: tuple[Pattern, ...]
    seconds: float
    seconds_all: float
    seconds_taken: float

    def checked(self, seconds: float) -> Weighed:
        """The same, if a step that is predicted to take `seconds` as decided is worth it; else nothing is taken."""
        if not self.taken or seconds < (1.0 - MARGIN) * self.seconds:
            return replace(self, seconds_taken=seconds)
        paired = (*self.taken, *self.paired)
        return replace(self, taken=(), paired=paired, seconds_taken=self.seconds)


def choose(trial: Trial, quick: Scheduler, searched: Scheduler) -> Weighed:
    """Which patterns are predicted to pay as collective matmuls.

    Args:
      quick: the orders that choices are compared by; `searched`: those that the last few are compared by.
    """
    known: dict[frozenset[Pattern], float] = {}

    def seconds(taken: frozenset[Pattern]) -> float:
        if taken not in known:
            known[taken] = trial.seconds(taken, quick) if len(known) < trial.most else math.inf
        return known[taken]

    none, every = frozenset[Pattern](), frozenset(trial.patterns)
    timed = {none: trial.seconds(none, searched)}
    if math.isinf(timed[none]):  # no order keeps within memory, and the step will not run like this
        return Weighed((), trial.patterns, math.inf, math.inf, math.inf)
    found = (_descended(taken, trial.patterns, seconds) for taken in (none, every))
    timed.update((taken, trial.seconds(taken, searched)) for taken in dict.fromkeys((every, *found)) if taken)
    best = min(timed, key=lambda taken: timed[taken])
    parts = [tuple(p for p in trial.patterns if (p in best) is inside) for inside in (True, False)]
    return Weighed(parts[0], parts[1], timed[none], timed[every], timed[best]).checked(timed[best])


def _descended(
    taken: frozenset[Pattern], patterns: Sequence[Pattern], seconds: Callable[[frozenset[Pattern]], float]
) -> frozenset[Pattern]:
    """From `taken`, one pattern more or less as long as that is faster."""
    best, improved = seconds(taken), True
    while improved:
        improved = False
        for pattern in patterns:
            other = taken ^ {pattern}
            if seconds(other) < best * (1.0 - _GAIN):
                taken, best, improved = other, seconds(other), True
    return taken
