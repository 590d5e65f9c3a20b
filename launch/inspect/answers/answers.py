"""All answers on one estimated step, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dhelix.launch.inspect.answers.critical_path import OnPath, critical_path
from dhelix.launch.inspect.answers.memory import MemoryOverTime, memory_over_time
from dhelix.launch.inspect.answers.operations import Operation, Utilization, operations, utilization
from dhelix.launch.shown.instruction_words import Words
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.hlo import HloModule, Instruction


@dataclass(frozen=True)
class Answers:
    """Where the time and the memory of a step go.

    Attributes:
      operations: operations that compute, with the time that they take alone, longest first.
      critical_path: what decides the length of the step, longest first.
      words: what the instructions of the critical path do, by name.
    """

    operations: tuple[Operation, ...]
    utilization: Utilization
    critical_path: tuple[OnPath, ...]
    memory: MemoryOverTime
    words: Mapping[str, str]


def answer(
    module: HloModule, costs: Costs, timeline: Timeline, ran: Iterable[tuple[Instruction, int]], words: Words
) -> Answers:
    """The answers on a scheduled module.

    Args:
      timeline: the module's timeline under these costs (`simulate_module`).
      ran: what the step runs (`executed`).
      words: what the instructions do.
    """
    computing = (
        (i, float(count), 1e3 * count * costs[i].seconds, costs[i]) for i, count in ran if costs[i].lane is Lane.COMPUTE
    )
    found = operations(computing, costs.hardware, words)
    path = critical_path(timeline, costs.in_step.pause + costs.in_step.launch)
    named = {i.name: i for computation in module.schedule for i in computation.instructions}
    return Answers(
        found,
        utilization(found, costs.hardware, 1e3 * timeline.seconds),
        path,
        memory_over_time(module, words),
        {one.instruction: words[named[one.instruction]] for one in path if one.instruction in named},
    )
