"""Adds each layer's gradient to the accumulator where it is made, instead of stacking all layers first.

Before:                                         After:
    grads = zeros[L, ...]                           acc enters the layer loop:
    for l: grads[slot(l)] = g(l)                        acc[slot(l)] += convert(g(l))
    acc = acc + convert(grads)

Contract
    Consumes  a layer loop of strand alpha with a stack of gradients of which every slot is written once, and
              which is read by nothing but the addition to an accumulator that does not depend on the loop. Between
              them may stand conversions, a constant factor, all-reduces, and sharding constraints that do not split
              the stack between layers.
    Makes     the accumulator a state element of the loop. The stack is gone. What stood between is done to a slot.
              What leaves a sum over devices open (`unreduced`) is said of the slots and of the accumulator,
              too, since no partitioner infers it.
    Leaves    every other stack. A constraint that splits it between layers is named.

Why it is legal: every slot is written exactly once (index table of the proved loop counter), so each element
of the accumulator sees the same single addition of the same two numbers as before: results are equal to the
last bit, and what the stack started as never shows.
Costs nothing; it saves one stack of gradients in memory, which would otherwise be alive beside the other
strand's logits, and its three trips through memory (zeros, write, read) per micro-batch.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.names import ALPHA
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint, leaves_open, splits_first
from dhelix.passes.hlo.edit import drop_dead, replace_uses
from dhelix.passes.hlo.graph import descendants
from dhelix.passes.hlo.loop_state import add_element, drop_elements
from dhelix.passes.hlo.stacks import is_constant, is_one_slot
from dhelix.passes.manager import PassContext, Stage


@dataclass(frozen=True)
class _Sum:
    """`total = accumulator + steps(gradients)`, and how the loop makes the gradients."""

    element: int
    write: Instruction
    total: Instruction
    accumulator: Instruction
    steps: tuple[Instruction, ...]

    @property
    def open(self) -> Instruction | None:
        """The constraint that leaves a sum over devices open, if any."""
        return next((step for step in self.steps if leaves_open(step)), None)


@dataclass(frozen=True)
class GradientAccumulation:
    """No options."""

    name = "gradient-accumulation"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            changed |= accumulate(computation, context, ALPHA)
        return changed


def accumulate(computation: Computation, context: PassContext, strand: str = "") -> bool:
    """The same for the loops of one computation, of any strand or of none."""
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
            one = _addition(loop, element, write, users)
            if one is not None and one.accumulator not in after:
                found.append(one)
    return found


def _written_once_per_slot(loop: WhileLoop, element: int, write: Instruction) -> bool:
    """A stack whose slots along dimension 0 are each written whole, once, and not read inside."""
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
    """What constraints that leave a sum open are put on; other values as they are."""
    while leaves_open(value):
        value = value.operands[0]
    return value


def _before_open(value: Instruction, users: dict[Instruction, list[Instruction]]) -> Instruction:
    """The last of the constraints on `value` that leave a sum open, where nothing else reads it."""
    while len(users[value]) == 1 and leaves_open(users[value][0]):
        value = users[value][0]
    return value


def _without_split(sums: list[_Sum]) -> tuple[list[_Sum], list[Instruction]]:
    """Those of which no constraint splits the stack between layers, and the constraints of the others that do."""
    splitting = {one.element: [s for s in one.steps if splits_first(s)] for one in sums}
    return [one for one in sums if not splitting[one.element]], [s for found in splitting.values() for s in found]


def _addition(
    loop: Instruction, element: int, write: Instruction, users: dict[Instruction, list[Instruction]]
) -> _Sum | None:
    value = None
    for read in users[loop]:
        if read.opcode != "get-tuple-element":
            return None
        if read.tuple_index == element and users[read]:
            if value is not None:
                return None
            value = read
    steps: list[Instruction] = []
    while value is not None and len(users[value]) == 1 and value is not loop.computation.root:
        user = users[value][0]
        if user.opcode == "add":
            others = [o for o in user.operands if o is not value]
            return _Sum(element, write, user, others[0], tuple(steps)) if len(others) == 1 else None
        if not _is_step(user, value):
            return None
        steps.append(user)
        value = user
    return None


def _is_step(user: Instruction, value: Instruction) -> bool:
    """Whether it does to each element of `value` what it does to a slot alone."""
    if user.opcode in ("multiply", "divide"):
        return all(o is value or is_constant(o) for o in user.operands)
    reduces = user.opcode == "all-reduce" and len(user.operands) == 1
    return user.opcode == "convert" or reduces or is_sharding_constraint(user)


def _accumulate_inside(loop: Instruction, one: _Sum) -> None:
    """The loop's body reads a slot of the accumulator, adds that layer's gradient, and writes it back."""
    kept = add_element(loop, one.accumulator)
    body = loop.called[0]
    builder = Builder(body)
    _, gradient, *index = one.write.operands
    for step in one.steps:
        numbers = {o: _number(builder, o, gradient) for o in step.operands if is_constant(o)}
        made = builder.copy(step, [numbers.get(o, gradient) for o in step.operands])
        made.proto.shape.CopyFrom(_like(gradient.shape, step.shape))
        gradient = made
    slot = builder.make(
        "dynamic-slice", gradient.shape, [kept, *index], dynamic_slice_sizes=list(gradient.shape.dimensions)
    )
    added = builder.binary("add", _as_open(builder, one, slot), gradient)
    added.proto.metadata.CopyFrom(one.total.proto.metadata)
    written = builder.copy(one.write, [kept, _as_open(builder, one, added), *index])
    written.proto.shape.CopyFrom(kept.shape)
    body.root.operands[-1] = _as_open(builder, one, written)
    body.root.operands[one.element] = _behind_open(one.write.operands[0])
    body.sort()
    outside = Builder(loop.computation).element(loop, len(loop.shape.tuple_shapes) - 1)
    replace_uses(loop.computation, one.total, _as_open(Builder(loop.computation), one, outside))
    loop.computation.sort()


def _number(builder: Builder, constant: Instruction, slot: Instruction) -> Instruction:
    """An array of one number, of a slot's size."""
    return builder.make("broadcast", _like(slot.shape, constant.shape), [builder.copy(constant.operands[0], [])])


def _as_open(builder: Builder, one: _Sum, value: Instruction) -> Instruction:
    if one.open is None:
        return value
    made = builder.copy(one.open, [value])
    made.proto.shape.CopyFrom(value.shape)
    return made


def _like(shape: object, typed: object) -> object:
    """`shape`'s dimensions and layout with the element type of `typed`."""
    result = type(shape)()
    result.CopyFrom(shape)  # type: ignore[attr-defined]
    result.element_type = typed.element_type  # type: ignore[attr-defined]
    return result
