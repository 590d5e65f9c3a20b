"""Edits loops in place: adds and drops state elements, merges two loops, and splits one loop in two.

Each edit keeps the loop's other elements, their values and their readers. Each edit renumbers elements in the body, the
condition, the initial tuple and the readers of the result.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.builder import Builder, attributes
from dhelix.passes.hlo.edit import copy_computation, copy_instructions, replace_all_uses
from dhelix.passes.hlo.loops import WhileLoop
from dhelix.passes.hlo.module import Computation, Instruction

Copies = dict[Instruction, Instruction]


def add_element(loop: Instruction, initial: Instruction) -> Instruction:
    """Adds a state element and returns the instruction that reads this element in the body.

    The element is loop-invariant until the caller edits the body's root.
    """
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
    """Removes elements that only the body's root uses.

    Raises ValueError if the body, the condition or a reader of the loop's result still uses such an element.
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
    """The elements of the initial state `start`. Adds `get-tuple-element`s if `start` is not a `tuple` instruction."""
    if start.opcode == "tuple":
        return list(start.operands)
    builder = Builder(start.computation)
    return [builder.element(start, k) for k in range(len(start.shape.tuple_shapes))]


def merge(
    first: Instruction, second: Instruction, name: str, threaded: Mapping[int, int] | None = None
) -> tuple[Instruction, Copies, Copies]:
    """Merges two loops into one loop. Each iteration of the merged loop does one iteration of both loops.

    Readers of both loops then read the merged loop.

    The caller has proved that the trip counts are equal and the loops are independent, except for `threaded`. If an
    element of `second` equals an element of `first`, the merged loop carries only one of the two. Two invariants are
    equal if they have the same initial value. Two counters are equal if they have the same values. The merged loop has
    the frontend attributes of both loops. If both loops have an attribute, the value of `first` remains.
    `differing_attributes` finds attributes with two values.

    Args:
      threaded: maps elements of `second` to elements of `first`. The result of the element of `first` is the initial
        value of the element of `second`. In the merged loop, both loops update one buffer. In each iteration, the
        update of `first` comes before the update of `second`. The caller has proved that the two loops touch different
        slots of this buffer.

    Returns:
      The merged loop, and for each old body a map from its instructions to their copies.

    Raises:
      ValueError: two elements in `threaded` start as the same result of `first`.
    """
    a, b = WhileLoop(first), WhileLoop(second)
    threaded = threaded or {}
    if len(set(threaded.values())) < len(threaded):
        raise ValueError(f"{second.name} starts more than once as the same result of {first.name}")
    place = _places(a, b, threaded)
    size = 1 + max((*range(a.size), *place.values()))
    own = {n: k for k, n in place.items() if n >= a.size}
    computation = first.computation
    builder = Builder(computation)
    start = [builder.element(first.operands[0], k) for k in range(a.size)]
    start += [builder.element(second.operands[0], own[n]) for n in range(a.size, size)]
    initial = builder.tuple(start)

    body = Builder(first.computation.module.new_computation(name + "_body"))
    state = body.parameter(0, initial.shape)
    copies_a = _copy_body(body, a, [body.element(state, k) for k in range(a.size)])
    roots = [copies_a[r] for r in a.body.root.operands]
    elements = [roots[n] if k in threaded else body.element(state, n) for k, n in sorted(place.items())]
    copies_b = _copy_body(body, b, elements)
    for k, n in threaded.items():
        roots[n] = copies_b[b.body.root.operands[k]]
    roots += [copies_b[b.body.root.operands[own[n]]] for n in range(a.size, size)]
    condition = _copy_condition(a, initial, name)
    merged = builder.while_loop(initial, body.finish(body.tuple(roots)), condition, first, name)
    builder.add_attributes(merged, second)
    for old, to in ((first, lambda k: k), (second, lambda k: place[k])):
        _redirect(computation, old, merged, to)
    gone = {first, second}
    users = computation.users()
    gone.update(start for start in (first.operands[0], second.operands[0]) if gone.issuperset(users[start]))
    computation.instructions = [i for i in computation.instructions if i not in gone]
    computation.sort()
    return merged, copies_a, copies_b


def differing_attributes(first: Instruction, second: Instruction) -> list[tuple[str, str, str]]:
    """Frontend attributes of both loops with different values: (name, value in `first`, value in `second`)."""
    kept, lost = attributes(first), attributes(second)
    return [(key, kept[key], lost[key]) for key in sorted(kept.keys() & lost.keys()) if kept[key] != lost[key]]


def _places(a: WhileLoop, b: WhileLoop, threaded: Mapping[int, int]) -> dict[int, int]:
    """Maps each element of `b` to its element of the merged state. The merged state begins with all elements of `a`."""
    known = {a.initial(k): k for k in sorted(a.invariants, reverse=True)}
    place: dict[int, int] = {}
    free = a.size
    for k in range(b.size):
        if k in threaded:
            place[k] = threaded[k]
            continue
        same = known.get(b.initial(k)) if k in b.invariants and b.initial(k) is not None else None
        if same is None and k in b.condition_indices:
            same = next((j for j in sorted(a.condition_indices) if _same_course(a, j, b, k)), None)
        place[k] = free if same is None else same
        free += same is None
    return place


def _same_course(a: WhileLoop, j: int, b: WhileLoop, k: int) -> bool:
    """Whether counter `j` of `a` equals counter `k` of `b` in every iteration and after the last iteration."""
    same_shape = shapes.same(a.instruction.shape.tuple_shapes[j], b.instruction.shape.tuple_shapes[k])
    if not (same_shape and a.counters and b.counters) or a.counters[0][j] != b.counters[0][k]:
        return False
    following = a.index_table(a.body.root.operands[j])
    return following is not None and following == b.index_table(b.body.root.operands[k])


def _copy_body(builder: Builder, loop: WhileLoop, state: Sequence[Instruction]) -> Copies:
    """Copies the instructions of a loop body, except the root, the parameter and the reads of the parameter.

    The values in `state` replace the reads of the parameter.
    """
    copies = {read: state[k] for read, k in loop.reads.items()}
    left_out = (*loop.body.parameters, loop.body.root)
    rest = [i for i in loop.body.instructions if i not in copies and i not in left_out]
    copy_instructions(builder, rest, copies)
    return copies


def _copy_condition(loop: WhileLoop, initial: Instruction, name: str) -> Computation:
    builder = Builder(loop.body.module.new_computation(name + "_condition"))
    copies = {loop.condition.parameters[0]: builder.parameter(0, initial.shape)}
    copy_instructions(builder, loop.condition.instructions, copies)
    return builder.finish(copies[loop.condition.root])


def _redirect(computation: Computation, old: Instruction, new: Instruction, place: Callable[[int], int]) -> None:
    """Makes readers of the result of `old` read the result of `new`. `place` maps element numbers from old to new.

    A reader of the whole tuple gets a rebuilt tuple.
    """
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


def split(loop: Instruction, at: int, names: tuple[str, str]) -> tuple[Instruction, Instruction]:
    """Replaces `loop` by two loops with the names `names`.

    The first loop does the first `at` iterations. The second loop does the rest, with the condition of `loop`.

    Invariants enter both loops with their original initial value. Raises PassRefusal if `loop` is not proved to run
    more than `at` iterations, counted by one counter that only rises or only falls.
    """
    whole = WhileLoop(loop)
    builder = Builder(loop.computation)
    start = _elements(loop.operands[0])
    condition = bounded_condition(whole, at, loop.shape)
    first = builder.while_loop(builder.tuple(start), copy_computation(whole.body), condition, loop, names[0])
    between = [builder.element(first, k) for k in range(whole.size)]
    for k in whole.invariants:
        between[k] = start[k]
    for k in whole.deciding_indices - whole.invariants:
        value = (whole.counters or [])[at][k]
        between[k] = builder.scalar(value, loop.shape.tuple_shapes[k].element_type)
    second = builder.while_loop(builder.tuple(between), whole.body, whole.condition, loop, names[1])
    _redirect(loop.computation, loop, second, lambda k: k)
    loop.computation.instructions = [i for i in loop.computation.instructions if i is not loop]
    loop.computation.sort()
    return first, second


def inline_single_trip(loop: Instruction) -> None:
    """Replaces a loop that runs exactly once by the instructions of its body.

    Raises PassRefusal if the loop is not proved to run once.
    """
    whole = WhileLoop(loop)
    if whole.trip_count != 1:
        raise PassRefusal("the loop is not proved to run once", loop)
    builder, start = Builder(loop.computation), _elements(loop.operands[0])
    reads = {read: start[k] for read, k in whole.reads.items()}
    copies: Copies = {whole.body.parameters[0]: loop.operands[0], **reads}
    copy_instructions(builder, [i for i in whole.body.instructions if i is not whole.body.root], copies)
    results = [copies[value] for value in whole.body.root.operands]
    stands_for = {read: results[read.tuple_index] for read in loop.computation.users()[loop]}
    replace_all_uses(loop.computation, stands_for)
    loop.computation.instructions = [i for i in loop.computation.instructions if i is not loop and i not in stands_for]
    loop.computation.sort()


def bounded_condition(loop: WhileLoop, trips: int, state: Any) -> Computation:
    """Makes a loop condition that is true for the first `trips` iterations of `loop`.

    Args:
      state: shape of the loop state that the condition reads. This state begins with the elements of `loop`.

    Raises:
      PassRefusal: the loop is not proved to run more than `trips` iterations, several counters decide its trip count,
        or the counter does not change in one direction.
    """
    counters, index = loop.counters, loop.induction_index
    if counters is None or index is None or not 0 < trips < len(counters):
        raise PassRefusal(f"the loop is not proved to run at least {trips} iterations by one counter", loop.instruction)
    values = [state_of[index] for state_of in counters]
    rising = values[1] > values[0]
    if any((b > a) != rising for a, b in itertools.pairwise(values)):
        raise PassRefusal("the loop's counter goes up and down", loop.instruction)
    builder = Builder(loop.body.module.new_computation("bounded_condition"))
    counter = builder.element(builder.parameter(0, state), index)
    bound = builder.scalar(values[trips], counter.shape.element_type)
    goes_on = builder.make(
        "compare", shapes.scalar(shapes.PRED), [counter, bound], comparison_direction="LT" if rising else "GT"
    )
    return builder.finish(goes_on)
