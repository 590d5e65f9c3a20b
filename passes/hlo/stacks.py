"""Stacks: arrays with one slot per iteration along dimension 0, such as residuals. Loops access stacks slot by slot.

    slot   = bf16[1, ...] dynamic-slice(stack, index, 0, ...)
    stack' = bf16[L, ...] dynamic-update-slice(stack, slot, index, 0, ...)

`WhileLoop.index_table` gives the slots that a loop touches, if the values of the loop's counter follow from constants.
"""

from collections.abc import Sequence
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.loops import WhileLoop
from dhelix.passes.hlo.module import Instruction

# Number of the operand that is the start index along dimension 0.
_INDEX = {"dynamic-slice": 1, "dynamic-update-slice": 2}


def is_one_slot(part: Any, stack: Any) -> bool:
    """Whether an array of shape `part` is one slot of an array of shape `stack`."""
    return list(part.dimensions) == [1, *stack.dimensions[1:]]


def starts_at_zero(indices: list[Instruction]) -> bool:
    for index in indices:
        values = [*index.proto.literal.s32s, *index.proto.literal.s64s, *index.proto.literal.u32s]
        if index.opcode != "constant" or values != [0]:
            return False
    return True


def slot_reads(loop: WhileLoop, element: int) -> list[Instruction]:
    """The `dynamic-slice` instructions that read one slot of state element `element`.

    Raises PassRefusal if any other instruction except the root reads that element.
    """
    stack = loop.instruction.shape.tuple_shapes[element]
    if sum(loop.reads.get(value) == element for value in loop.body.root.operands) > 1:
        raise PassRefusal("the backward pass carries the stack twice", loop.instruction)
    users = loop.body.users()
    found = []
    for read, k in loop.reads.items():
        for user in users[read] if k == element else ():
            if user is loop.body.root:
                continue
            if user.opcode != "dynamic-slice" or not is_one_slot(user.shape, stack):
                raise PassRefusal("the backward pass does not read one slot at a time", user)
            if not starts_at_zero(user.operands[2:]):
                raise PassRefusal("the backward pass reads only a part of a slot", user)
            found.append(user)
    return found


def slot_write(loop: WhileLoop, element: int) -> Instruction:
    """The `dynamic-update-slice` that writes one slot and makes the new value of state element `element`.

    Raises PassRefusal if anything else in the body makes, reads or updates the element.
    """
    users, root = loop.body.users(), loop.body.root
    write = root.operands[element]
    targets = [read for read, k in loop.reads.items() if k == element]
    if write.opcode != "dynamic-update-slice" or write.operands[0] not in targets:
        raise PassRefusal("the forward pass does not write the stack slot by slot", write)
    if any(u is not write for t in targets for u in users[t]) or users[write] != [root]:
        raise PassRefusal("the forward pass reads the stack", write)
    if root.operands.count(write) > 1:
        raise PassRefusal("the forward pass carries the stack twice", write)
    stack = loop.instruction.shape.tuple_shapes[element]
    if not is_one_slot(write.operands[1].shape, stack) or not starts_at_zero(write.operands[3:]):
        raise PassRefusal("the forward pass does not write one slot at a time", write)
    return write


def slots_changed(loop: WhileLoop, element: int) -> set[int] | None:
    """The indices of the slots of state element `element` that the loop reads or writes.

    None if the loop does not update the element, if an access is not of one slot, or if an index is not proved to be in
    range.
    """
    root = loop.body.root
    write = root.operands[element]
    if write.opcode != "dynamic-update-slice" or loop.reads.get(write.operands[0]) != element:
        return None
    users = loop.body.users()
    if users[write] != [root] or root.operands.count(write) > 1:
        return None
    touched: set[int] = set()
    for read, k in loop.reads.items():
        for user in users[read] if k == element else ():
            part = user.operands[1].shape if user is write else user.shape
            if user.opcode not in _INDEX or user.operands[0] is not read or not is_one_slot(part, read.shape):
                return None
            table = loop.index_table(user.operands[_INDEX[user.opcode]])
            if table is None or not all(0 <= slot < read.shape.dimensions[0] for slot in table):
                return None  # XLA clamps an index that is out of range to the nearest slot
            touched.update(table)
    return touched


def mirrored(builder: Builder, index: Instruction, slots: int) -> Instruction:
    """The index at which a stack of `slots` slots in reverse order holds slot `index`."""
    last = builder.scalar(slots - 1, index.shape.element_type)
    return builder.binary("subtract", last, index)


def mirror_reads(loop: WhileLoop, element: int) -> None:
    """Mirrors the indices at which the loop reads a stack (element `element`) that is stored in reverse order."""
    builder = Builder(loop.body)
    slots = loop.instruction.shape.tuple_shapes[element].dimensions[0]
    for read in slot_reads(loop, element):
        read.operands[1] = mirrored(builder, read.operands[1], slots)
    loop.body.sort()


def last_reader(source: Instruction, element: int) -> tuple[WhileLoop, int]:
    """Finds the only loop that reads element `element` of the result of `source`.

    Returns the loop, and the index of that element in the loop's state.

    Raises PassRefusal if anything else reads the element, or if anything reads it from the result of the found loop.
    """
    users = source.computation.users()
    if any(u.opcode != "get-tuple-element" for u in users[source]):
        raise PassRefusal("the state that holds the stack is read as a whole", source)
    reads = [r for r in users[source] if r.tuple_index == element and users[r]]
    starts = [u for r in reads for u in users[r]]
    loops = [w for s in starts for w in users[s] if s.opcode == "tuple" and w.opcode == "while"]
    if len(starts) != 1 or len(loops) != 1 or users[starts[0]] != loops:
        raise PassRefusal("the last backward pass reads the stack outside its layer loop", source)
    if starts[0].operands.count(reads[0]) > 1:
        raise PassRefusal("the stack enters the last layer loop twice", loops[0])
    loop, index = WhileLoop(loops[0]), starts[0].operands.index(reads[0])
    for result in users[loop.instruction]:
        if result.opcode != "get-tuple-element" or (result.tuple_index == index and users[result]):
            raise PassRefusal("the stack is read after the last backward pass", result)
    return loop, index


def is_empty(value: Instruction | None) -> bool:
    """Whether a stack is empty (a broadcast of one number), so that no slot is written yet."""
    return value is not None and value.opcode == "broadcast" and shapes.element_count(value.operands[0].shape) == 1


def is_zero(value: Instruction) -> bool:
    """Whether a value is a scalar constant 0 or -0. False for types of 8 bits or less."""
    literal = value.proto.literal
    numbers = [*literal.f32s, *literal.f64s, *literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    halves = literal.f16s + literal.bf16s  # the second byte of each number holds the sign
    numbers += [byte & 0x7F if n % 2 else byte for n, byte in enumerate(halves)]
    return value.opcode == "constant" and bool(numbers) and not any(numbers)


def is_constant(value: Instruction) -> bool:
    """Whether an array is a broadcast of one constant. Such an array is the same on all devices."""
    return value.opcode == "broadcast" and value.operands[0].opcode == "constant" and not value.proto.dimensions


def zeros_behind(value: Instruction) -> Instruction | None:
    """Follows `value` back through sharding constraints to a broadcast of a constant zero.

    Returns the broadcast, or None if `value` comes from something else.
    """
    while is_sharding_constraint(value):
        value = value.operands[0]
    filled = value.opcode == "broadcast" and not value.operands[0].shape.dimensions
    return value if filled and is_zero(value.operands[0]) else None


def resized(builder: Builder, filler: Instruction, slots: int) -> Instruction:
    """An empty stack (`is_empty`) of `slots` slots that holds the same number as the empty stack `filler`."""
    made = builder.copy(filler, filler.operands)
    made.shape.dimensions[0] = slots
    return made


def resize(loop: Instruction, element: int, start: Instruction, moved: int | Instruction = 0) -> None:
    """Makes `start`, a stack of more or fewer slots, the initial value of state element `element`.

    The old slot s becomes slot s + `moved`; `moved` may be an instruction of the body. The caller has proved that each
    access of the loop touches one slot, and that this slot exists in `start`. Replaced instructions stay in the
    computation until `drop_dead`.
    """
    slots = start.shape.dimensions[0]
    body, condition = loop.called
    outside = Builder(loop.computation)
    initial = [outside.element(loop.operands[0], k) for k in range(len(loop.shape.tuple_shapes))]
    initial[element] = start
    loop.operands = [outside.tuple(initial)]
    for owner in (loop, body.parameters[0], condition.parameters[0], body.root):
        owner.shape.tuple_shapes[element].dimensions[0] = slots
    for source in (loop, body.parameters[0], condition.parameters[0]):
        for read in source.computation.users()[source]:
            if read.opcode == "get-tuple-element" and read.tuple_index == element:
                read.shape.dimensions[0] = slots
    builder, users = Builder(body), body.users()
    reads = [read for read, k in WhileLoop(loop).reads.items() if k == element]
    for user in dict.fromkeys(u for read in reads for u in users[read] if u.opcode in _INDEX):
        if user.opcode == "dynamic-update-slice":
            user.shape.dimensions[0] = slots
        if moved != 0:
            user.operands[_INDEX[user.opcode]] = _moved(builder, user.operands[_INDEX[user.opcode]], moved)
    body.sort()
    loop.computation.sort()


def _moved(builder: Builder, index: Instruction, by: int | Instruction) -> Instruction:
    if isinstance(by, int):
        bits = {shapes.U32: 32, shapes.U64: 64}.get(index.shape.element_type)  # unsigned indices wrap around
        return builder.binary("add", index, builder.scalar(by % 2**bits if bits else by, index.shape.element_type))
    if by.shape.element_type != index.shape.element_type:
        by = builder.make("convert", index.shape, [by])
    return builder.binary("add", index, by)


def stack_of(part: Any, slots: int) -> Any:
    """The shape of a stack of arrays of shape `part`."""
    return shapes.array(part.element_type, [slots, *part.dimensions])


def stack(builder: Builder, parts: Sequence[Instruction]) -> Instruction:
    """A stack of `parts`, which all have the same shape."""
    slots = [builder.make("reshape", stack_of(part.shape, 1), [part]) for part in parts]
    return builder.make("concatenate", stack_of(parts[0].shape, len(parts)), slots, dimensions=[0])


def read_slot(builder: Builder, whole: Instruction, index: Instruction, part: Any) -> Instruction:
    """Reads slot `index` of the stack `whole`. Returns an array of shape `part`."""
    at = [index, *_zeros(builder, index, len(part.dimensions))]
    sizes = [1, *part.dimensions]
    slot = builder.make("dynamic-slice", stack_of(part, 1), [whole, *at], dynamic_slice_sizes=sizes)
    return builder.make("reshape", part, [slot])


def write_slot(builder: Builder, whole: Instruction, part: Instruction, index: Instruction) -> Instruction:
    """Returns the stack `whole` with `part` in slot `index`."""
    slot = builder.make("reshape", stack_of(part.shape, 1), [part])
    at = [index, *_zeros(builder, index, len(part.shape.dimensions))]
    return builder.make("dynamic-update-slice", whole.shape, [whole, slot, *at])


def one_slot(stack: Any) -> Any:
    """The shape of one slot of a stack, which keeps its dimension 0, of size 1."""
    shape = type(stack)()
    shape.CopyFrom(stack)
    shape.dimensions[0] = 1
    return shape


def slot_at(builder: Builder, whole: Instruction, place: Sequence[Instruction]) -> Instruction:
    """Reads the slot of the stack `whole` at the indices `place`. Returns an array of the shape `one_slot`."""
    shape = one_slot(whole.shape)
    return builder.make("dynamic-slice", shape, [whole, *place], dynamic_slice_sizes=list(shape.dimensions))


def static_slot(builder: Builder, whole: Instruction, index: int) -> Instruction:
    """Reads slot `index`, known at compile time, of the stack `whole`."""
    sizes = whole.shape.dimensions[1:]
    limits = [(index, index + 1), *((0, size) for size in sizes)]
    ranges = [{"start": start, "limit": limit, "stride": 1} for start, limit in limits]
    part = shapes.array(whole.shape.element_type, sizes)
    slot = builder.make("slice", stack_of(part, 1), [whole], slice_dimensions=ranges)
    return builder.make("reshape", part, [slot])


def _zeros(builder: Builder, index: Instruction, count: int) -> list[Instruction]:
    return [builder.scalar(0, index.shape.element_type)] * count if count else []
