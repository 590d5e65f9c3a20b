"""Computes the time of the program that the executor (`dhelix.runtime.pipeline`) compiles for a schedule.

In this program, every message is a rendezvous of sender and receiver. A stage leaves a collective-permute only when its
senders and its receivers have reached the collective-permute, too. This holds in every tick that contains the
collective-permute (`phases.py`), even if there is nothing to send. Stages that the collective-permute does not name do
not wait. So a stage that computes a forward waits for a neighbour that computes a backward. With a runtime that buffers
messages (`simulation.makespan`), the stage would not wait:

    stage 0   F F F F             stage 0   F   F   F   F
    stage 1     B   B   B   B     stage 1     B   B   B   B       rendezvous after each B
              buffered                        stage 0 waits

An exchange is a collective-permute of messages. A late exchange sends the messages of a tick during the next tick
(`phases.Messages`). It overlaps with the loop over layers of the next tick if this loop holds no other collectives: XLA
then puts the loop between start and done of the collective-permute. Otherwise the late exchange ends before the next
tick begins.

If all stages share embedding and head, each computation of one of them synchronizes all stages. Otherwise each of the
two occupies only the stage that computes it. Lockstep schedules are timed by `evaluation.evaluate`, because every tick
is a rendezvous of all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from dhelix.passes.pipeline_fold.phases import Pattern, patterns
from dhelix.passes.pipeline_fold.schedule import Cell, Schedule
from dhelix.passes.pipeline_fold.tasks import PipelineCosts
from dhelix.passes.pipeline_fold.transfers import Hop

Times = list[Fraction]


def meeting_time(schedule: Schedule, costs: PipelineCosts, beside: bool = False) -> Fraction:
    """Time from the start of the first task to the end of the last task, embedding and head included.

    Args:
      schedule: a schedule that is not lockstep.
      beside: whether late exchanges overlap with the loops over layers of the next tick.
    """
    stages = _Stages(schedule, costs, beside)
    for pattern, cells in zip(patterns(schedule), schedule.ticks, strict=True):
        stages.tick(pattern, cells)
    return max(stages.clock)


class _Stages:
    """Simulates a schedule tick by tick. `clock` is the time that each stage has reached."""

    def __init__(self, schedule: Schedule, costs: PipelineCosts, beside: bool) -> None:
        self.schedule, self.costs, self.beside = schedule, costs, beside
        self.clock = [Fraction(0)] * schedule.layout.stages

    def tick(self, pattern: Pattern, cells: Sequence[Cell]) -> None:
        costs, last = self.costs, self.schedule.layout.chunks - 1
        forward = [-1 if cell.forward is None else cell.forward.chunk for cell in cells]
        backward = [-1 if cell.backward is None else cell.backward.chunk for cell in cells]
        exchanged = self._exchanged(pattern.cotangents.before, self._exchanged(pattern.activations.before, self.clock))
        if not self.beside:
            self.clock = exchanged
        self._end([chunk == 0 for chunk in forward], Fraction(costs.embedding) / 2)
        self._end([chunk == last for chunk in backward], Fraction(costs.head))
        layers = self.schedule.layout.padded
        work = [costs.of_pair(layers * (f >= 0), layers * (b >= 0)) for f, b in zip(forward, backward, strict=True)]
        self.clock = [now + time for now, time in zip(self.clock, work, strict=True)]
        self.clock = [max(times) for times in zip(self.clock, exchanged, strict=True)]
        self.clock = self._exchanged(pattern.activations.now, self.clock)
        self._end([chunk == 0 for chunk in backward], Fraction(costs.embedding) / 2)
        self.clock = self._exchanged(pattern.cotangents.now, self.clock)

    def _end(self, here: Sequence[bool], time: Fraction) -> None:
        """Adds `time`, the time of an embedding or a head, to the clocks of the stages marked in `here`.

        If all stages share embedding and head, they wait for each other, and each takes an equal part of `time`.
        """
        if self.costs.shared_ends and any(here) and time:
            self.clock = [max(self.clock) + time / len(here)] * len(here)
        if not self.costs.shared_ends:
            self.clock = [now + time * mine for now, mine in zip(self.clock, here, strict=True)]

    def _exchanged(self, ways: Sequence[Hop], arrivals: Times) -> Times:
        """The time at which each stage ends an exchange, given the time at which each stage reaches it.

        `ways` are the (sender, receiver) pairs of the exchange.
        """
        ends = list(arrivals)
        for sender, receiver in ways:
            meeting = max(arrivals[sender], arrivals[receiver])
            ends[sender], ends[receiver] = max(ends[sender], meeting), max(ends[receiver], meeting)
        met = {stage for way in ways for stage in way}
        return [end + Fraction(self.costs.send) * (stage in met) for stage, end in enumerate(ends)]
