"""Plans of one step under several launch settings, and which of them is predicted to be fastest.

    candidates = [search(program, model, options, limit) for model in models]
    best = min(candidates, key=Candidate.rank)

The predictions of a candidate simulate the order that results from its plan, not the order that the search found. The
two may differ: a plan names operators, and the instructions that travel with an operator may move.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.inspect.dumps import Memory as Counted
from dhelix.launch.plan.program import Program
from dhelix.launch.shown.instruction_words import bytes_moved, communicates
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.execution import executions
from dhelix.passes.communication import exchange
from dhelix.passes.communication.stream_assignment import StreamAssignment
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.step_time import StepTime, predict
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.framework.units import bytes_option, bytes_text
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, MemoryRefusal
from dhelix.passes.plans.plan import OrderSection, Plan, PlanTarget
from dhelix.passes.plans.plan_making import make_plan
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes

_DECOMPOSED = 1.01
"""Factor on the predicted time of plans with all-to-alls. They must gain 1 %, because pauses between kernels grow.
Chosen by measurement (docs/research_log.md).
"""


_REDUCED = 1.005
"""Factor on the predicted time of plans with gradients in many pieces: they must gain 0.5 %. Chosen by measurement
(docs/research_log.md).
"""


@dataclass(frozen=True)
class Candidate:
    """One plan and its predictions.

    Attributes:
      program: the step that the plan is for.
      module: the step in the plan's order.
      timeline: simulation of `module`.
      seconds_xla: time of the step in XLA's order.
      bytes, bytes_xla: estimated memory besides the arguments, in the plan's and in XLA's order.
      solve_seconds: duration of the search.
    """

    program: Program
    plan: Plan
    module: HloModule
    costs: Costs
    timeline: Timeline
    seconds_xla: float
    bytes: int
    bytes_xla: int
    solve_seconds: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    def rank(self) -> float:
        """Predicted seconds, with a surcharge for all-to-alls and for gradients reduced layer by layer."""
        instead = self.plan.collectives
        all_to_alls = any(exchange.INSTEAD[key.kind] == "all-to-all" for key in instead.decomposed)
        return self.seconds * (_DECOMPOSED if all_to_alls else 1.0) * (_REDUCED if instead.reduced else 1.0)

    def with_memory(self, counted: Counted) -> Candidate:
        """Raises the plan's memory limit to the compiler's count, which may exceed the live ranges."""
        order = self.plan.order
        if not order.memory_limit or counted.peak <= order.memory_limit:
            return self
        return replace(self, plan=replace(self.plan, order=replace(order, memory_limit=counted.peak)))

    @cached_property
    def step_time(self) -> StepTime:
        """The step's operators and collectives, each alone, one after the other."""
        return predict(self.module, self.costs)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Every instruction that takes time, by its name."""
        found: dict[str, Place] = {}
        wanted = {body.fingerprint: body for body in self.plan.bodies}
        for computation, runs in executions(self.module).items():
            operators = PlanOperators(computation, self.costs.operator_keys)
            body = wanted.get(operators.fingerprint)
            planned = {} if body is None else {(o.key, o.occurrence): o.name for o in body.operators}
            others = operators.names(list(operators.identities))
            for instruction, identity in operators.identities.items():
                name = planned.get(identity, others[instruction])
                found[instruction.name] = Place(instruction, name, operators.describe(), runs)
        return found

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """Each collective of the step as JSON values, most time first; microseconds of one execution.

        Collectives of like computations share a row if they take the same time.
        """
        rows: list[dict[str, Any]] = []
        for time_of in self.timeline.collectives:
            place, count = self.places[time_of.instruction], time_of.count or 1
            found = communicates(place.instruction)
            assert found is not None  # the timeline lists it as a collective
            beneath = [
                {"name": self.places[name].name, "us": microseconds(seconds / count)} for name, seconds in time_of.under
            ]
            row = {
                "name": place.name,
                "body": place.body,
                "kind": found.kind,
                "lane": time_of.lane.value,
                "between_nodes": self.costs[place.instruction].between_nodes,
                "bytes": bytes_moved(found),
                "runs": time_of.count,
                "alone_us": microseconds(time_of.alone / count),
                "time_us": microseconds((time_of.hidden + time_of.exposed) / count),
                "hidden_us": microseconds(time_of.hidden / count),
                "exposed_us": microseconds(time_of.exposed / count),
                "beneath": beneath,
            }
            alike = next((other for other in rows if other | {"runs": row["runs"]} == row), None)
            if alike is None:
                rows.append(row)
            else:
                alike["runs"] += row["runs"]
        return sorted(rows, key=lambda row: (-row["runs"] * row["time_us"], row["body"], row["name"]))


@dataclass(frozen=True)
class Place:
    """Where an instruction is.

    Attributes:
      name: its name in a plan.
      body: its computation, in words.
      runs: how often a step runs that computation.
    """

    instruction: Instruction
    name: str
    body: str
    runs: int


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that a step may need on one GPU, arguments included, by the compiler's count.

    Attributes:
      bytes: the limit; None: what XLA's order needs, plus 3 %.
      given: whether the user set the limit.
      gaps: bytes between buffers, which live ranges do not count; None: as many as in XLA's order.
    """

    bytes: int | None
    given: bool = False
    gaps: int | None = None

    @classmethod
    def of(cls, given: int | None, plain: Program | None) -> MemoryLimit:
        """The user's limit, or 3 % more than the plain step needs (DHelix section 6, arXiv 2411.15871)."""
        if given is not None:
            return cls(given, given=True)
        return cls(None if plain is None or plain.memory is None else int(plain.memory.peak * (1.0 + MEMORY_SLACK)))

    def with_gaps_of(self, candidate: Candidate, memory: Counted) -> MemoryLimit:
        """The limit with the gaps that the compiler left in the candidate's order; `memory` is its count."""
        return replace(self, gaps=max(memory.peak - memory.arguments - candidate.bytes, 0))

    def gaps_of(self, program: Program) -> int:
        """Bytes that the compiler counts beyond live ranges."""
        if self.gaps is not None or program.memory is None:
            return self.gaps or 0
        beside = program.memory.peak - program.memory.arguments
        return max(beside - _bytes(HloModule.from_bytes(program.module)), 0)

    def of_program(self, program: Program) -> int | None:
        """The limit in bytes for a scheduler, whose estimates leave out the gaps between buffers; None for the default.

        Raises:
          DhelixError: the user gave a limit, and a dump does not say how much memory its arguments take.
        """
        if program.memory is None and self.given:
            raise DhelixError(
                f"{program.name} does not tell the size of its arguments, so --memory_limit cannot be kept: also dump "
                "the buffer assignment (--xla_dump_hlo_as_text), or leave out --memory_limit"
            )
        if self.bytes is None or program.memory is None:
            return None
        module = HloModule.from_bytes(program.module)
        counted_more = program.memory.arguments - Memory(module).arguments  # such as padding for alignment
        return max(self.bytes - counted_more - self.gaps_of(program), 0)


class OverLimitError(DhelixError):
    """No order of a program keeps within the limit. `needed`: bytes on a GPU that would do."""

    def __init__(self, program: Program, limit: MemoryLimit, needed: int):
        allowed = "memory" if limit.bytes is None else f"--memory_limit={bytes_option(limit.bytes)}"
        if limit.bytes is not None and not limit.given:
            allowed = f"{bytes_text(limit.bytes)} (the plain step's memory plus {MEMORY_SLACK:.0%})"
        super().__init__(
            f"found no order of {program.name} that needs at most {allowed}; the smallest sufficient limit is "
            f"--memory_limit={bytes_option(needed)} (per GPU, arguments included)"
        )
        self.needed = needed


def search(program: Program, model: CostModel, options: StepOptions, limit: MemoryLimit) -> Candidate:
    """The plan that a schedule gives with these costs.

    Args:
      options: name the schedule, and limit the collectives in flight.

    Raises:
      OverLimitError: no order fits the limit; the message names a limit that would do.
    """
    memory_limit = limit.of_program(program)
    try:
        return _search(program, model, options, memory_limit)
    except MemoryRefusal as refusal:
        arguments = program.memory.arguments if program.memory else 0
        counted_more = arguments and arguments - Memory(HloModule.from_bytes(program.module)).arguments
        raise OverLimitError(program, limit, refusal.needed + counted_more + limit.gaps_of(program)) from None


def _search(program: Program, model: CostModel, options: StepOptions, memory_limit: int | None) -> Candidate:
    """`memory_limit`: bytes, arguments included; None: what XLA's order needs, plus 3 %."""
    module, costs = HloModule.from_bytes(program.module), model.costs()
    original = dict(module.schedule)
    before, bytes_before = simulate_module(module, costs.hardware, costs), _bytes(module)
    begun = time.perf_counter()
    for one in default_passes(options, model=model, hardware=costs.hardware, memory_limit=memory_limit):
        if one.stage is Stage.POST_SCHEDULER:
            one.run(module, PassContext(strict=True))
    solved = time.perf_counter() - begun
    profile = model.profile
    target = PlanTarget.of(profile.hardware, profile.link, model.setting, model.hardware.gpus_per_node)
    limits = OrderSection((), program.skew, options.max_in_flight or 0, memory_limit or 0)
    made_for = Plan(program.name, target, program.collectives, limits)
    found = make_plan(module, original, model, made_for)
    module = HloModule.from_bytes(program.module)
    original, costs = dict(module.schedule), model.costs()
    StreamAssignment(costs.hardware).run(module, PassContext(strict=True))
    PlannedOrder(found, memory_limit).run(module, PassContext(strict=True))
    plan = make_plan(module, original, model, made_for)
    timeline = simulate_module(module, costs.hardware, costs)
    return Candidate(program, plan, module, costs, timeline, before.seconds, _bytes(module), bytes_before, solved)


def played(program: Program, model: CostModel) -> float:
    """Simulated seconds of the step in XLA's order."""
    module, costs = HloModule.from_bytes(program.module), model.costs()
    return simulate_module(module, costs.hardware, costs).seconds


def _bytes(module: HloModule) -> int:
    return Memory(module).peak(module.entry, module.schedule[module.entry])


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 2)
