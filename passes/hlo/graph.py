"""Reachability by data flow and control dependencies in one computation, and walks over the call graph."""

from collections.abc import Callable, Iterable, Iterator

from dhelix.passes.hlo.module import Computation, HloModule, Instruction

CONTROL_FLOW = frozenset(("while", "call", "conditional"))
"""Opcodes of instructions that run other computations. Each of these computations has its own schedule."""


def descendants(computation: Computation, seeds: Iterable[Instruction]) -> set[Instruction]:
    """The seeds and all instructions that depend on them. One sweep suffices, because operands come before users."""
    found = set(seeds)
    for instruction in computation.instructions:
        if not found.isdisjoint(instruction.operands) or not found.isdisjoint(instruction.control_predecessors):
            found.add(instruction)
    return found


def ancestors(computation: Computation, seeds: Iterable[Instruction]) -> set[Instruction]:
    """The seeds and all instructions that they depend on."""
    found = set(seeds)
    for instruction in reversed(computation.instructions):
        if instruction in found:
            found.update(instruction.operands)
            found.update(instruction.control_predecessors)
    return found


def tied(computation: Computation) -> set[Instruction]:
    """Instructions at either end of a control dependency."""
    found = [i for i in computation.instructions if i.control_predecessors]
    return {*found, *(p for i in found for p in i.control_predecessors)}


def callers(module: HloModule) -> dict[Computation, list[Instruction]]:
    """Maps each computation to the instructions that call it, in module order."""
    found: dict[Computation, list[Instruction]] = {c: [] for c in module.computations}
    for computation in module.computations:
        for instruction in computation.instructions:
            for called in dict.fromkeys(instruction.called):
                found[called].append(instruction)
    return found


def run_once(computation: Computation) -> list[Computation]:
    """`computation` and all computations that it runs at most once: callees of calls and branches of conditionals.

    Bodies of shard_maps are included. Bodies of loops are not. Callers come first.
    """
    once = [i for i in walk(computation, _is_call) if _is_call(i)]
    return list(dict.fromkeys([computation, *(called for i in once for called in i.called)]))


def _is_call(instruction: Instruction) -> bool:
    return instruction.opcode in ("call", "conditional")


def walk(computation: Computation, into: Callable[[Instruction], bool] = lambda i: True) -> Iterator[Instruction]:
    """Yields the instructions of `computation`.

    After each instruction for which `into` is true, yields the instructions of its callees.
    """
    for instruction in computation.instructions:
        yield instruction
        if instruction.called and into(instruction):
            for called in instruction.called:
                yield from walk(called, into)
