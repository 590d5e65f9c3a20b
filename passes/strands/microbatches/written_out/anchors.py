"""Finds anchors: one operation from each of N independent backward passes of a program.

Unrolled micro-batches are recognized by their backward passes. These hold operations of the same name and kind that do
not depend on each other, whereas unrolled layers depend on each other. The part of an anchor consists of the
instructions that belong to its micro-batch (`labels`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.hlo import Computation, Instruction, graph

_OF_CONSTANTS = ("broadcast", "reshape", "convert")
_WEIGHTY = ("dot", "while")
_RESULT = "xla.sdy.FuncResultSharding"  # a custom call that gives the sharding of a result of the program
_DIFFERENTIATED = re.compile(r"(jvp|transpose)\(")


def anchors(computation: Computation) -> list[Instruction]:
    """The anchors: the independent operations of the kind that has the fewest independent operations.

    A kind is one operation of the user's program that takes gradients (`_kind`). Empty if a kind occurs only once.
    """
    kinds: dict[Hashable, list[Instruction]] = {}
    for instruction in computation.instructions:
        if (kind := _kind(instruction)) is not None:
            kinds.setdefault(kind, []).append(instruction)
    if any(len(members) < 2 for members in kinds.values()):
        return []
    # Weight gradients of several layers may be independent, too. The smallest kind has one operation per micro-batch.
    return min((_first(computation, members) for members in kinds.values()), key=len, default=[])


def labels(computation: Computation, found: list[Instruction]) -> dict[Instruction, int]:
    """A label for each instruction: the set of parts that the instruction belongs to or depends on.

    A label is a bit mask, in which 1 << k stands for the part of anchor k. The label is 0 for instructions of no part.
    These are constants, instructions that lead to several anchors, and instructions that neither lead to an anchor nor
    depend on a part.
    """
    fixed = constants(computation)
    leads_to = dict.fromkeys(computation.instructions, 0) | {anchor: 1 << k for k, anchor in enumerate(found)}
    for instruction in reversed(computation.instructions):
        for operand in instruction.operands:
            leads_to[operand] |= leads_to[instruction]
    label: dict[Instruction, int] = {}
    for instruction in computation.instructions:
        own = leads_to[instruction]
        label[instruction] = own if own.bit_count() == 1 and instruction not in fixed else 0
        for operand in instruction.operands:
            label[instruction] |= label[operand]
        if label[instruction] and instruction.proto.custom_call_target == _RESULT:
            label[instruction] = (1 << len(found)) - 1  # this call stays with the program's results
    return label


def constants(computation: Computation) -> set[Instruction]:
    """Constants, and instructions that make cheap values from constants alone, such as broadcasts."""
    found: set[Instruction] = set()
    for i in computation.instructions:
        if i.opcode in ("constant", "iota") or (i.opcode in _OF_CONSTANTS and found.issuperset(i.operands)):
            found.add(i)
    return found


def is_backward(instruction: Instruction) -> bool:
    return BACKWARD_NAME in instruction.op_name


def takes_gradients(instruction: Instruction) -> bool:
    """Whether `instruction` is a dot or a loop of a backward pass, or a call of a function that holds one of these."""
    if instruction.opcode == "call":
        inside = [i for i in graph.walk(instruction.called[0]) if i.opcode in _WEIGHTY]
        return bool(inside) and (is_backward(instruction) or any(map(is_backward, inside)))
    return instruction.opcode in _WEIGHTY and is_backward(instruction)


def _kind(instruction: Instruction) -> Hashable | None:
    """A key that is equal for all copies of one operation of the user's program.

    None if the operation takes no gradients.

    The key ignores shapes, so that micro-batches of unequal sizes are found, too, and reported.
    """
    if not takes_gradients(instruction):
        return None
    numbers = instruction.proto.dot_dimension_numbers.SerializeToString(deterministic=True)
    return instruction.opcode, _own_name(instruction), numbers


def _own_name(instruction: Instruction) -> str:
    """The instruction's name from the first `jvp(` or `transpose(` on.

    The beginning of the name is cut off, because it differs between a loop and the code around the loop.
    """
    found = _DIFFERENTIATED.search(instruction.op_name)
    return instruction.op_name[found.start() :] if found else instruction.op_name


def _first(computation: Computation, members: list[Instruction]) -> list[Instruction]:
    """The `members` that depend on no other member."""
    inside = set(members)
    behind: set[Instruction] = set()
    for instruction in computation.instructions:
        if any(operand in behind or operand in inside for operand in instruction.operands):
            behind.add(instruction)
    return [member for member in members if member not in behind]
