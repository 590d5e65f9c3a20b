"""Edits of a loop's state in place: elements added or dropped, and two loops made one.

Each edit keeps the loop's other elements, their values and their readers; it renumbers what must
be renumbered in the body, the condition, the initial tuple and the readers of the result.
"""

from collections.abc import Callable, Iterable

from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.edit import copy_instructions
from dhelix.passes.hlo.loops import WhileLoop
from dhelix.passes.hlo.module import Computation, Instruction

Copies = dict[Instruction, Instruction]


def add_element(loop: Instruction, initial: Instruction) -> Instruction:
    """A further element, an invariant until the body's root says otherwise. Returns the body's read of it."""
    body, condition = loop.called
    for owner in (loop, body.parameters[0], condition.parameters[0], body.root):
        owner.shape.tuple_shapes.add().CopyFrom(initial.shape)
    start = Builder(loop.computation).tuple([*_elements(loop.operands[0]), initial])
    loop.operands = [start]
    read = Builder(body).element(body.parameters[0], len(loop.shape.tuple_shapes) - 1)
    body.root.operands.append(read)
    body.sort()
    loop.computation.sort()
    return read


def drop_elements(loop: Instruction, indices: Iterable[int]) -> None:
    """Removes elements that only the body's root reads: neither the condition nor a reader of the loop.

    Raises ValueError when something still does.
    """
    dropped = set(indices)
    body, condition = loop.called
    kept = [k for k in range(len(loop.shape.tuple_shapes)) if k not in dropped]
    number = {k: n for n, k in enumerate(kept)}
    body.root.operands = [body.root.operands[k] for k in kept]
    start = _elements(loop.operands[0])
    loop.operands = [Builder(loop.computation).tuple([start[k] for k in kept])]
    for owner in (loop, body.parameters[0], condition.parameters[0], body.root):
        remaining = [owner.shape.tuple_shapes[k] for k in kept]
        owner.shape.CopyFrom(shapes.tuple_of(remaining))
    for source, computation in (
        (body.parameters[0], body),
        (condition.parameters[0], condition),
        (loop, loop.computation),
    ):
        readers = computation.users()
        dead = set()
        for read in readers[source]:
            if read.opcode != "get-tuple-element":
                raise ValueError(f"{read.name} reads the loop state as a whole")
            if read.tuple_index not in dropped:
                read.proto.tuple_index = number[read.tuple_index]
            elif readers[read] or computation.root is read:
                raise ValueError(f"{read.name} still reads a dropped element")
            else:
                dead.add(read)
        computation.instructions = [i for i in computation.instructions if i not in dead]
    loop.computation.sort()


def _elements(start: Instruction) -> list[Instruction]:
    """The elements of an initial state, taken apart where it is not a `tuple`."""
    if start.opcode == "tuple":
        return list(start.operands)
    builder = Builder(start.computation)
    return [builder.element(start, k) for k in range(len(start.shape.tuple_shapes))]


def merge(first: Instruction, second: Instruction, name: str) -> tuple[Instruction, Copies, Copies]:
    """One loop whose body does an iteration of both. The caller proved equal trip counts and independence.

    Elements of `second` that are the same as elements of `first` are carried once: invariants with the same
    initial value, and counters that go through the same values (the conditions then agree).
    Readers of both loops read the merged one. Returns it, and where each body's instructions went.
    """
    a, b = WhileLoop(first), WhileLoop(second)
    place = _places(a, b)
    size = 1 + max((*range(a.size), *place.values()))
    own = {n: k for k, n in place.items() if n >= a.size}
    computation = first.computation
    builder = Builder(computation)
    start = [builder.element(first.operands[0], k) for k in range(a.size)]
    start += [builder.element(second.operands[0], own[n]) for n in range(a.size, size)]
    initial = builder.tuple(start)

    body = Builder(first.computation.module.new_computation(name + "_body"))
    state = body.parameter(0, initial.shape)
    copies_a = _copy_body(body, a, state, lambda k: k)
    copies_b = _copy_body(body, b, state, lambda k: place[k])
    roots = [copies_a[r] for r in a.body.root.operands]
    roots += [copies_b[b.body.root.operands[own[n]]] for n in range(a.size, size)]
    condition = _copy_condition(a, initial, name)
    merged = builder.while_loop(initial, body.finish(body.tuple(roots)), condition, first, name)
    for old, to in ((first, lambda k: k), (second, lambda k: place[k])):
        _redirect(computation, old, merged, to)
    gone = {first, second}
    users = computation.users()
    gone.update(start for start in (first.operands[0], second.operands[0]) if gone.issuperset(users[start]))
    computation.instructions = [i for i in computation.instructions if i not in gone]
    computation.sort()
    return merged, copies_a, copies_b


def _places(a: WhileLoop, b: WhileLoop) -> dict[int, int]:
    """Element of `b` -> element of the merged state; those below `a.size` are `a`'s own."""
    known = {a.initial(k): k for k in sorted(a.invariants, reverse=True)}
    place: dict[int, int] = {}
    free = a.size
    for k in range(b.size):
        same = known.get(b.initial(k)) if k in b.invariants and b.initial(k) is not None else None
        if same is None and k in b.condition_indices:
            same = next((j for j in sorted(a.condition_indices) if _same_course(a, j, b, k)), None)
        place[k] = free if same is None else same
        free += same is None
    return place


def _same_course(a: WhileLoop, j: int, b: WhileLoop, k: int) -> bool:
    """Whether two counters hold the same values in every iteration and after the last one."""
    same_shape = shapes.same(a.instruction.shape.tuple_shapes[j], b.instruction.shape.tuple_shapes[k])
    if not (same_shape and a.counters and b.counters) or a.counters[0][j] != b.counters[0][k]:
        return False
    following = a.index_table(a.body.root.operands[j])
    return following is not None and following == b.index_table(b.body.root.operands[k])


def _copy_body(builder: Builder, loop: WhileLoop, state: Instruction, place: Callable[[int], int]) -> Copies:
    copies: Copies = {loop.body.parameters[0]: state}
    for read, k in loop.reads.items():
        copies[read] = builder.element(state, place(k))
    rest = [i for i in loop.body.instructions if i not in copies and i is not loop.body.root]
    copy_instructions(builder, rest, copies)
    return copies


def _copy_condition(loop: WhileLoop, initial: Instruction, name: str) -> Computation:
    builder = Builder(loop.body.module.new_computation(name + "_condition"))
    copies = {loop.condition.parameters[0]: builder.parameter(0, initial.shape)}
    copy_instructions(builder, loop.condition.instructions, copies)
    return builder.finish(copies[loop.condition.root])


def _redirect(computation: Computation, old: Instruction, new: Instruction, place: Callable[[int], int]) -> None:
    """Readers of `old`'s result read `new`'s; a reader of the whole tuple gets one rebuilt from it."""
    whole: Instruction | None = None
    for user in computation.users()[old]:
        if user.opcode == "get-tuple-element":
            user.operands = [new]
            user.proto.tuple_index = place(user.tuple_index)
            continue
        if whole is None:
            builder = Builder(computation)
            whole = builder.tuple([builder.element(new, place(k)) for k in range(len(old.shape.tuple_shapes))])
        user.operands = [whole if o is old else o for o in user.operands]
