"""Converts a parameter before it is gathered, if all of its readers convert it.

    w = whole(p)                       f32[L, n]         h = whole(convert(p))          bf16[L, n]
    for l: dot(x, convert(w[l]))                   ->    for l: dot(x, h[l])

An all-gather then moves half of the bytes, and a device holds the parameter in the narrower type only. Its own shard,
on which the optimizer works, keeps the type of the state.

Why it is legal: slices, reshapes, loops and calls only move elements, so they commute with a conversion of each
element. The conversion happens once per step instead of once per read, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dhelix.passes.hlo import Builder, Instruction, shapes
from dhelix.passes.hlo.constraints import constrained, is_sharding_constraint, stated
from dhelix.passes.hlo.edit import TO_LOCAL
from dhelix.passes.hlo.manual_computation import is_manual
from dhelix.passes.sharding.states.moves import Users

_MOVES = frozenset("copy dynamic-slice gather reshape slice transpose".split())

type Element = tuple[Instruction, int]


class Narrowing:
    """Narrows the parameters of one program. The ways of different parameters do not meet, so users stay known."""

    def __init__(self) -> None:
        self._users = Users()

    def narrow(self, gathered: Instruction, readers: Sequence[Instruction]) -> bool:
        """Converts the operand of `gathered`, if its readers allow it. Returns whether they do.

        Args:
          gathered: a sharding constraint on a parameter.
          readers: the instructions that read `gathered`.
        """
        reads = _Reads(self._users)
        if not reads.all_convert(gathered, readers) or len(reads.types) != 1:
            return False
        (narrower,) = reads.types
        if shapes.byte_size(shapes.scalar(narrower)) >= shapes.byte_size(shapes.scalar(gathered.shape.element_type)):
            return False
        (state,) = gathered.operands
        builder = Builder(gathered.computation)
        converted = builder.make("convert", shapes.array(narrower, state.shape.dimensions), [state])
        split = stated(state)
        if split is not None:  # otherwise the partitioner may gather first
            converted = constrained(builder, converted, split.over, split.mesh, {})
        gathered.operands = [converted]
        for carrier in (gathered, *reads.carriers):
            carrier.proto.shape.element_type = narrower
        for holder, element in reads.elements:
            holder.shape.tuple_shapes[element].element_type = narrower
        for convert in reads.converts:
            reads.drop(convert)
        return True


@dataclass
class _Reads:
    """The readers of a value, through loops, barriers and shard_maps.

    Attributes:
      users: the users of instructions.
      carriers: instructions that move elements of the value.
      elements: tuples that hold the value, each with the index of its element.
      converts: the conversions at the end of all ways.
      types: the element types to which they convert.
    """

    users: Users
    carriers: dict[Instruction, None] = field(default_factory=dict)
    elements: dict[Element, None] = field(default_factory=dict)
    converts: dict[Instruction, None] = field(default_factory=dict)
    types: set[int] = field(default_factory=set)

    def all_convert(self, value: Instruction, readers: Sequence[Instruction]) -> bool:
        """Records the ways of `value` from its readers on. Returns False if one needs the value in its own type."""
        return all(self._reader(reader, value, None) for reader in readers)

    def drop(self, convert: Instruction) -> None:
        """Lets the readers of a conversion read its operand, which has the narrower type by now."""
        (source,) = convert.operands
        for user in self.users.of(convert):
            user.operands = [source if operand is convert else operand for operand in user.operands]
        if convert.computation.root is convert:
            convert.computation.root = source

    def _follow(self, value: Instruction, kept: int | None = None) -> bool:
        """Records the readers of `value`. Returns False if one of them needs the value in its own type.

        Args:
          kept: in a loop's body, the element of the loop's state that carries the value to the next iteration.
        """
        root = value.computation.root
        if value is root:
            return False
        return all(self._reader(user, value, kept if user is root else None) for user in self.users.of(value))

    def _reader(self, user: Instruction, value: Instruction, kept: int | None) -> bool:
        places = [k for k, operand in enumerate(user.operands) if operand is value]
        if kept is not None:
            return places == [kept]
        if user.opcode == "convert":
            self.converts[user] = None
            self.types.add(user.shape.element_type)
            return True
        if user.opcode in _MOVES or is_sharding_constraint(user):
            self.carriers[user] = None
            return places == [0] and self._follow(user)
        if user.opcode == "tuple" and user is not user.computation.root:
            holders = self.users.of(user)
            return all(self._held(holder, k, user) for holder in holders for k in places)
        if user.opcode == "custom-call" and user.proto.custom_call_target == TO_LOCAL:
            return all(self._held(user, k, None) for k in places)
        if is_manual(user):
            return all(self._moved(user.called[0].parameters[k]) for k in places)
        return False

    def _held(self, holder: Instruction, element: int, given: Instruction | None) -> bool:
        """Records a loop, a barrier or the edge of a shard_map that passes the value on as an element of its tuple."""
        if not holder.shape.tuple_shapes:
            return self._moved(holder)
        if holder.opcode not in ("while", "opt-barrier", "custom-call"):
            return False
        self.elements.update(dict.fromkeys([(holder, element), *([] if given is None else [(given, element)])]))
        inside: list[bool] = []
        for called in holder.called if holder.opcode == "while" else ():
            (state,) = called.parameters
            self.elements[state, element] = None
            inside.append(
                all(self._moved(read, element) for read in self.users.of(state) if read.tuple_index == element)
            )
            if called is holder.called[0]:
                self.elements[called.root, element] = None
                inside.append(called.root.opcode == "tuple" and _is_element(called.root.operands[element], element))
        after = [self._moved(read) for read in self.users.of(holder) if read.tuple_index == element]
        return all(inside) and all(after)

    def _moved(self, value: Instruction, kept: int | None = None) -> bool:
        self.carriers[value] = None
        return self._follow(value, kept)


def _is_element(value: Instruction, element: int) -> bool:
    return value.opcode == "get-tuple-element" and value.tuple_index == element
