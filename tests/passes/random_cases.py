"""Small random programs of two strands with rates of their pairs, and the fastest of all their orders."""

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Sequence

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import BY_THEMSELVES, Costs, InStep
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.order_rules import Limits, dependencies
from dhelix.profiles.estimates.estimator import Estimator
from dhelix.profiles.hardware import H200
from dhelix.profiles.profile import Profile
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and the rates of its pairs: by compute, collective, and kind of overlap (see `Costs.rates`)."""

    program: Program
    results: list[str]
    rates: Mapping[tuple[str, str, bool, bool], tuple[float, float]]

    def module(self, in_step: InStep = BY_THEMSELVES) -> tuple[HloModule, Costs]:
        module, costs = build(self.program, self.results)
        starts = [i for i, cost in costs.items() if cost.lane is not Lane.COMPUTE]
        costs |= {i: dataclasses.replace(costs[i], launch=in_step.launch) for i in starts}
        return module, KnownRates(costs, self.rates, in_step)


class KnownRates(Costs):
    """Costs with given rates of pairs, as from a profile."""

    def __init__(self, costs: Mapping[Instruction, Cost], rates: Mapping, in_step: InStep) -> None:
        profile = Profile("H200", "nvlink")
        super().__init__(H200, Estimator(profile, H200), in_step=in_step)
        self.update(costs)
        self.known = rates

    def rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool = False
    ) -> tuple[float, float]:
        return self.known[compute.name, collective.name, collective_first, running]


def random_case(draw: random.Random) -> Case:
    """Two chains with a collective each, sometimes a second one in chain a, and a product without users."""

    def micro() -> float:
        return 1e-5 * draw.randint(2, 20)

    program: list[Op | Start | Done] = []
    for strand in "ab":
        value = "p"
        for n in range(draw.choice((1, 1, 2)) if strand == "a" else 1):
            if draw.random() < 0.6:
                program.append(Op(f"{strand}{n}", micro(), (value,)))
                value = f"{strand}{n}"
            lane = Lane.COMM_2 if draw.random() < 0.2 else Lane.COMM
            program += [Start(f"{strand}g{n}", micro(), value, lane=lane), Done(f"{strand}g{n}")]
            value = f"{strand}g{n}_done"
        program.append(Op(f"{strand}z", micro(), (value,)))
    program.append(Op("w", micro(), ("p",)))
    rates = {}
    for compute in (s.name for s in program if isinstance(s, Op)):
        for collective in (s.name for s in program if isinstance(s, Start)):
            for meeting in ((True, False), (False, False), (True, True)):
                own = draw.choice((0.5, 0.7, 0.9, 1.0))
                rates[compute, collective, *meeting] = own, draw.choice((0.01, 1.0 - 0.5 * own, 0.8, 1.0))
    return Case(program, ["az", "bz", "w"], rates)


def unlimited(module: HloModule) -> Limits:
    return Limits(H200, sys.maxsize, Memory(module))


def all_orders(sequence: Sequence[Instruction], before: Mapping[Instruction, set[Instruction]]) -> Iterator[list]:
    """All legal orders of `sequence`. Parameters and tuples take no time, so they come as early as possible."""
    if not sequence:
        yield []
        return
    left = set(sequence)
    ready = [i for i in sequence if not before[i] & left]
    free = [i for i in ready if i.opcode in ("parameter", "tuple")]
    for instruction in free[:1] or ready:
        for rest in all_orders([i for i in sequence if i is not instruction], before):
            yield [instruction, *rest]


def fastest(module: HloModule, costs: Costs) -> float:
    sequence = module.schedule[module.entry]
    before: dict[Instruction, set[Instruction]] = {i: set() for i in sequence}
    for earlier, later in dependencies(module.entry, sequence, Memory(module)):
        before[later].add(earlier)
    return min(evaluate(order, costs).seconds for order in all_orders(sequence, before))
