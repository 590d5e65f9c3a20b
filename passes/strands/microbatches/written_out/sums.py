"""Finds sums that add the parts of a program one by one: `((y0 + y1) + y2) + y3`, with or without a start value.

A part is the instructions of one unrolled micro-batch (`equal_parts`).

u1 = op(y0, y1);  u2 = op(u1, y2);  ...         one chain: `op` is an addition, a maximum, ..., and each step may
u0 = op(start, y0);  u1 = op(u0, y1);  ...      end in sharding constraints
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.strands.microbatches.written_out.signatures import Signatures

_COMBINING = ("add", "multiply", "maximum", "minimum")  # operations on numbers
_LOGICAL = ("and", "or")
type Labels = Mapping[Instruction, int]  # parts that an instruction belongs to or depends on, as a bit mask (`labels`)


@dataclass(frozen=True)
class Chain:
    """The steps of a sum that add the second part and all later parts.

    Attributes:
      order: numbers of the parts, in the order in which they are added.
      steps: for each part except the first, the operation that adds the part, and the sharding constraints after it.
      slot: the number of the operand that is the result of the previous step.
    """

    order: tuple[int, ...]
    steps: tuple[tuple[Instruction, ...], ...]
    slot: int

    @property
    def path(self) -> tuple[Instruction, ...]:
        """The operation and the constraints of the first step. They represent all steps."""
        return self.steps[0]

    @property
    def summands(self) -> list[Instruction]:
        """The summand of each part except the first."""
        return [step[0].operands[1 - self.slot] for step in self.steps]

    @property
    def result(self) -> Instruction:
        return self.steps[-1][-1]

    @property
    def instructions(self) -> list[Instruction]:
        return [i for step in self.steps for i in step]

    def first_summand(self, label: Labels, signatures: Signatures) -> tuple[Instruction | None, Instruction]:
        """The start value that the first part is added to, if any, and the first part's summand."""
        operation, *constraints = self.path
        value = operation.operands[self.slot]
        begun, second = _bare(value), self.summands[0]
        if _is_begun(operation, begun, self.slot, label) and not _is_begun(operation, second, self.slot, label):
            return begun.operands[self.slot], begun.operands[1 - self.slot]
        if constraints and signatures.of(value) == signatures.of(constraints[0]):
            value = value.operands[0]
        return None, value


def chains(computation: Computation, label: Labels, count: int, signatures: Signatures) -> list[Chain]:
    """The chains that add all parts. Only the next step of a chain may read the result of a step."""
    users = computation.users()
    users[computation.root] = [computation.root, computation.root]  # listed twice, so that no chain continues after it
    found = []
    for i in computation.instructions:
        if _combines(i) and all(label[o].bit_count() == 1 for o in i.operands) and label[i].bit_count() == 2:
            chain = _follow(i, users, label, count, signatures)
            if chain is not None:
                found.append(chain)
    return found


def _follow(
    first: Instruction,
    users: Mapping[Instruction, list[Instruction]],
    label: Labels,
    count: int,
    signatures: Signatures,
) -> Chain | None:
    steps = [[first]]
    slot: int | None = None
    while True:
        at, complete = steps[-1][-1], len(steps) == count - 1
        alone = len(users[at]) == 1 and users[at][0].operands.count(at) == 1
        user = users[at][0] if alone else None
        if user and is_sharding_constraint(user) and (not complete or len(steps[-1]) < len(steps[0])):
            steps[-1].append(user)
        elif complete:
            break
        elif user and user.opcode == first.opcode and label[user].bit_count() == len(steps) + 2:
            place = user.operands.index(at)
            if label[user.operands[1 - place]].bit_count() != 1 or slot not in (None, place):
                return None
            slot = place
            steps.append([user])
        else:
            return None
    if slot is None:  # with two parts, no second step tells the slot
        slot = next((k for k in (0, 1) if _is_begun(first, _bare(first.operands[k]), k, label)), 0)
    path = [*map(signatures.of, steps[0])]
    if any([*map(signatures.of, step)] != path[: len(step)] for step in steps):
        return None
    if any(len(step) < len(path) for step in steps[:-1]):  # only the last step may have fewer constraints
        return None
    parts = [first.operands[slot], *(step[0].operands[1 - slot] for step in steps)]
    return Chain(tuple(label[i].bit_length() - 1 for i in parts), tuple(map(tuple, steps)), slot)


def _is_begun(operation: Instruction, value: Instruction, slot: int, label: Labels) -> bool:
    """Whether `value` adds the first summand to a start value that belongs to no part."""
    return value.opcode == operation.opcode and label[value.operands[slot]] == 0 != label[value.operands[1 - slot]]


def _bare(value: Instruction) -> Instruction:
    """The operand of `value` if `value` is a sharding constraint; otherwise `value` itself."""
    return value.operands[0] if is_sharding_constraint(value) else value


def _combines(instruction: Instruction) -> bool:
    """Whether the instruction combines two values, by an operation with a neutral element of its type."""
    if instruction.shape.element_type == shapes.PRED:
        return instruction.opcode in _LOGICAL
    extremes = instruction.opcode in ("maximum", "minimum")
    return instruction.opcode in _COMBINING and (shapes.is_floating(instruction.shape) or not extremes)
