"""Hides collectives under compute by list scheduling: reorders the scheduled GPU program.

Before                      After
    all-gather-start a          all-gather-start a
    all-gather-done a           gemm x                  (x does not need a)
    gemm x                      all-gather-done a
    gemm y(a)                   gemm y(a)

The pass places instructions one by one, by a simulated clock. A collective starts as soon as its operands are ready and
its lane is idle. Its done is placed where the collective has ended, or where no compute is ready. Ready compute goes in
between. The pass tries two priorities: the length in seconds of the longest chain of instructions that depend on the
instruction, and XLA's order. It takes the faster result.

Contract
    Consumes  computations of a scheduled module that hold async collectives (pairs of start and done).
    Makes     another order of the same instructions.
    Leaves    XLA's order if the evaluator finds no order that is faster.

Legality and memory limits are those of `order_rules.py`. Costs come from a profile if there is one, else from the
roofline. The same holds for the rates at which overlapping compute and collectives run
(`passes/evaluation/timeline.py`). The pass takes time n log n for n instructions.

This list scheduler is the baseline for the dynamic programming of DHelix section 4.2 (arXiv 2411.15871).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dhelix.passes.analysis.buffers import LiveSet
from dhelix.passes.analysis.collectives import is_done, start_of
from dhelix.passes.evaluation.costs import CostModel, costs_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import Player, simulate
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, Limits, apply_order, dependencies, least_gain
from dhelix.profiles.hardware import H200, Hardware

_LAID = 150_000  # limit on the number of placed instructions, over all tries
_TRIED = 8  # candidates of a queue that are checked against the memory limit before the next queue


@dataclass(frozen=True)
class CollectiveSchedule:
    """List scheduling of async collectives.

    Attributes:
      hardware: GPU that gives the costs and rates if there is no `model`.
      memory_limit: bytes that the module may need, arguments included, by the pass's own estimate. None stands for the
        need of the given order plus `memory_slack`.
      memory_slack: memory in addition to the need of the given order, as a fraction of that need without arguments.
      min_gain: required saving with measured costs, as a fraction of the most that overlap could save
        (`order_rules.apply_order`). Smaller savings are within the error of the costs. For roofline costs,
        `order_rules.least_gain` raises the requirement.
      model: measured costs and rates; None takes the roofline of `hardware`.
      max_in_flight: the largest number of collectives of one lane that may be between start and done; None for no
        limit.
    """

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = MEMORY_SLACK
    min_gain: float = 0.02
    model: CostModel | None = None
    max_in_flight: int | None = None

    name = "collective-schedule"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = costs_of(self.hardware, self.model)
        limits = self.memory_limit, self.memory_slack, least_gain(self.min_gain, costs), self.max_in_flight
        return apply_order(module, context, list_order, costs, *limits)


def list_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
) -> list[Instruction]:
    """The fastest order that fits into memory, among `sequence` and a few list schedules.

    A list schedule that needs too much memory is tried again with instructions kept nearer to their old places. If no
    order fits, the result is `sequence` or a greedy low-memory order, whichever needs less memory.
    """
    graph = _Graph.of(computation, sequence, costs, limits)
    fitting = [list(sequence)] if limits.memory.peak(computation, sequence) <= limits.bytes else []
    left = max(_LAID, len(sequence))
    for by_path in (True, False):
        for part in (1, 8, 32, 128):
            layer = _Layer(graph, costs, limits, by_path, len(sequence) // part)
            laid = layer.lay() if left >= len(sequence) else None
            left -= len(layer.laid)
            if laid is not None:
                fitting.append(laid)
                break
    if not fitting:
        return min(list(sequence), _frugal_order(graph, limits), key=partial(limits.memory.peak, computation))
    return min(fitting, key=lambda o: simulate(computation, o, costs, limits.hardware, limits.bodies).seconds)


def _frugal_order(graph: "_Graph", limits: Limits) -> list[Instruction]:
    """Builds an order greedily.

    Of the first few ready instructions, it always places the one after which the fewest bytes are live.
    """
    live = LiveSet(limits.memory, graph.computation)
    waits_for = dict(graph.waits_for)
    ready = [n for n, i in enumerate(graph.sequence) if not waits_for[i]]  # sorted, so already a heap
    order: list[Instruction] = []
    while ready:
        tried = [heapq.heappop(ready) for _ in range(min(_TRIED, len(ready)))]
        number = min(tried, key=lambda n: (live.after(graph.sequence[n]), n))
        for other in tried:
            if other != number:
                heapq.heappush(ready, other)
        instruction = graph.sequence[number]
        order.append(instruction)
        live.place(instruction)
        for successor in graph.successors[instruction]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                heapq.heappush(ready, graph.position[successor])
    return order


@dataclass(frozen=True)
class _Graph:
    """Dependencies, and the longest path from each instruction.

    Attributes:
      waits_for: the number of predecessors of each instruction.
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
            if instruction.opcode in CONTROL_FLOW:
                alone = simulate(computation, [instruction], costs, limits.hardware, limits.bodies)
                seconds = alone.seconds
            path[instruction] = seconds + max((path[s] for s in successors[instruction]), default=0.0)
        position = {i: n for n, i in enumerate(sequence)}
        return _Graph(computation, sequence, position, successors, waits_for, path)


Key = tuple[float, int]


class _Layer:
    """Places instructions in a legal order, one by one.

    An instruction is placed only after all instructions that are more than `window` places before it in the old order.
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
        self.turn = 0  # position of the first instruction that is not placed yet
        self.parked: list[int] = []  # positions of ready instructions beyond the window
        self.free: list[int] = []  # positions of ready instructions that take no time
        self.dones: list[Instruction] = []
        self.starts: dict[Lane, list[Key]] = {lane: [] for lane in Lane if lane is not Lane.COMPUTE}
        self.compute: list[Key] = []

    def lay(self) -> list[Instruction] | None:
        """The order, or None if it needs too much memory."""
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
        """The first instruction of the heap that fits into memory; None if none of the first `_TRIED` fits."""
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
        """Of all ready instructions, the first in the old sequence."""
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
        elif cost.seconds > 0.0 or instruction.opcode in CONTROL_FLOW:
            heapq.heappush(self.compute, self._key(instruction))
        else:
            heapq.heappush(self.free, position)

    def _key(self, instruction: Instruction) -> Key:
        position = self.graph.position[instruction]
        return (-self.graph.path[instruction] if self.by_path else float(position), position)
