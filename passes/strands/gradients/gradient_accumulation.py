"""Adds each layer's gradient to the accumulator inside the layer loop. So the loop need not stack all gradients first.

Before:                                         After:
    grads = zeros[L, ...]                           acc enters the layer loop:
    for l: grads[slot(l)] = g(l)                        acc[slot(l)] += convert(g(l))
    acc = acc + convert(grads)

Contract
    Consumes  a layer loop of strand alpha with a stack of gradients. The loop writes every slot once. The stack is used
              only in an addition to an accumulator. The accumulator does not depend on the loop. Between the stack and
              the addition, there may be elementwise operations (such as a conversion, a factor or weight decay) and
              all-reduces. Other operands of these operations must not depend on the loop. There may also be either
              reshapes, or sharding constraints that do not split the stack between layers. In nested loops, such as
              loops over groups of layers, the outer loop takes the accumulator.
    Makes     the accumulator a state element of the loop, and removes the stack. The operations between stack and
              addition are applied to each slot. A constraint that leaves a sum over devices open (`unreduced`) is
              repeated on the slots and on the accumulator. No partitioner infers such a constraint.
    Leaves    every other stack. With an `unreduced` constraint, a stack also stays if there are other operations than
              conversions, negations, constant factors, all-reduces and constraints. A constraint that splits a stack
              between layers gets a note.

Why it is legal: the loop's counter is proved (`hlo/loops.py`), which shows that every slot is written exactly once. So
each element of the accumulator gets the same single addition of the same two numbers as before. Results are equal to
the last bit. The initial contents of the stack do not matter, because every slot is overwritten.
Cost: none. The pass saves the memory of one stack of gradients, which would be alive together with the other strand's
logits. In each micro-batch, it also saves filling this memory with zeros, writing it and reading it.
"""

from dataclasses import dataclass
from typing import Any

from dhelix.passes.analysis.names import ALPHA
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint, leaves_open, splits_first
from dhelix.passes.hlo.edit import drop_dead, replace_uses
from dhelix.passes.hlo.graph import descendants
from dhelix.passes.hlo.loop_state import add_element, drop_elements
from dhelix.passes.hlo.stacks import is_constant, is_one_slot

_ELEMENTWISE = frozenset("add subtract multiply divide negate convert select".split())

type Users = dict[Instruction, list[Instruction]]


@dataclass(frozen=True)
class _Sum:
    """An addition `total = accumulator + steps(result)` of a stack of gradients, `result`, to an accumulator.

    The stack is state element `element` of the loop, and `write` writes its slots in the loop's body.
    """

    element: int
    write: Instruction
    result: Instruction
    total: Instruction
    accumulator: Instruction
    steps: tuple[Instruction, ...]

    @property
    def open(self) -> Instruction | None:
        """The constraint among the steps that leaves a sum over devices open; None if there is none."""
        return next((step for step in self.steps if leaves_open(step)), None)


@dataclass(frozen=True)
class GradientAccumulation:
    """This pass has no options."""

    name = "gradient-accumulation"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            changed |= accumulate(computation, context, ALPHA)
        return changed


def accumulate(computation: Computation, context: PassContext, strand: str = "") -> bool:
    """Adds gradients to their accumulators inside the layer loops of one computation.

    Only stacks of gradients of `strand` count; if `strand` is empty, all stacks of gradients count.

    Returns whether anything changed.
    """
    changed = False
    for loop in [i for i in computation.instructions if i.opcode == "while"]:
        sums, split = _without_split(_sums(loop, strand))
        for constraint in split:
            context.note("left alone: a sharding constraint splits gradients between layers", constraint)
        if not sums:
            continue
        freed = sum(shapes.byte_size(s.write.shape) for s in sums)
        for one in sums:
            _accumulate_inside(loop, one)
        drop_dead(loop.called[0])
        drop_dead(computation)
        drop_elements(loop, [s.element for s in sums])
        drop_dead(computation)
        context.note("gradients accumulated layer by layer", loop, stacks=len(sums), bytes_freed=freed)
        changed = True
    return changed


def _sums(loop: Instruction, strand: str) -> list[_Sum]:
    body = loop.called[0]
    made = [_behind_open(r) for r in body.root.operands]
    writes = [r for r in made if r.opcode == "dynamic-update-slice" and r.op_name.startswith(strand)]
    if not writes:
        return []
    users = loop.computation.users()
    after = descendants(loop.computation, [loop])
    found = []
    for element, write in enumerate(made):
        if write in writes and _written_once_per_slot(WhileLoop(loop), element, write):
            one = _addition(loop, element, write, users, after)
            if one is not None and (one.open is None or all(map(_keeps_open, one.steps))):
                found.append(one)
    return found


def _written_once_per_slot(loop: WhileLoop, element: int, write: Instruction) -> bool:
    """Whether `write` writes each whole slot along dimension 0 once, and nothing else in the loop uses the stack."""
    users, root = loop.body.users(), loop.body.root
    reads = [r for r, k in loop.reads.items() if k == element]
    if len(reads) != 1:
        return False
    before, after = _before_open(reads[0], users), _before_open(write, users)
    table = loop.index_table(write.operands[2])
    return (
        write.operands[0] is before
        and users[before] == [write]
        and root.operands[element] is after
        and users[after] == [root]
        and root.operands.count(after) == 1
        and is_one_slot(write.operands[1].shape, write.shape)
        and table is not None
        and sorted(table) == list(range(write.shape.dimensions[0]))
    )


def _behind_open(value: Instruction) -> Instruction:
    """Follows `value` back through constraints that leave a sum open. Returns the first value that is none of these."""
    while leaves_open(value):
        value = value.operands[0]
    return value


def _before_open(value: Instruction, users: Users) -> Instruction:
    """The last of the constraints that follow `value` and leave its sum open; `value` itself if there are none.

    Each constraint must be the only reader of the value before it.
    """
    while len(users[value]) == 1 and leaves_open(users[value][0]):
        value = users[value][0]
    return value


def _without_split(sums: list[_Sum]) -> tuple[list[_Sum], list[Instruction]]:
    """The sums that no constraint splits between layers, and the constraints that split the other sums."""
    splitting = {one.element: [s for s in one.steps if splits_first(s)] for one in sums}
    return [one for one in sums if not splitting[one.element]], [s for found in splitting.values() for s in found]


def _addition(
    loop: Instruction, element: int, write: Instruction, users: Users, after: set[Instruction]
) -> _Sum | None:
    value = None
    for read in users[loop]:
        if read.opcode != "get-tuple-element":
            return None
        if read.tuple_index == element and users[read]:
            if value is not None:
                return None
            value = read
    return _sum(element, write, value, users, after) if value is not None else None


def _sum(element: int, write: Instruction, result: Instruction, users: Users, after: set[Instruction]) -> _Sum | None:
    """The addition of `result` to an accumulator; None if there is none.

    There may be several additions. The first one whose other operand is an element of a tuple is taken, because such a
    tuple is the state of a loop or of a micro-batch. If no addition has such an operand, the first addition is taken.
    """
    found: _Sum | None = None
    steps: list[Instruction] = []
    value = result
    while len(users[value]) == 1 and value is not value.computation.root:
        user = users[value][0]
        others = [o for o in user.operands if o is not value]
        adds = user.opcode == "add" and len(others) == 1 and others[0] not in after
        if adds and others[0].opcode != "dynamic-slice":  # a slice of a stack would have to be copied for the loop
            found = found or _Sum(element, write, result, user, others[0], tuple(steps))
            if others[0].opcode == "get-tuple-element":
                return _Sum(element, write, result, user, others[0], tuple(steps))
        kinds = {"reshape" if s.opcode == "reshape" else "constraint" for s in (*steps, user) if not _is_plain(s)}
        if not (_is_step(user) and after.isdisjoint(others)) or len(kinds) > 1:
            break  # a constraint after a reshape names other dimensions than the stack has
        steps.append(user)
        value = user
    return found


def _is_step(user: Instruction) -> bool:
    """Whether `user`, applied to a stack, does the same to each slot as if it were applied to the slot alone."""
    return _is_plain(user) or user.opcode == "reshape" or is_sharding_constraint(user)


def _keeps_open(step: Instruction) -> bool:
    """Whether `step` may be between a stack of sums that are left open (`unreduced`) and the accumulator.

    Such a step reads no array from before the loop, except constant-filled arrays. So the loop carries no additional
    array.
    """
    numbers = [o for o in step.operands if is_constant(o)]
    scales = step.opcode in ("multiply", "divide") and len(numbers) == 1
    return scales or step.opcode in ("convert", "negate", "all-reduce") or is_sharding_constraint(step)


def _is_plain(user: Instruction) -> bool:
    return user.opcode in _ELEMENTWISE or (user.opcode == "all-reduce" and len(user.operands) == 1)


def _accumulate_inside(loop: Instruction, one: _Sum) -> None:
    """Makes the loop's body read a slot of the accumulator, add that layer's gradient, and write the slot back."""
    slots = _Slots(loop, one)
    old, place = slots.carried(slots.stack(one.accumulator), changes=True)
    builder = Builder(loop.called[0])
    value, gradient = one.result, one.write.operands[1]
    for step in one.steps:
        if step.opcode != "reshape":
            operands = [gradient if o is value else slots.of(o) for o in step.operands]
            gradient = slots.done(step, operands)
        value = step
    added = builder.binary("add", _as_open(builder, one, slots.read(old)), gradient)
    added.proto.metadata.CopyFrom(one.total.proto.metadata)
    written = builder.copy(one.write, [old, _as_open(builder, one, added), *one.write.operands[2:]])
    written.proto.shape.CopyFrom(old.shape)
    root = loop.called[0].root
    root.operands[place] = _as_open(builder, one, written)
    root.operands[one.element] = _behind_open(one.write.operands[0])
    loop.called[0].sort()
    outside = Builder(loop.computation)
    total = _as_open(outside, one, outside.element(loop, place))
    if total.shape.dimensions != one.total.shape.dimensions:
        total = outside.make("reshape", one.total.shape, [total])
    replace_uses(loop.computation, one.total, total)
    loop.computation.sort()


class _Slots:
    """Makes slots of values from outside the loop. The instructions that make them are in the loop's body.

    In each iteration, a slot belongs to the layer whose gradient is written.
    """

    def __init__(self, loop: Instruction, one: _Sum) -> None:
        self._loop = loop
        self._body = Builder(loop.called[0])
        self._outside = Builder(loop.computation)
        self._stack, self._slot, *self._index = one.write.shape, *one.write.operands[1:]
        self._made: dict[Instruction, Instruction] = {}

    def of(self, value: Instruction) -> Instruction:
        """The slot of `value`. Scalars stay scalars; elementwise results are recomputed from their operands' slots."""
        if value not in self._made:
            self._made[value] = self._of(value)
        return self._made[value]

    def _of(self, value: Instruction) -> Instruction:
        if value.opcode == "constant" and not value.shape.dimensions:
            return self._body.copy(value, [])
        if not value.shape.dimensions:
            return self.carried(value)[0]
        if value.opcode == "broadcast" and not value.operands[0].shape.dimensions:
            return self._body.make("broadcast", _like(self._slot.shape, value.shape), [self.of(value.operands[0])])
        if value.opcode in _ELEMENTWISE:
            return self.done(value, [self.of(o) for o in value.operands])
        return self.read(self.carried(self.stack(value))[0])

    def done(self, step: Instruction, operands: list[Instruction]) -> Instruction:
        """A copy of `step` that is applied to the slots `operands`."""
        made = self._body.copy(step, operands)
        made.proto.shape.CopyFrom(_like(self._slot.shape, step.shape))
        return made

    def stack(self, value: Instruction) -> Instruction:
        """`value`, reshaped before the loop to the dimensions of the stack."""
        shape = _like(self._stack, value.shape)
        return value if shapes.same(shape, value.shape) else self._outside.make("reshape", shape, [value])

    def carried(self, value: Instruction, changes: bool = False) -> tuple[Instruction, int]:
        """The body's read of a state element with the initial value `value`, and the number of the element.

        The element is a new one if the loop `changes` it, or if no loop-invariant element starts as `value`.
        """
        if not changes:
            whole = WhileLoop(self._loop)
            for read, k in whole.reads.items():
                if k in whole.invariants and whole.initial(k) is value:
                    return read, k
        return add_element(self._loop, value), len(self._loop.shape.tuple_shapes) - 1

    def read(self, stack: Instruction) -> Instruction:
        shape = _like(self._slot.shape, stack.shape)
        sizes = list(shape.dimensions)
        return self._body.make("dynamic-slice", shape, [stack, *self._index], dynamic_slice_sizes=sizes)


def _as_open(builder: Builder, one: _Sum, value: Instruction) -> Instruction:
    if one.open is None:
        return value
    made = builder.copy(one.open, [value])
    made.proto.shape.CopyFrom(value.shape)
    return made


def _like(shape: Any, typed: Any) -> Any:
    """The dimensions and layout of `shape` with the element type of `typed`."""
    result = type(shape)()
    result.CopyFrom(shape)
    result.element_type = typed.element_type
    return result
