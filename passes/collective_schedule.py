"""Collectives under compute, by list scheduling: another order of the scheduled GPU program that hides more.

Matches: computations of a scheduled module that hold async collectives (pairs of start and done).

Makes of it: another order of the same instructions. They are laid down one after the other against the
timeline's own clock. A collective starts as soon as its operands are there and its lane is idle; its done
stands where it has finished, or where nothing is left to compute; between them goes what is ready, by the
length of the longest path that hangs on it, or in XLA's order, whichever plays faster.

    all-gather-start a          all-gather-start a
    all-gather-done a           gemm x                  (x does not need a)
    gemm x                      all-gather-done a
    gemm y(a)                   gemm y(a)

Legal, because data flow, control dependencies, the order of side effects and the order in which instructions
meet in a shared buffer (`passes/buffers.py`) are kept. Memory is a hard limit: an order that needs more, by
the estimate of `passes/buffers.py`, is never taken. Where no order plays better than XLA's, XLA's stays.

Costs are those of a profile where one is given, else the roofline's; so is what collectives and compute do to
each other (`passes/timeline.py`). The pass takes n log n time in the instructions.

This is the baseline beside the dynamic programming of DHelix section 4.2. A scheduler is a function
`order(computation, sequence, costs, limits) -> sequence`; `apply_order` does the rest for any of them.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dhelix.passes.buffers import LiveSet, Memory
from dhelix.passes.collectives import is_done, is_start, start_of
from dhelix.passes.costs import Cost, CostModel, Costs, Lane
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.timeline import Player, Timeline, simulate, simulate_module
from dhelix.profiles.hardware import H200, Hardware

_CALLS = ("while", "call", "conditional")
_TRIED = 8  # candidates that are tried for memory before the oldest one is taken


@dataclass(frozen=True)
class Limits:
    """What a scheduler must keep to, and what it need not compute again.

    Attributes:
      bytes: that may live at once in the computation, callees included.
      memory: estimates of that.
      bodies: timelines of called computations, whose order is settled.
    """

    hardware: Hardware
    bytes: int
    memory: Memory
    bodies: dict[Computation, Timeline] = field(default_factory=dict)


Scheduler = Callable[[Computation, Sequence[Instruction], Mapping[Instruction, Cost], Limits], list[Instruction]]


@dataclass(frozen=True)
class CollectiveSchedule:
    """List scheduling of async collectives.

    Attributes:
      hardware: whose costs and rates count where there is no `model`.
      memory_limit: bytes of temporaries and results that the module may need by the pass's own estimate; by
        default what the order it got needs and `memory_slack` of that.
      memory_slack: 3 %, which is what all passes together may cost (DHelix section 6).
      min_gain: share of a computation's time that a new order must be predicted to save. Less is within the
        roofline's error: two strands took 1041 ms under a list schedule where XLA's order took 1025.
      model: measured costs and rates.
    """

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = 0.03
    min_gain: float = 0.01
    model: CostModel | None = None

    name = "collective-schedule"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = Costs(self.hardware) if self.model is None else self.model.costs()
        return apply_order(module, context, list_order, costs, self.memory_limit, self.memory_slack, self.min_gain)


def apply_order(
    module: HloModule,
    context: PassContext,
    order: Scheduler,
    costs: Costs,
    memory_limit: int | None = None,
    memory_slack: float = 0.0,
    min_gain: float = 0.0,
) -> bool:
    """Gives every computation with async collectives the order that `order` finds, where that is better.

    Callees come before their callers, so that a loop's body is settled when the loop is placed.
    Returns whether the schedule changed; what was done is in the context's notes.
    """
    chosen = [c for c in module.computations if c in module.schedule and _has_collectives(c, costs)]
    if not chosen:
        return False
    memory, bodies = Memory(module), {}
    original = dict(module.schedule)
    before = simulate_module(module, costs.hardware, costs).seconds
    if memory_limit is None:
        memory_limit = int(memory.peak(module.entry, module.schedule[module.entry]) * (1.0 + memory_slack))
    for computation in chosen:
        allowed = _allowance(module, memory, computation, memory_limit)
        limits = Limits(costs.hardware, allowed, memory, bodies)
        _improve(computation, order, costs, limits, min_gain, context)
    if all(module.schedule[c] == original[c] for c in chosen):
        return False
    after = simulate_module(module, costs.hardware, costs).seconds
    facts = {"seconds_before": before, "seconds_after": after}
    if after >= before:
        module.schedule.update(original)
        context.note("stood down: the module as a whole plays no faster", **facts)
        return False
    context.note("the module as a whole", **facts)
    return True


def _has_collectives(computation: Computation, costs: Costs) -> bool:
    return any(is_start(i) and costs[i].lane is not Lane.COMPUTE for i in computation.instructions)


def _allowance(module: HloModule, memory: Memory, computation: Computation, limit: int) -> int:
    """Bytes that the computation may need: what it needs now, and what the module leaves to its limit."""
    memory.forget()
    own = memory.peak(computation, module.schedule[computation])
    return own + max(limit - memory.peak(module.entry, module.schedule[module.entry]), 0)


def _improve(
    computation: Computation,
    order: Scheduler,
    costs: Costs,
    limits: Limits,
    min_gain: float,
    context: PassContext,
) -> None:
    schedule = computation.module.schedule
    old = schedule[computation]
    new = order(computation, old, costs, limits)
    verify_sequence(computation, new)
    before, after = (simulate(computation, s, costs, limits.hardware, limits.bodies) for s in (old, new))
    peak = limits.memory.peak(computation, new)
    facts = {
        "computation": computation.name,
        "seconds_before": before.seconds,
        "seconds_after": after.seconds,
        "exposed_before": before.exposed,
        "exposed_after": after.exposed,
        "bytes": peak,
        "bytes_limit": limits.bytes,
    }
    if new == old or peak > limits.bytes or after.seconds > before.seconds * (1.0 - min_gain):
        context.note("stood down: no order plays better than XLA's", **facts)
        return
    schedule[computation] = new
    context.note("reordered", **facts)


def list_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
) -> list[Instruction]:
    """The fastest of a few list schedules that keep within memory, or `sequence` where none is faster.

    One that needs too much memory is tried again with instructions held nearer to their old places.
    """
    graph = _Graph.of(computation, sequence, costs, limits)
    best = list(sequence)
    best_seconds = simulate(computation, best, costs, limits.hardware, limits.bodies).seconds
    for by_path in (True, False):
        windows = (len(sequence) // part for part in (1, 8, 32, 128))
        tries = (_Layer(graph, costs, limits, by_path, window).lay() for window in windows)
        laid = next((order for order in tries if order is not None), None)
        if laid is not None:
            seconds = simulate(computation, laid, costs, limits.hardware, limits.bodies).seconds
            if seconds < best_seconds:
                best, best_seconds = laid, seconds
    return best


@dataclass(frozen=True)
class _Graph:
    """What must come before what, and how much hangs on each instruction.

    Attributes:
      path: seconds from an instruction's start to the end of the longest path through its successors.
    """

    computation: Computation
    sequence: Sequence[Instruction]
    position: dict[Instruction, int]
    successors: dict[Instruction, list[Instruction]]
    waits_for: dict[Instruction, int]
    path: dict[Instruction, float]

    @staticmethod
    def of(
        computation: Computation,
        sequence: Sequence[Instruction],
        costs: Mapping[Instruction, Cost],
        limits: Limits,
    ) -> "_Graph":
        successors: dict[Instruction, list[Instruction]] = {i: [] for i in sequence}
        waits_for = dict.fromkeys(sequence, 0)
        for before, after in dependencies(computation, sequence, limits.memory):
            successors[before].append(after)
            waits_for[after] += 1
        path: dict[Instruction, float] = {}
        for instruction in reversed(sequence):
            seconds = costs[instruction].seconds
            if instruction.opcode in _CALLS:
                alone = simulate(computation, [instruction], costs, limits.hardware, limits.bodies)
                seconds = alone.seconds
            path[instruction] = seconds + max((path[s] for s in successors[instruction]), default=0.0)
        position = {i: n for n, i in enumerate(sequence)}
        return _Graph(computation, sequence, position, successors, waits_for, path)


def dependencies(
    computation: Computation, sequence: Sequence[Instruction], memory: Memory
) -> Iterable[tuple[Instruction, Instruction]]:
    """What must come before what, as (before, after): data, control, side effects and shared buffers."""
    edges: dict[tuple[Instruction, Instruction], None] = {}
    effect: Instruction | None = None
    for instruction in sequence:
        for before in (*instruction.operands, *instruction.control_predecessors):
            edges[before, instruction] = None
        if has_side_effect(instruction):
            if effect is not None:
                edges[effect, instruction] = None
            effect = instruction
    edges.update(dict.fromkeys(memory.buffers[computation].order_edges(sequence)))
    return edges


Key = tuple[float, int]


class _Layer:
    """Lays instructions down in a legal order, one after the other.

    An instruction is never laid more than `window` places before its turn in the old sequence.
    """

    def __init__(
        self,
        graph: _Graph,
        costs: Mapping[Instruction, Cost],
        limits: Limits,
        by_path: bool,
        window: int,
    ) -> None:
        self.graph, self.costs, self.limits, self.window = graph, costs, limits, window
        self.by_path = by_path
        self.player = Player(costs, limits.hardware, limits.bodies)
        self.live = LiveSet(limits.memory, graph.computation)
        self.waits_for = dict(graph.waits_for)
        self.laid: dict[Instruction, None] = {}
        self.turn = 0  # position of the first instruction that is not laid yet
        self.parked: list[int] = []  # positions, beyond the window
        self.free: list[int] = []  # positions; they take no time
        self.dones: list[Instruction] = []
        self.starts: dict[Lane, list[Key]] = {Lane.COMM: [], Lane.COMM_INTER: []}
        self.compute: list[Key] = []

    def lay(self) -> list[Instruction] | None:
        """The order, or None where it runs out of memory."""
        for instruction in self.graph.sequence:
            if not self.waits_for[instruction]:
                self._admit(instruction)
        while len(self.laid) < len(self.graph.sequence):
            instruction = self._choose()
            if self.live.needed(instruction) > self.limits.bytes:
                return None
            self._place(instruction)
        return list(self.laid)

    def _choose(self) -> Instruction:
        sequence = self.graph.sequence
        if self.free:
            return sequence[heapq.heappop(self.free)]
        under_way = self.player.under_way
        for done in self.dones:
            if start_of(done) not in under_way:
                return self._take_done(done)
        for lane, starts in self.starts.items():
            if starts and not self.player.lanes[lane]:
                found = self._fitting(starts)
                if found is not None:
                    return found
        found = self._fitting(self.compute)
        if found is not None:
            return found
        if self.dones:
            left = {flight.instruction: n for lane in self.player.lanes.values() for n, flight in enumerate(lane)}
            return self._take_done(min(self.dones, key=lambda d: (left[start_of(d)], self.graph.position[d])))
        return self._oldest()

    def _take_done(self, done: Instruction) -> Instruction:
        self.dones.remove(done)
        return done

    def _fitting(self, heap: list[Key]) -> Instruction | None:
        """The first of the heap that fits into memory, if one of the first few does."""
        tried: list[Key] = []
        found = None
        while heap and found is None and len(tried) < _TRIED:
            key = heapq.heappop(heap)
            instruction = self.graph.sequence[key[1]]
            if self.live.needed(instruction) <= self.limits.bytes:
                found = instruction
            else:
                tried.append(key)
        for key in tried:
            heapq.heappush(heap, key)
        return found

    def _oldest(self) -> Instruction:
        """What stands first in the old sequence of all that is ready."""
        heaps = [heap for heap in (self.compute, *self.starts.values()) if heap]
        heap = min(heaps, key=lambda h: min(position for _, position in h))
        key = min(heap, key=lambda k: k[1])
        heap.remove(key)
        heapq.heapify(heap)
        return self.graph.sequence[key[1]]

    def _place(self, instruction: Instruction) -> None:
        self.laid[instruction] = None
        self.live.place(instruction)
        self.player.play(instruction)
        sequence = self.graph.sequence
        while self.turn < len(sequence) and sequence[self.turn] in self.laid:
            self.turn += 1
        for successor in self.graph.successors[instruction]:
            self.waits_for[successor] -= 1
            if not self.waits_for[successor]:
                self._admit(successor)
        while self.parked and self.parked[0] <= self.turn + self.window:
            self._queue(sequence[heapq.heappop(self.parked)])

    def _admit(self, instruction: Instruction) -> None:
        position = self.graph.position[instruction]
        if position > self.turn + self.window:
            heapq.heappush(self.parked, position)
        else:
            self._queue(instruction)

    def _queue(self, instruction: Instruction) -> None:
        position, cost = self.graph.position[instruction], self.costs[instruction]
        if is_done(instruction):
            start = start_of(instruction)
            if self.costs[start].lane is Lane.COMPUTE:
                heapq.heappush(self.compute, self._key(instruction))
            else:
                self.dones.append(instruction)
        elif cost.lane is not Lane.COMPUTE:
            heapq.heappush(self.starts[cost.lane], self._key(instruction))
        elif cost.seconds > 0.0 or instruction.opcode in _CALLS:
            heapq.heappush(self.compute, self._key(instruction))
        else:
            heapq.heappush(self.free, position)

    def _key(self, instruction: Instruction) -> Key:
        position = self.graph.position[instruction]
        return (-self.graph.path[instruction] if self.by_path else float(position), position)
