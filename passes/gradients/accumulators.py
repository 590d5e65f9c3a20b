"""Finds accumulators: what starts as zeros, goes through loops, and is added to, whole or slot by slot.

    zeros -> while micro-batches:                     elements (micro-batches, 0), (layers, 2)
                 while layers:                        values   reads, the slot, slot + g, the update, results
                     slot = dynamic-slice(acc, l)     added    g
                     acc[l] = slot + g                zeros    where the zeros come in
             -> step(acc)                             ends     step

All of it is found by one closure: from an element of a loop's state to what reads and makes it, inside and outside.
"""

from dataclasses import dataclass, field

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.stacks import is_one_slot, zeros_behind

type Use = tuple[Instruction, int]
"""An instruction and the number of one of its operands."""

_SLICED = ("dynamic-slice", "dynamic-update-slice")


class Readers:
    """Who reads what in a module, and which loop a body is of; to be made once, before anything is changed."""

    def __init__(self, module: HloModule) -> None:
        self._users = {c: c.users() for c in module.computations}
        self.parameters = {c: c.parameters for c in module.computations}
        loops = (i for c in module.computations for i in c.instructions if i.opcode == "while")
        self.loops = {loop.called[0]: loop for loop in loops}
        self._elements: dict[Instruction, dict[int, list[Instruction]]] = {}

    def of(self, value: Instruction) -> list[Instruction]:
        return self._users[value.computation][value]

    def of_element(self, state: Instruction, element: int) -> list[Instruction]:
        """Reads of one element of a tuple. Raises PassRefusal where the tuple is read as a whole."""
        if state not in self._elements:
            reads: dict[int, list[Instruction]] = {}
            for read in self.of(state):
                if read.opcode != "get-tuple-element":
                    raise PassRefusal("a loop's state is read as a whole", read)
                reads.setdefault(read.tuple_index, []).append(read)
            self._elements[state] = reads
        return self._elements[state].get(element, [])


@dataclass
class Accumulator:
    """Everything that one accumulator is on its way through a step, in the order in which it is found.

    Attributes:
      home: the computation of the loop over micro-batches.
      values: what holds the accumulator or a slot of it.
      elements: loops, with the number of the state element.
      zeros: where it starts, as zeros that others may read, too.
      added: what is added to it.
      ends: what reads the sum behind all loops.
    """

    home: Computation
    values: dict[Instruction, None] = field(default_factory=dict)
    elements: dict[Use, None] = field(default_factory=dict)
    zeros: list[Use] = field(default_factory=list)
    added: list[Use] = field(default_factory=list)
    ends: list[Use] = field(default_factory=list)

    @property
    def is_stack(self) -> bool:
        """Whether it is added to slot by slot along dimension 0."""
        return any(value.opcode in _SLICED for value in self.values)


def accumulator(loop: Instruction, element: int, readers: Readers) -> Accumulator | None:
    """What element `element` of a loop's state is part of. None where it is nothing that is added to.

    Raises PassRefusal where it is added to and more is done with it inside of a loop than that.
    """
    if not shapes.is_floating(loop.shape.tuple_shapes[element]):
        return None
    found = Accumulator(loop.computation)
    refusals: list[PassRefusal] = []
    _close(found, loop, element, readers)
    for value in found.values:
        try:
            _look_at(found, value)
        except PassRefusal as refusal:
            refusals.append(refusal)
    if not (found.zeros and any(reader.opcode == "add" for reader, _ in found.added)):
        return None
    if refusals:
        raise refusals[0]
    for value in found.values:
        _look_at_readers(found, value, readers)
    return found


def _close(found: Accumulator, loop: Instruction, element: int, readers: Readers) -> None:
    """Fills in `values` and `elements`."""
    loops: list[Use] = [(loop, element)]
    values: list[Instruction] = []
    while loops or values:
        if loops:
            one = loops.pop()
            if one not in found.elements:
                found.elements[one] = None
                values += _held_by(*one, readers)
                state, number = one
                found.zeros += [(start, number) for start in state.operands if zeros_behind(start.operands[number])]
            continue
        value = values.pop()
        if value in found.values or zeros_behind(value):
            continue
        found.values[value] = None
        if value.opcode == "get-tuple-element":
            source = value.operands[0]
            of = readers.loops.get(source.computation) if source.opcode == "parameter" else source
            if of is not None and of.opcode == "while":
                loops.append((of, value.tuple_index))
        for user in readers.of(value):
            if user.opcode == "tuple":
                owners = [u for u in readers.of(user) if u.opcode == "while"]
                if user is user.computation.root and user.computation in readers.loops:
                    owners.append(readers.loops[user.computation])
                loops += [(owner, k) for owner in owners for k, o in enumerate(user.operands) if o is value]
            elif user.opcode in (*_SLICED, "add") or is_sharding_constraint(user):
                values.append(user)


def _held_by(loop: Instruction, element: int, readers: Readers) -> list[Instruction]:
    """What one element of a loop's state is: at its start, in the body, handed on, and behind the loop."""
    initial, (body, condition) = loop.operands[0], loop.called
    if initial.opcode != "tuple" or body.root.opcode != "tuple":
        raise PassRefusal("a loop carries gradients otherwise than in a tuple", loop)
    held = [initial.operands[element], body.root.operands[element]]
    for source in (readers.parameters[body][0], readers.parameters[condition][0], loop):
        held += readers.of_element(source, element)
    return held


def _look_at(found: Accumulator, value: Instruction) -> None:
    """Where the zeros come in, and what is added. Raises PassRefusal where `value` is made in another way."""
    first, *rest = value.operands or (value,)
    match value.opcode:
        case "get-tuple-element":
            pass
        case "add":
            places = [k for k, o in enumerate(value.operands) if o in found.values]
            if not places:
                places = [k for k, o in enumerate(value.operands) if zeros_behind(o)][:1]
                found.zeros += [(value, k) for k in places]
            if not places:
                raise PassRefusal("gradients do not start as zeros", value)
            found.added += [(value, k) for k in range(2) if k not in places]
        case "dynamic-slice" | "dynamic-update-slice":
            if zeros_behind(first):
                found.zeros.append((value, 0))
            elif first not in found.values:
                raise PassRefusal("gradients do not start as zeros", value)
            if value.opcode == "dynamic-update-slice" and rest[0] not in found.values:
                found.added.append((value, 1))
            part = rest[0].shape if value.opcode == "dynamic-update-slice" else value.shape
            if not is_one_slot(part, first.shape):
                raise PassRefusal("more or less than one slot of a stack of gradients changes at once", value)
        case _ if is_sharding_constraint(value):
            if zeros_behind(first):
                found.zeros.append((value, 0))
            elif first not in found.values:
                raise PassRefusal("gradients do not start as zeros", value)
        case _:
            raise PassRefusal(f"gradients are made by {value.opcode} before they are added up", value)


def _look_at_readers(found: Accumulator, value: Instruction, readers: Readers) -> None:
    """Behind all loops anything may read the sum; inside, nothing but what adds to it."""
    for user in readers.of(value):
        for number in [k for k, o in enumerate(user.operands) if o is value]:
            if user in found.values and user.opcode != "get-tuple-element":
                continue
            if user.opcode == "tuple" and any((loop, number) in found.elements for loop in _loops_of(user, readers)):
                continue
            if value.computation is not found.home:
                raise PassRefusal(f"a sum of gradients is read by {user.opcode} between micro-batches", user)
            found.ends.append((user, number))
    if value is value.computation.root:
        raise PassRefusal("a sum of gradients is what a function returns", value)


def _loops_of(state: Instruction, readers: Readers) -> list[Instruction]:
    """The loops that a tuple is the initial state of, or what the body hands on."""
    started = [u for u in readers.of(state) if u.opcode == "while"]
    if state is state.computation.root and state.computation in readers.loops:
        started.append(readers.loops[state.computation])
    return started
