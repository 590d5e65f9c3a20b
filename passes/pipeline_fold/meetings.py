"""When the executor's program of a schedule is done: every message is a meeting of who sends it and who receives it.

A collective-permute ends on a stage when those that it sends to, and receives from, have come to it, too: in every tick
that holds it (`phases.py`), whether there is anything to say or not. Who is no part of it goes on. So a stage that goes
forward waits for a neighbour that goes backward, where a runtime that buffers messages (`simulation.makespan`) would
let it go on:

    stage 0   F F F F             stage 0   F   F   F   F
    stage 1     B   B   B   B     stage 1     B   B   B   B       meetings after each of stage 1's
              messages wait                 stage 0 waits

    beside     what a tick sends goes on beside the next ones, until it is needed or a round of the loop ends, one
               exchange at a time: XLA does so where loops over layers hold no collectives
    not        the stage stands still from its arrival at the exchange to the end of that

Ends that are shared join all stages each time; others keep their own stage. Lockstep schedules are timed by
`evaluation.evaluate`, all of whose ticks are meetings of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from dhelix.passes.pipeline_fold.phases import Pattern, phases
from dhelix.passes.pipeline_fold.schedule import Cell, Schedule
from dhelix.passes.pipeline_fold.tasks import PipelineCosts
from dhelix.passes.pipeline_fold.transfers import Hop

Times = list[Fraction]


def meeting_time(schedule: Schedule, costs: PipelineCosts, beside: bool = False) -> Fraction:
    """From the first task's start to the last one's end, embedding and head included.

    Args:
      schedule: not lockstep.
      beside: whether messages travel beside loops over layers.
    """
    stages = _Stages(schedule, costs, beside)
    for phase in phases(schedule):
        ticks = iter(schedule.ticks[phase.first :])
        for _ in range(phase.rounds):
            for pattern in phase.patterns:
                stages.tick(pattern, next(ticks))
            stages.wait_for(stages.activations, stages.cotangents)
    return max(stages.clock)


class _Stages:
    """The clocks of all stages, and when each has ended the last exchange of each kind."""

    def __init__(self, schedule: Schedule, costs: PipelineCosts, beside: bool) -> None:
        self.schedule, self.costs, self.beside = schedule, costs, beside
        self.clock, self.activations, self.cotangents = ([Fraction(0)] * schedule.layout.stages for _ in range(3))

    def tick(self, pattern: Pattern, cells: Sequence[Cell]) -> None:
        costs, last = self.costs, self.schedule.layout.chunks - 1
        forward = [-1 if cell.forward is None else cell.forward.chunk for cell in cells]
        backward = [-1 if cell.backward is None else cell.backward.chunk for cell in cells]
        if pattern.goes_forward:
            self.wait_for(self.activations)
        self._end([chunk == 0 for chunk in forward], Fraction(costs.embedding) / 2)
        if pattern.goes_backward:
            self.wait_for(self.cotangents)
        self._end([chunk == last for chunk in backward], Fraction(costs.head))
        layers = self.schedule.layout.padded
        work = [costs.of_pair(layers * (f >= 0), layers * (b >= 0)) for f, b in zip(forward, backward, strict=True)]
        self.clock = [now + time for now, time in zip(self.clock, work, strict=True)]
        self.activations = self._exchange(pattern.activations, self.activations)
        self._end([chunk == 0 for chunk in backward], Fraction(costs.embedding) / 2)
        self.cotangents = self._exchange(pattern.cotangents, self.cotangents)

    def wait_for(self, *ends: Times) -> None:
        self.clock = [max(times) for times in zip(self.clock, *ends, strict=True)]

    def _end(self, here: Sequence[bool], time: Fraction) -> None:
        """One of the model's ends, computed for the stage that it is `here` for."""
        if self.costs.shared_ends and any(here) and time:
            self.clock = [max(self.clock) + time / len(here)] * len(here)
        if not self.costs.shared_ends:
            self.clock = [now + time * mine for now, mine in zip(self.clock, here, strict=True)]

    def _exchange(self, ways: Sequence[Hop], before: Times) -> Times:
        """When each stage has ended an exchange over `ways`, `before` it the last one of its kind."""
        if not ways:
            return before
        arrivals = [max(times) for times in zip(self.clock, self.activations, self.cotangents, strict=True)]
        ends = list(arrivals)
        for sender, receiver in ways:
            meeting = max(arrivals[sender], arrivals[receiver])
            ends[sender], ends[receiver] = max(ends[sender], meeting), max(ends[receiver], meeting)
        met = {stage for way in ways for stage in way}
        ends = [end + Fraction(self.costs.send) * (stage in met) for stage, end in enumerate(ends)]
        if not self.beside:
            self.clock = ends
        return ends
