"""Finds accumulators: values that loops carry and to which other values are added, whole or slot by slot.

    zeros -> while micro-batches:                     elements (micro-batches, 0), (layers, 2)
                 while layers:                        values   reads, the slot, slot + g, the update, results
                     slot = dynamic-slice(acc, l)     added    g
                     acc[l] = slot + g                zeros    the initial zeros
             -> step(acc)                             ends     step

On the left is a program, and on the right are the attributes of its `Accumulator`.

The search starts from an element of a loop's state. It follows the readers of the element, and the earlier loops that
made its initial value, until it finds nothing new. An accumulator may pass through optimization barriers. If its
initial value is not zeros, the initial value counts as an added value.
"""

import itertools
from dataclasses import dataclass, field

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import ALPHA, BETA, LAYERS, SKEWED, STRANDS
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.stacks import is_one_slot, zeros_behind

type Use = tuple[Instruction, int]
"""An instruction and the number of one of its operands, or a loop or barrier and the number of a state element."""

_HOLDERS = ("while", "opt-barrier")
_SLICED = ("dynamic-slice", "dynamic-update-slice")
_TERMS = {"add": 2, "reshape": 1, "dynamic-slice": 1, "dynamic-update-slice": 2}  # number of summed or sliced operands


class Readers:
    """The users of all values of a module, and the loop of each loop body. Create it before the module changes."""

    def __init__(self, module: HloModule) -> None:
        self._users = {c: c.users() for c in module.computations}
        self.parameters = {c: c.parameters for c in module.computations}
        loops = (i for c in module.computations for i in c.instructions if i.opcode == "while")
        self.loops = {loop.called[0]: loop for loop in loops}
        self._elements: dict[Instruction, dict[int, list[Instruction]]] = {}

    def of(self, value: Instruction) -> list[Instruction]:
        return self._users[value.computation][value]

    def of_element(self, state: Instruction, element: int) -> list[Instruction]:
        """The reads of one element of the tuple `state`. Raises PassRefusal if something reads the whole tuple."""
        if state not in self._elements:
            reads: dict[int, list[Instruction]] = {}
            for read in self.of(state):
                if read.opcode != "get-tuple-element":
                    raise PassRefusal("a loop's state is read as a whole", read)
                reads.setdefault(read.tuple_index, []).append(read)
            self._elements[state] = reads
        return self._elements[state].get(element, [])


@dataclass(eq=False)
class Accumulator:
    """All instructions of one accumulator throughout a step, in the order in which the search finds them.

    Attributes:
      home: the computation that holds the loop where the search starts.
      values: instructions that hold the accumulator or a slot of it.
      elements: loops and barriers that carry the accumulator, each with the number of the element.
      zeros: uses of the zeros that the accumulator starts from. Other instructions may read these zeros, too.
      added: uses of the values that are added to the accumulator, and of initial values that are not zeros.
      ends: uses of the final sum, after all loops.
      refusal: the reason why the accumulator cannot be rewritten: a loop does more with it than adding to it. None if
        it can be rewritten.
    """

    home: Computation
    values: dict[Instruction, None] = field(default_factory=dict)
    elements: dict[Use, None] = field(default_factory=dict)
    zeros: list[Use] = field(default_factory=list)
    added: list[Use] = field(default_factory=list)
    ends: list[Use] = field(default_factory=list)
    refusal: PassRefusal | None = None

    @property
    def slot_rank(self) -> int:
        """The number of trailing dimensions that belong to one slot in every value of the accumulator.

        In a plain array, these are all dimensions. In a stack, these are all dimensions except the first. In a reshape,
        these are the trailing dimensions that the reshape keeps.
        """
        ranks = [len(value.shape.dimensions) - (value.opcode in _SLICED) for value in self.values]
        return min([*ranks, *(_kept(value) for value in self.values if value.opcode == "reshape")])


def accumulator(loop: Instruction, element: int, readers: Readers) -> Accumulator | None:
    """The accumulator that element `element` of the state of `loop` belongs to.

    None if the element holds no floating-point numbers, if nothing is added to initial zeros, or if something reads a
    loop's state as a whole.
    """
    if not shapes.is_floating(loop.shape.tuple_shapes[element]):
        return None
    try:
        found = _closed(loop, element, readers, outside=True)
    except PassRefusal:
        return None
    return found if _zeros_are_added_to(found, readers) else None


def inner_accumulator(result: Instruction, readers: Readers) -> Accumulator:
    """The accumulator by which a loop inside a micro-batch stacks or adds up `result`, an element of the loop's state.

    Raises PassRefusal if the loop uses that element for anything else.
    """
    found = _closed(result.operands[0], result.tuple_index, readers, outside=False)
    if found.refusal is not None:
        raise found.refusal
    return found


def _closed(loop: Instruction, element: int, readers: Readers, outside: bool) -> Accumulator:
    """Finds the accumulator of state element `element` of `loop`.

    If `outside` is set, the search also follows values outside of `loop`, in the computation that holds `loop`.
    """
    found = Accumulator(loop.computation)
    loops: list[Use] = [(loop, element)]
    values: list[Instruction] = []
    placed: list[Use] = []  # where loops take the accumulator: the initial value, and the body's root
    while loops or values:
        if loops:
            one = loops.pop()
            if one not in found.elements:
                found.elements[one] = None
                values += _reads(*one, readers)
                holder, number = one
                for given in given_to(holder):
                    placed.append((given, number))
                    values += _from_zeros(given.operands[number])
                    source = _element_behind(given.operands[number], found, readers, outside)
                    loops += [source] if source is not None else []
            continue
        value = values.pop()
        if value in found.values:
            continue
        found.values[value] = None
        for user in readers.of(value):
            if user.opcode == "tuple":
                owners = [o for o in _loops_of(user, readers) if _is_followed(o, found)]
                loops += [(owner, k) for owner in owners for k, o in enumerate(user.operands) if o is value]
            elif user.opcode == "reshape":  # between nested loops; only the accumulator may read the reshape
                alone = all(_terms(u) or (u.opcode == "tuple" and _loops_of(u, readers)) for u in readers.of(user))
                values += [user] if alone and (outside or user.computation is not found.home) else []
            elif _terms(user) and (user.computation is not found.home or (outside and _is_followed(user, found))):
                values.append(user)
    placed += [(value, k) for value in found.values for k in _terms(value)]
    for user, number in placed:
        value = user.operands[number]
        if zeros_behind(value):
            found.zeros.append((user, number))
        elif value not in found.values:
            found.added.append((user, number))
    try:
        _check(found, readers)
    except PassRefusal as refusal:
        found.refusal = refusal
    return found


def _zeros_are_added_to(found: Accumulator, readers: Readers) -> bool:
    """Whether anything is added to the initial zeros. In a stack of residuals, slots replace the zeros instead."""
    waiting = list(found.zeros)
    seen: set[Use] = set()
    while waiting:
        user, number = waiting.pop()
        if (user, number) in seen:
            continue
        seen.add((user, number))
        if user.opcode == "add":
            return True
        if user.opcode == "tuple":
            held = [r for loop in _loops_of(user, readers) for r in _reads(loop, number, readers)]
        else:
            held = [user] if user in found.values and number == 0 else []
        waiting += [(u, k) for v in held for u in readers.of(v) for k, o in enumerate(u.operands) if o is v]
    return False


def given_to(holder: Instruction) -> list[Instruction]:
    """The tuples that a loop or barrier takes: its operand, and the root of a loop's body."""
    return [holder.operands[0], *(body.root for body in holder.called[:1])]


def _is_followed(reader: Instruction, found: Accumulator) -> bool:
    """Whether `reader` can belong to the accumulator. In `home`, it must be a barrier or an instruction of a strand."""
    of_strands = reader.op_name.startswith((ALPHA, BETA)) or reader.name.startswith((LAYERS, STRANDS, *SKEWED))
    return of_strands or reader.computation is not found.home or reader.opcode == "opt-barrier"


def _reads(holder: Instruction, element: int, readers: Readers) -> list[Instruction]:
    """The reads of one element of `holder`, a loop or a barrier.

    These are the reads of its result, and the reads in a loop's body and condition.
    """
    if any(given.opcode != "tuple" for given in given_to(holder)):
        raise PassRefusal("a loop does not carry gradients in a tuple", holder)
    sources = [holder, *(readers.parameters[called][0] for called in holder.called)]
    return [read for source in sources for read in readers.of_element(source, element)]


def _from_zeros(value: Instruction) -> list[Instruction]:
    """The chain of additions to zeros that makes the initial value `value`, in micro-batches that run before the loop.

    Empty if `value` is made in another way.
    """
    path: list[Instruction] = []
    while value.opcode != "reshape" and _terms(value):
        path.append(value)
        terms = value.operands[: 2 if value.opcode == "add" else 1]
        if any(zeros_behind(term) for term in terms):
            return path
        value = next((term for term in terms if _terms(term)), terms[0])
    return []


def _element_behind(value: Instruction, found: Accumulator, readers: Readers, outside: bool) -> Use | None:
    """The loop or barrier that `value` is an element of, and the element's number.

    The loop or barrier is an earlier one, or the enclosing loop. None if `value` is not such an element.
    """
    if value.opcode != "get-tuple-element":
        return None
    source = value.operands[0]
    if source.opcode == "parameter":
        inside = outside or source.computation is not found.home
        source = readers.loops.get(source.computation, source) if inside else source
    return (source, value.tuple_index) if source.opcode in _HOLDERS else None


def _kept(reshape: Instruction) -> int:
    """How many trailing dimensions of its operand `reshape` keeps."""
    pairs = zip(reversed(reshape.shape.dimensions), reversed(reshape.operands[0].shape.dimensions), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _terms(value: Instruction) -> range:
    """The numbers of the operands that `value` sums, or from which it takes slots."""
    return range(_TERMS.get(value.opcode, int(is_sharding_constraint(value))))


def _check(found: Accumulator, readers: Readers) -> None:
    """Fills `found.ends`. Raises PassRefusal if a loop uses the sum for anything else than adding to it."""
    for value in found.values:
        first, *rest = value.operands or (value,)
        if value.opcode in _SLICED:
            part = rest[0].shape if value.opcode == "dynamic-update-slice" else value.shape
            if not is_one_slot(part, first.shape):
                raise PassRefusal("a stack of gradients does not change one slot at a time", value)
        if value is value.computation.root:
            raise PassRefusal("a function returns a sum of gradients", value)
        for user in readers.of(value):
            for number in [k for k, o in enumerate(user.operands) if o is value]:
                if user in found.values and user.opcode != "get-tuple-element":
                    continue
                if user.opcode == "tuple" and any(
                    (loop, number) in found.elements for loop in _loops_of(user, readers)
                ):
                    continue
                if value.computation is not found.home:
                    raise PassRefusal(f"a sum of gradients is read by {user.opcode} between micro-batches", user)
                found.ends.append((user, number))


def _loops_of(state: Instruction, readers: Readers) -> list[Instruction]:
    """The loops and barriers that take the tuple `state`: as operand, or as the root of the loop's body."""
    started = [u for u in readers.of(state) if u.opcode in _HOLDERS]
    if state is state.computation.root and state.computation in readers.loops:
        started.append(readers.loops[state.computation])
    return started
