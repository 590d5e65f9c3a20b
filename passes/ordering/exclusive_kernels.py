"""Keeps collectives from being in flight while a kernel that waits for its peers holds the whole GPU.

Before (deadlock):                    After:
    gather = all-gather-start(x)          gather = all-gather-start(x)
    a = gemm(...)                         a = gemm(...)
    k = custom-call(...)  waits           g = all-gather-done(gather)
    b = gemm(...)                         k = custom-call(...), control-predecessors={g}
    g = all-gather-done(gather)           b = gemm(...)

The peers of a kernel are the same kernel on other GPUs. A Mosaic-GPU kernel that writes to its peers is persistent: its
blocks occupy every multiprocessor until the peers' blocks have answered. Suppose device 0 runs the NCCL kernel of a
collective and waits for device 1. If the persistent kernel already holds device 1's multiprocessors and waits for
device 0, both devices wait forever.

Contract
    Consumes  a scheduled module.
    Makes     an order of each computation in which no collective is in flight while such a kernel runs. Instructions
              that hold such a kernel (a fusion, a loop, a branch, an async computation) count as the kernel. The
              kernels cut the interval from a collective's start to its done into stretches. The collective moves into
              the legal stretch with the most compute. Control dependencies make later passes keep this order
              (`order_rules.dependencies`).
    Leaves    programs without such kernels, and the order of all other instructions. Copies and compute on other
              streams may overlap with a kernel, because they wait for no peer and always finish.
    Refuses   if data flow, buffers or control dependencies rule out every stretch. The module then stays as it is, and
              may deadlock.

The pass must run before the passes that change the order. It uses roofline costs only to choose the stretch that hides
most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import find_collective, is_done, is_exclusive, is_start, start_of
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.order_rules import dependencies
from dhelix.profiles.hardware import H200, Hardware

Pair = tuple[Instruction, Instruction]


@dataclass(frozen=True)
class ExclusiveKernels:
    """Ends every collective before a kernel that waits for its peers, or starts the collective after that kernel.

    Attributes:
      hardware: GPU whose roofline tells how much compute each stretch holds.
    """

    hardware: Hardware = H200

    name = "exclusive-kernels"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        """Raises PassRefusal if a collective must be in flight while a kernel that waits for its peers runs."""
        holding = _holding(module)
        if not holding:
            return False
        memory, costs = Memory(module), Costs(self.hardware)
        original = dict(module.schedule)
        moved = 0
        for computation in [c for c in module.computations if c in module.schedule and c in holding]:
            guard = _Guard(computation, holding, memory, costs)
            try:
                order = guard.order()
            except PassRefusal:
                module.schedule.update(original)
                raise
            module.schedule[computation] = order
            moved += len(guard.moved)
            for start in guard.moved:
                context.note("no longer in flight while a kernel waits for its peers", start)
        for computation in holding:
            if computation in module.schedule:
                _tie(module.schedule[computation], holding)
        kernels = sum(map(is_exclusive, (i for c in module.computations for i in c.instructions)))
        context.note("kernels that wait for their peers", count=kernels, collectives_moved=moved)
        return True


def _holding(module: HloModule) -> dict[Computation, None]:
    """The computations that run a kernel that waits for its peers, directly or in a callee. Callees come first."""
    found: dict[Computation, None] = {}
    for computation in module.computations:
        if any(_is_exclusive_in(i, found) for i in computation.instructions):
            found[computation] = None
    return found


def _is_exclusive_in(instruction: Instruction, holding: Mapping[Computation, None]) -> bool:
    """Whether the instruction runs a kernel that waits for its peers. The done of an async computation runs nothing."""
    if is_done(instruction) or instruction.opcode == "async-update":
        return False
    return is_exclusive(instruction) or any(called in holding for called in instruction.called)


class _Guard:
    """Finds an order of one computation in which no collective is in flight while an exclusive kernel runs.

    Exclusive kernels wait for their peers (`is_exclusive`).
    """

    def __init__(
        self, computation: Computation, holding: Mapping[Computation, None], memory: Memory, costs: Costs
    ) -> None:
        self.costs = costs
        self.sequence = list(computation.module.schedule[computation])
        self.kernels = [i for i in self.sequence if _is_exclusive_in(i, holding)]
        self.moved: list[Instruction] = []
        self.before: dict[Instruction, list[Instruction]] = {i: [] for i in self.sequence}
        self.after: dict[Instruction, list[Instruction]] = {i: [] for i in self.sequence}
        for earlier, later in dependencies(computation, self.sequence, memory):
            self.before[later].append(earlier)
            self.after[earlier].append(later)

    def order(self) -> list[Instruction]:
        """The new order: starts move down or dones move up until no collective is in flight while `kernels` run.

        Raises PassRefusal if there is no such order.
        """
        order = self.sequence
        for start, done in _pairs(self.sequence):
            exclusive = start in self.kernels
            if not exclusive and find_collective(start) is None:
                continue
            first, last = order.index(start), order.index(done)
            between = [i for i in order[first + 1 : last] if i in self.kernels]
            if exclusive and last == first + 1 or not exclusive and not between:
                continue
            order = self._apart(order, start, done, [] if exclusive else between)
            self.moved.append(start)
        return order

    def _apart(
        self, order: list[Instruction], start: Instruction, done: Instruction, between: Sequence[Instruction]
    ) -> list[Instruction]:
        """`order` with `start` and `done` moved, so that no kernel is between them.

        Args:
          between: the exclusive kernels between the two in `order`. If it is empty, the async pair itself runs such a
            kernel, and the done moves right behind the start.
        """
        if not between:
            tries = [_moved(order, start, done, start, None)]
        else:
            stretches = list(pairwise([start, *between, done]))
            stretches.sort(key=lambda s: -self._compute(order, *s))  # stable: of equal stretches the first wins
            tries = [_moved(order, start, done, low, high) for low, high in stretches]
        for tried in tries:
            if self._is_legal(tried, start, done):
                return tried
        raise PassRefusal(
            "a collective must be in flight while a kernel waits for its peers, which can deadlock the program: "
            'compile without collective matmuls of form "mosaic"',
            start,
        )

    def _compute(self, order: list[Instruction], low: Instruction, high: Instruction) -> float:
        inside = order[order.index(low) + 1 : order.index(high)]
        return sum(self.costs[i].seconds for i in inside if self.costs[i].lane is Lane.COMPUTE)

    def _is_legal(self, order: list[Instruction], *moved: Instruction) -> bool:
        position = {i: n for n, i in enumerate(order)}
        return all(
            all(position[b] < position[i] for b in self.before[i])
            and all(position[i] < position[a] for a in self.after[i])
            for i in moved
        )


def _pairs(sequence: Sequence[Instruction]) -> list[Pair]:
    """Pairs of a start and its done, in the order of the starts."""
    ends = {start_of(i): i for i in sequence if is_done(i)}
    return [(i, ends[i]) for i in sequence if is_start(i) and i in ends]


def _moved(
    order: Sequence[Instruction], start: Instruction, done: Instruction, low: Instruction, high: Instruction | None
) -> list[Instruction]:
    """`order` with the start right after `low` and the done right before `high`.

    If `high` is None, the done goes right after the start.
    """
    result: list[Instruction] = []
    for instruction in order:
        if instruction is high and high is not done:
            result.append(done)
        if instruction is start and low is not start or instruction is done and high is not done:
            continue
        result.append(instruction)
        if instruction is low and low is not start:
            result.append(start)
        if instruction is start and high is None:
            result.append(done)
    return result


def _tie(sequence: Sequence[Instruction], holding: Mapping[Computation, None]) -> None:
    """Adds control dependencies that keep each collective between the same kernels, and the kernels in their order."""
    pairs = dict(_pairs(sequence))
    ended: list[Instruction] = []
    last: Instruction | None = None
    for instruction in sequence:
        if _is_exclusive_in(instruction, holding):
            _follow(instruction, *ended, *([] if last is None else [last]))
            ended, last = [], pairs.get(instruction, instruction)
        elif instruction in pairs and find_collective(instruction) is not None and last is not None:
            _follow(instruction, last)
        elif is_done(instruction) and find_collective(start_of(instruction)) is not None:
            ended.append(instruction)


def _follow(instruction: Instruction, *before: Instruction) -> None:
    known = {*instruction.operands, *instruction.control_predecessors}
    instruction.control_predecessors = [*instruction.control_predecessors, *(b for b in before if b not in known)]
