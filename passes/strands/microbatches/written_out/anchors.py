"""Anchors: an operation of each of N backward passes that a program holds one beside another; and what belongs to each.

Written-out micro-batches are told by their backward passes: operations of one name and kind, none of which depends
on another. Layers that are written out depend on each other.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.hlo import Computation, Instruction, graph

_OF_CONSTANTS = ("broadcast", "reshape", "convert")
_WEIGHTY = ("dot", "while")
_RESULT = "xla.sdy.FuncResultSharding"  # says how a result of the program is split
_DIFFERENTIATED = re.compile(r"(jvp|transpose)\(")


def anchors(computation: Computation) -> list[Instruction]:
    """Of the kind with fewest; none where some kind is there once."""
    kinds: dict[Hashable, list[Instruction]] = {}
    for instruction in computation.instructions:
        if (kind := _kind(instruction)) is not None:
            kinds.setdefault(kind, []).append(instruction)
    if any(len(members) < 2 for members in kinds.values()):
        return []
    # Those of one layer are as many as micro-batches; gradients of several layers' weights may be independent, too.
    return min((_first(computation, members) for members in kinds.values()), key=len, default=[])


def labels(computation: Computation, found: list[Instruction]) -> dict[Instruction, int]:
    """The parts that each instruction is made of, as bits: 1 << k is the part of anchor k.

    0 is what belongs to none: it is constant, leads to several anchors, or neither leads to one nor follows from what
    does.
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
            label[instruction] = (1 << len(found)) - 1  # stays with the program's results
    return label


def constants(computation: Computation) -> set[Instruction]:
    """Constants, and what is made of them alone in no time."""
    found: set[Instruction] = set()
    for i in computation.instructions:
        if i.opcode in ("constant", "iota") or (i.opcode in _OF_CONSTANTS and found.issuperset(i.operands)):
            found.add(i)
    return found


def is_backward(instruction: Instruction) -> bool:
    return BACKWARD_NAME in instruction.op_name


def takes_gradients(instruction: Instruction) -> bool:
    """Whether it is a product or a loop of a backward pass, or calls what holds one."""
    if instruction.opcode == "call":
        inside = [i for i in graph.walk(instruction.called[0]) if i.opcode in _WEIGHTY]
        return bool(inside) and (is_backward(instruction) or any(map(is_backward, inside)))
    return instruction.opcode in _WEIGHTY and is_backward(instruction)


def _kind(instruction: Instruction) -> Hashable | None:
    """Equal for what one line of a user's program became, each time that it ran; None for what carries no weight.

    Shapes do not count, so that micro-batches of several sizes are found, too, and can be told from equal ones.
    """
    if not takes_gradients(instruction):
        return None
    numbers = instruction.proto.dot_dimension_numbers.SerializeToString(deterministic=True)
    return instruction.opcode, _own_name(instruction), numbers


def _own_name(instruction: Instruction) -> str:
    """The name from where it was differentiated: what stands before is another in a loop than behind it."""
    found = _DIFFERENTIATED.search(instruction.op_name)
    return instruction.op_name[found.start() :] if found else instruction.op_name


def _first(computation: Computation, members: list[Instruction]) -> list[Instruction]:
    """Those of `members` that depend on no other one."""
    inside = set(members)
    behind: set[Instruction] = set()
    for instruction in computation.instructions:
        if any(operand in behind or operand in inside for operand in instruction.operands):
            behind.add(instruction)
    return [member for member in members if member not in behind]
