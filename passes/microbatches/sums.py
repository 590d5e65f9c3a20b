"""Sums over parts of a program: `((y0 + y1) + y2) + y3`, on top of something or not, in one order of additions.

u1 = op(y0, y1);  u2 = op(u1, y2);  ...         one chain: `op` is an addition, a maximum, ..., and each step may
u0 = op(start, y0);  u1 = op(u0, y1);  ...      end in sharding constraints
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.loops import is_sharding_constraint
from dhelix.passes.microbatches.signatures import Signatures

_COMBINING = ("add", "multiply", "maximum", "minimum")  # of numbers
_LOGICAL = ("and", "or")
type Labels = Mapping[Instruction, int]


@dataclass(frozen=True)
class Chain:
    """The steps that take in the second part and all later ones.

    Attributes:
      order: numbers of the parts, as they are taken in.
      steps: for each part but the first, the operation and the sharding constraints behind it.
      slot: which operand of the operation is what the step before made.
    """

    order: tuple[int, ...]
    steps: tuple[tuple[Instruction, ...], ...]
    slot: int

    @property
    def path(self) -> tuple[Instruction, ...]:
        return self.steps[0]

    @property
    def summands(self) -> list[Instruction]:
        """Of each part but the first."""
        return [step[0].operands[1 - self.slot] for step in self.steps]

    @property
    def result(self) -> Instruction:
        return self.steps[-1][-1]

    @property
    def instructions(self) -> list[Instruction]:
        return [i for step in self.steps for i in step]

    def first_summand(self, label: Labels, signatures: Signatures) -> tuple[Instruction | None, Instruction]:
        """What the first part is added to, if anything, and what is added to it."""
        operation, *constraints = self.path
        value = operation.operands[self.slot]
        for constraint in reversed(constraints):
            if signatures.of(value) == signatures.of(constraint):
                value = value.operands[0]
        second = self.summands[0]
        begun = [i.opcode == operation.opcode and label[i.operands[self.slot]] == 0 for i in (value, second)]
        if begun == [True, False]:
            return value.operands[self.slot], value.operands[1 - self.slot]
        return None, value


def chains(computation: Computation, label: Labels, count: int, signatures: Signatures) -> list[Chain]:
    """Those that take in all parts; what a step makes is read by the next one alone."""
    users = computation.users()
    users[computation.root] = [computation.root, computation.root]  # the caller reads it
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
    while len(steps) < count - 1 or len(steps[-1]) < len(steps[0]):
        at = steps[-1][-1]
        if len(users[at]) != 1 or users[at][0].operands.count(at) != 1:
            return None
        user = users[at][0]
        if is_sharding_constraint(user):
            steps[-1].append(user)
        elif user.opcode == first.opcode and label[user].bit_count() == len(steps) + 2:
            place = user.operands.index(at)
            if label[user.operands[1 - place]].bit_count() != 1 or slot not in (None, place):
                return None
            slot = place
            steps.append([user])
        else:
            return None
    slot = slot or 0
    if any([*map(signatures.of, step)] != [*map(signatures.of, steps[0])] for step in steps):
        return None
    parts = [first.operands[slot], *(step[0].operands[1 - slot] for step in steps)]
    return Chain(tuple(label[i].bit_length() - 1 for i in parts), tuple(map(tuple, steps)), slot)


def _combines(instruction: Instruction) -> bool:
    """Whether it is an operation with a neutral element that all of its type's kind hold."""
    if instruction.shape.element_type == shapes.PRED:
        return instruction.opcode in _LOGICAL
    extremes = instruction.opcode in ("maximum", "minimum")
    return instruction.opcode in _COMBINING and (shapes.is_floating(instruction.shape) or not extremes)
