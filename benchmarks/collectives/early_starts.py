"""Early starts: launches each collective as soon as its operands are there, and waits for it as late as possible.

    before   product, product, all-reduce-start, product, all-reduce-done
    after    all-reduce-start, product, product, product, all-reduce-done

XLA starts a collective just early enough to hide it. To measure contention, a collective and the computation beside it
must start together. The pass is for measurements alone: it looks neither at memory nor at time.

Why it is legal: data flow, control dependencies and accesses to shared buffers are kept (`order_rules.predecessors`).
Cost: a sort of each computation.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import find_collective, is_done, is_start, start_of
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.order_rules import predecessors


@dataclass(frozen=True)
class EarlyStarts:
    """The pass. It applies to every scheduled computation with an asynchronous collective."""

    name = "early-starts"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        memory = Memory(module)
        changed = False
        for computation, sequence in module.schedule.items():
            starts = sum(is_start(i) and find_collective(i) is not None for i in sequence)
            if not starts:
                continue
            before = predecessors(computation, sequence, memory)
            module.schedule[computation] = _sorted(sequence, before)
            context.note("collectives start early", computation=computation.name, collectives=starts)
            changed |= module.schedule[computation] != list(sequence)
        return changed


def _sorted(sequence: list[Instruction], before: dict[Instruction, list[Instruction]]) -> list[Instruction]:
    """Starts, and what they need, come first; ends, and what needs them, come last; otherwise the order is kept."""
    place = {instruction: n for n, instruction in enumerate(sequence)}
    needed: set[Instruction] = set()
    for instruction in reversed(sequence):
        if instruction in needed or (is_start(instruction) and find_collective(instruction) is not None):
            needed.update([instruction, *before[instruction]])
    late: set[Instruction] = set()
    for instruction in sequence:
        ends = is_done(instruction) and find_collective(start_of(instruction)) is not None
        if ends or any(one in late for one in before[instruction]):
            late.add(instruction)
    users: dict[Instruction, list[Instruction]] = {i: [] for i in sequence}
    for instruction, needs in before.items():
        for one in needs:
            users[one].append(instruction)
    open_needs = {instruction: len(before[instruction]) for instruction in sequence}
    ready = [(_rank(i, needed, late), place[i]) for i in sequence if not open_needs[i]]
    heapq.heapify(ready)
    laid: list[Instruction] = []
    while ready:
        instruction = sequence[heapq.heappop(ready)[1]]
        laid.append(instruction)
        for user in users[instruction]:
            open_needs[user] -= 1
            if not open_needs[user]:
                heapq.heappush(ready, (_rank(user, needed, late), place[user]))
    return laid


def _rank(instruction: Instruction, needed: set[Instruction], late: set[Instruction]) -> int:
    return 0 if instruction in needed and instruction not in late else 2 if instruction in late else 1
