"""Edits that move or copy instructions: copies of computations, calls inlined, dead code dropped."""

from collections.abc import Callable, Iterable

from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.module import Computation, Instruction

# Opcodes whose called computation is a scalar function of its operands; several instructions may share it.
_APPLIED = frozenset(
    "all-reduce all-reduce-start map reduce reduce-scatter reduce-window scatter select-and-scatter "
    "sort".split()
)
_EFFECTS = frozenset(
    "infeed outfeed send send-done recv recv-done rng rng-get-and-update-state domain parameter".split()
)


def has_side_effect(instruction: Instruction) -> bool:
    """Whether the instruction does more than compute its result; a loop has the effects of its body."""
    if instruction.opcode in _EFFECTS:
        return instruction.opcode != "parameter"
    if instruction.opcode == "custom-call":
        return instruction.proto.custom_call_has_side_effect
    return any(has_side_effect(i) for c in instruction.called for i in c.instructions)


def copy_called(instruction: Instruction) -> list[Computation]:
    """Computations for a copy of `instruction`: loops, branches, calls and fusions need their own."""
    if instruction.opcode in _APPLIED:
        return instruction.called
    return [copy_computation(c) for c in instruction.called]


def copy_computation(original: Computation) -> Computation:
    builder = Builder(original.module.new_computation(original.name))
    builder.computation.proto.program_shape.CopyFrom(original.proto.program_shape)
    copies: dict[Instruction, Instruction] = {}
    copy_instructions(builder, original.instructions, copies)
    return builder.finish(copies[original.root])


def copy_instructions(
    builder: Builder, instructions: Iterable[Instruction], copies: dict[Instruction, Instruction]
) -> None:
    """Copies `instructions` (operands before users); `copies` maps what they read and receives what is made.

    Instructions that `copies` already maps are left out.
    """
    made = [i for i in instructions if i not in copies]
    for instruction in made:
        operands = [copies[o] for o in instruction.operands]
        copies[instruction] = builder.copy(instruction, operands, copy_called(instruction))
    for instruction in made:
        kept = [copies[p] for p in instruction.control_predecessors if p in copies]
        copies[instruction].control_predecessors = kept


def replace_uses(computation: Computation, old: Instruction, new: Instruction) -> None:
    """Every instruction but `new` itself that reads `old` reads `new`; the root too."""
    for instruction in computation.instructions:
        if instruction is not new and old in instruction.operands:
            instruction.operands = [new if o is old else o for o in instruction.operands]
    if computation.root is old:
        computation.root = new


def inline_calls(computation: Computation, keep: Callable[[Instruction], bool] = lambda call: False) -> int:
    """Replaces each `call` in `computation` by the body that it calls, recursively, unless `keep(call)`.

    Lowered JAX calls functions for `jit`, `custom_vjp` and loop bodies; XLA inlines them too, but only later.
    Returns the number of calls replaced.
    """
    result: list[Instruction] = []
    stands_for: dict[Instruction, Instruction] = {}
    count = 0
    for instruction in computation.instructions:
        instruction.operands = [stands_for.get(o, o) for o in instruction.operands]
        instruction.control_predecessors = [stands_for.get(p, p) for p in instruction.control_predecessors]
        source = instruction.operands[0] if instruction.operands else None
        if instruction.opcode == "get-tuple-element" and source is not None and source.opcode == "tuple":
            stands_for[instruction] = source.operands[instruction.tuple_index]
        elif instruction.opcode == "call" and not keep(instruction):
            callee = copy_computation(instruction.called[0])
            count += 1 + inline_calls(callee, keep)
            given = dict(zip(callee.parameters, instruction.operands, strict=True))
            for inner in callee.instructions:
                if inner not in given:
                    inner.operands = [given.get(o, o) for o in inner.operands]
                    inner.computation = computation
                    result.append(inner)
            stands_for[instruction] = given.get(callee.root, callee.root)
        else:
            result.append(instruction)
    computation.instructions = result
    computation.root = stands_for.get(computation.root, computation.root)
    return count


def drop_dead(computation: Computation) -> int:
    """Removes instructions that nothing reads and that have no effect. Returns how many."""
    live: set[Instruction] = {computation.root}
    before = len(computation.instructions)
    for instruction in reversed(computation.instructions):
        if instruction in live or instruction.opcode == "parameter" or has_side_effect(instruction):
            live.add(instruction)
            live.update(instruction.operands)
            live.update(instruction.control_predecessors)
    computation.instructions = [i for i in computation.instructions if i in live]
    return before - len(computation.instructions)
