"""Makes plans for one step under several launch settings, and predicts the step's time with each plan.

    candidates = [search(program, model, options, limit) for model in models]
    best = min(candidates, key=Candidate.rank)

The search finds an order of all instructions. A plan fixes only the order of operators, and names small instructions by
the operator before which they run. When the plan is carried out, small instructions may therefore run at other places.
A candidate's predictions are for the order of the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading.dumps import Memory as Counted
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
"""Factor on the predicted time of a plan with all-to-alls. Such a plan is chosen only if it is at least 1 % faster,
because it has longer pauses between kernels. The factor was chosen by measurements (docs/research_log.md).
"""


_REDUCED = 1.005
"""Factor on the predicted time of a plan that reduces gradients layer by layer. Such a plan is chosen only if it is at
least 0.5 % faster. The factor was chosen by measurements (docs/research_log.md).
"""


@dataclass(frozen=True)
class Candidate:
    """One plan and its predictions.

    Attributes:
      program: the step that the plan is for.
      module: the step in the plan's order.
      timeline: simulation of `module`.
      seconds_xla: predicted time of the step in XLA's order.
      bytes, bytes_xla: estimated memory, arguments not included, in the plan's order and in XLA's order.
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
        """Predicted seconds times the factors _DECOMPOSED and _REDUCED, where they apply. The lowest rank is best."""
        instead = self.plan.collectives
        all_to_alls = any(exchange.INSTEAD[key.kind] == "all-to-all" for key in instead.decomposed)
        return self.seconds * (_DECOMPOSED if all_to_alls else 1.0) * (_REDUCED if instead.reduced else 1.0)

    def with_memory(self, counted: Counted) -> Candidate:
        """The candidate, with the plan's memory limit raised to `counted` if the limit is lower.

        `counted` is the memory that the compiler needs. The plan's limit comes from live ranges, which do not include
        the gaps between buffers.
        """
        order = self.plan.order
        if not order.memory_limit or counted.peak <= order.memory_limit:
            return self
        return replace(self, plan=replace(self.plan, order=replace(order, memory_limit=counted.peak)))

    @cached_property
    def step_time(self) -> StepTime:
        """The times of the step's operators and collectives if nothing overlaps."""
        return predict(self.module, self.costs)

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of every instruction that takes time, by the instruction's name."""
        found: dict[str, Place] = {}
        wanted = {body.fingerprint: body for body in self.plan.bodies}
        for computation, runs in executions(self.module).items():
            operators = PlanOperators(computation, self.costs.operator_keys)
            body = wanted.get(operators.fingerprint)
            planned = {} if body is None else {(o.key, o.occurrence): o.name for o in body.operators}
            others, described = operators.names(list(operators.identities)), operators.describe()
            for instruction, identity in operators.identities.items():
                name = planned.get(identity, others[instruction])
                found[instruction.name] = Place(instruction, name, described, runs)
        return found

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """The collectives of the step as JSON values, longest total time first. Times are of one execution.

        Equal collectives of different computations share a row if their times are equal.
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
    """Where an instruction is in a step.

    Attributes:
      name: the instruction's name in a plan.
      body: the instruction's computation, in words.
      runs: how often a step runs this computation.
    """

    instruction: Instruction
    name: str
    body: str
    runs: int


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that a step may need on one GPU, by the compiler's count. Arguments are included.

    Attributes:
      bytes: the limit; None: 3 % more than XLA's order needs.
      given: whether the user set the limit.
      gaps: assumed size of all gaps between buffers, in bytes. Live ranges do not include gaps. None: the gaps are as
        large as in XLA's order.
    """

    bytes: int | None
    given: bool = False
    gaps: int | None = None

    @classmethod
    def of(cls, given: int | None, plain: Program | None) -> MemoryLimit:
        """The limit `given` by the user, or 3 % more than `plain` needs (DHelix section 6, arXiv 2411.15871)."""
        if given is not None:
            return cls(given, given=True)
        return cls(None if plain is None or plain.memory is None else int(plain.memory.peak * (1.0 + MEMORY_SLACK)))

    def with_gaps_of(self, candidate: Candidate, memory: Counted) -> MemoryLimit:
        """This limit, with gaps as large as the compiler left them in the candidate's order.

        Args:
          memory: the memory of the candidate, by the compiler's count.
        """
        return replace(self, gaps=max(memory.peak - memory.arguments - candidate.bytes, 0))

    def gaps_of(self, program: Program) -> int:
        """Size of all gaps between buffers, in bytes: the compiler's count of memory minus the count by live ranges."""
        if self.gaps is not None or program.memory is None:
            return self.gaps or 0
        beside = program.memory.peak - program.memory.arguments
        return max(beside - _bytes(HloModule.from_bytes(program.module)), 0)

    def of_program(self, program: Program) -> int | None:
        """The limit in bytes for the search, which counts memory by live ranges; None: the default of the search.

        Raises:
          DhelixError: the user gave a limit, but the dump does not say how much memory its arguments take.
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
    """The search found no order within the memory limit. `needed` is the smallest sufficient limit in bytes."""

    def __init__(self, program: Program, limit: MemoryLimit, needed: int):
        allowed = "memory" if limit.bytes is None else f"--memory_limit={bytes_option(limit.bytes)}"
        if limit.bytes is not None and not limit.given:
            allowed = f"{bytes_text(limit.bytes)} (the plain step's memory plus {MEMORY_SLACK:.0%})"
        super().__init__(
            f"found no order of {program.name} that needs at most {allowed}; the smallest sufficient limit is "
            f"--memory_limit={bytes_option(needed)} (per GPU, arguments included)"
        )
        self.needed = needed


def with_room[T](
    planned: Callable[[MemoryLimit], T], limit: MemoryLimit, room: int, told: Callable[[str], None]
) -> tuple[T, MemoryLimit]:
    """What `planned` finds, and the limit with which it finds it.

    If nothing keeps to the default limit, an order may use `room` bytes, as a step does that runs
    (`runtime/step/specialization.py`).
    """
    try:
        return planned(limit), limit
    except OverLimitError as error:
        if limit.given or error.needed > room:
            raise
        told(f"No order needs as little memory as usual, but the GPU has room: {error}.")
    limit = MemoryLimit(room)
    return planned(limit), limit


def search(program: Program, model: CostModel, options: StepOptions, limit: MemoryLimit) -> Candidate:
    """Searches for a fast order of a program with the costs of `model`, and returns it as a candidate.

    Args:
      options: name the algorithm (`schedule`), and limit the number of collectives in flight.

    Raises:
      OverLimitError: the search found no order within the limit. The message names a sufficient limit.
    """
    memory_limit = limit.of_program(program)
    try:
        return _search(program, model, options, memory_limit)
    except MemoryRefusal as refusal:
        arguments = program.memory.arguments if program.memory else 0
        counted_more = arguments and arguments - Memory(HloModule.from_bytes(program.module)).arguments
        raise OverLimitError(program, limit, refusal.needed + counted_more + limit.gaps_of(program)) from None


def _search(program: Program, model: CostModel, options: StepOptions, memory_limit: int | None) -> Candidate:
    """`search` with a limit in bytes by live ranges, arguments included; None: 3 % more than XLA's order needs."""
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
    """The predicted time of a program in XLA's order, in seconds."""
    module, costs = HloModule.from_bytes(program.module), model.costs()
    return simulate_module(module, costs.hardware, costs).seconds


def _bytes(module: HloModule) -> int:
    return Memory(module).peak(module.entry, module.schedule[module.entry])


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 2)
