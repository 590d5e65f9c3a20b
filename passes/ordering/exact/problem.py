"""Input of the exact model (`order.py`): instructions that take time, their dependencies, and rates.

    compute       an instruction on the compute lane; a loop as a whole
    collective    from its start to its done, on its lane; a synchronous one blocks compute
    free          said of compute and a collective that can overlap in some legal order

Instructions that take no time only connect other instructions. Dependencies are followed through them.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import Player, evaluate
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import Limits, dependencies


class Meeting(enum.Enum):
    """Ways in which a collective and compute overlap (`timeline.py`).

    The collective begins before the compute (RUNNING), together with the compute (FIRST), or while the compute runs
    (SECOND).
    """

    RUNNING = "running"
    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True, eq=False)
class Compute:
    """An instruction of the compute lane.

    Attributes:
      place: index in the sequence.
      seconds: time that it takes alone. For a loop that collectives may overlap with, this is the time of its compute.
      pause: seconds of the pause before it.
    """

    instruction: Instruction
    place: int
    seconds: float
    pause: float

    @property
    def loop(self) -> bool:
        """Whether the instruction is a loop, a call or a conditional."""
        return self.instruction.opcode in CONTROL_FLOW


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective.

    Attributes:
      start, end: places of its start and its done in the sequence.
      seconds: time that it takes alone, until the last of its GPUs is done.
      blocks: whether it is synchronous, so that compute waits from its start to its end.
      launch: seconds for which compute pauses before it.
    """

    instruction: Instruction
    start: int
    end: int
    seconds: float
    lane: Lane
    blocks: bool
    launch: float


class Problem:
    """The exact model's input for one computation. `sequence` fixes the order of accesses to shared buffers."""

    def __init__(
        self,
        computation: Computation,
        sequence: Sequence[Instruction],
        costs: Mapping[Instruction, Cost],
        limits: Limits,
    ) -> None:
        self.computation, self.sequence = computation, tuple(sequence)
        self._player = Player(costs, limits.hardware, limits.bodies)
        self._place = {i: n for n, i in enumerate(self.sequence)}
        self._direct: list[list[int]] = [[] for _ in self.sequence]
        for earlier, later in dependencies(computation, sequence, limits.memory):
            self._direct[self._place[later]].append(self._place[earlier])
        self._before: list[int] = []  # for each instruction, a bit mask of all its predecessors
        for places in self._direct:
            self._before.append(_union(self._before[n] | 1 << n for n in places))
        self.collectives = self._find_collectives(costs)
        self.compute = self._find_compute(costs, limits)

    def _find_collectives(self, costs: Mapping[Instruction, Cost]) -> list[Collective]:
        ends = {start_of(i): n for n, i in enumerate(self.sequence) if is_done(i)}
        wait = self._player.in_step.wait
        return [
            Collective(i, n, ends.get(i, n), costs[i].seconds + wait, costs[i].lane, not is_start(i), costs[i].launch)
            for n, i in enumerate(self.sequence)
            if i.opcode not in CONTROL_FLOW and costs[i].lane is not Lane.COMPUTE and costs[i].seconds > 0.0
        ]

    def _find_compute(self, costs: Mapping[Instruction, Cost], limits: Limits) -> list[Compute]:
        found = []
        for place, instruction in enumerate(self.sequence):
            if instruction.opcode in CONTROL_FLOW:
                played = evaluate([instruction], costs, limits.hardware, limits.bodies)
                alone = any(self._may_meet(place, c) for c in self.collectives)
                found.append(Compute(instruction, place, played.compute_alone if alone else played.seconds, 0.0))
            elif costs[instruction].lane is Lane.COMPUTE and costs[instruction].seconds > 0.0:
                pause = self._player.in_step.pause
                found.append(Compute(instruction, place, costs[instruction].seconds, pause))
        return found

    def free(self, compute: Compute, collective: Collective) -> bool:
        return self._may_meet(compute.place, collective)

    def precedes(self, compute: Compute, collective: Collective) -> bool:
        """Whether the compute precedes the launch of the collective in every legal order."""
        return bool(self._before[collective.start] >> compute.place & 1)

    def follows(self, compute: Compute, collective: Collective) -> bool:
        """Whether the compute waits for the collective in every legal order."""
        return bool(self._before[compute.place] >> collective.end & 1)

    def compute_before(self, x: int) -> list[int]:
        """Indices of the compute that directly precedes compute `x` in every legal order (see `predecessors`)."""
        return self.predecessors(self.compute[x].place)[0]

    def _may_meet(self, place: int, collective: Collective) -> bool:
        ordered = self._before[collective.start] >> place & 1 or self._before[place] >> collective.end & 1
        return not (ordered or collective.blocks)

    def rates(self, compute: Compute, collective: Collective, way: Meeting) -> tuple[float, float]:
        """Rates of compute and collective while the two overlap. A loop slows nothing and is not slowed."""
        if compute.loop:
            return 1.0, 1.0
        running = way is Meeting.RUNNING
        first = running or way is Meeting.FIRST
        return self._player.rates(compute.instruction, collective.instruction, first, running)

    def predecessors(self, place: int) -> tuple[list[int], list[int]]:
        """Indices of the compute, and of the collectives, that must end before the instruction at `place` begins.

        Only the nearest count: what must end before another of these begins is left out.
        """
        before = self._before[place]
        events = [(c.place, c.place) for c in self.compute] + [(c.end, c.start) for c in self.collectives]
        earlier = _union(self._before[begin] for end, begin in events if before >> end & 1)
        last = before & ~earlier
        return (
            [n for n, c in enumerate(self.compute) if last >> c.place & 1],
            [n for n, c in enumerate(self.collectives) if last >> c.end & 1],
        )

    def launched_before(self, collective: Collective) -> list[int]:
        """Indices of collectives of the same lane whose start precedes that of `collective` in every legal order."""
        before = self._before[collective.start]
        return [n for n, c in enumerate(self.collectives) if c.lane is collective.lane and before >> c.start & 1]

    def done_before(self, collective: Collective) -> list[int]:
        """Indices of collectives whose done precedes the start of `collective` in every legal order."""
        return [n for n, c in enumerate(self.collectives) if self._before[collective.start] >> c.end & 1]

    def orders(
        self, begins: Sequence[int], ends: Sequence[int], issues: Sequence[int], dones: Sequence[int]
    ) -> list[list[Instruction]]:
        """Two legal orders that approximate the given begin and end times of compute and collectives.

        A collective is launched before the first compute that ends after the collective begins. In the first order,
        compute waits for a collective only if the compute depends on it. In the second order, compute also waits for
        each collective that is done when the compute begins. This keeps the two from overlapping. All other
        instructions are placed where they are needed.
        """
        first = [min((b for b, e in zip(begins, ends, strict=True) if e > i), default=i) for i in issues]
        launched = [(at, 1, issue, c.start) for c, at, issue in zip(self.collectives, first, issues, strict=True)]
        run = [(begin, 2, begin, c.place) for c, begin in zip(self.compute, begins, strict=True)]
        done = [(at, 0, at, c.end) for c, at in zip(self.collectives, dones, strict=True)]
        return [self._laid(launched + run), self._laid(done + launched + run)]

    def _laid(self, events: list[tuple[int, int, int, int]]) -> list[Instruction]:
        laid: dict[int, None] = {}
        for *_, place in sorted(events):
            self._lay(place, laid)
        for place in range(len(self.sequence)):
            self._lay(place, laid)
        return [self.sequence[place] for place in laid]

    def _lay(self, place: int, laid: dict[int, None]) -> None:
        """Adds the instruction at `place`, after all its predecessors."""
        missing = self._before[place] | 1 << place
        for n in range(place + 1):
            if missing >> n & 1 and n not in laid:
                laid[n] = None


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found
