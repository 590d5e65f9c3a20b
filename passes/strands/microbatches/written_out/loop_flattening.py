"""Gives each micro-batch its own iteration, in a loop whose iterations hold several micro-batches because of `unroll=`.

Before (N equal parts in an iteration):          After (i, g, ls as before; j and l are new):
    while i < M / N:                                 while j < M:
      g0, l0 = backward(w, xs[i][0])                   k = j % N
      g1, l1 = backward(w, xs[i][1])                   gk, lk = backward(w, (xs[i][0], xs[i][1])[k])
      g = g + g0 + g1                                  g = g + gk
      ls[i] = l0, l1                                   l[k] = lk
      i = i + 1                                        if k == N - 1: ls[i] = l, i = i + 1

Contract
    Consumes  a loop with a proved trip count. Its body consists of N equal parts (`equal_parts`), loop-carried sums,
              and little else: counters, slices of the batch, small results.
    Makes     the loop above. N new iterations take the place of one old iteration. Each of them repeats what the old
              iteration did outside of its parts. Only the last of them keeps the results of this work.
    Leaves    loops that do more, such as an update of parameters. In such loops, an iteration is an optimizer step,
              which has its own micro-batches.

Why it is legal: new iteration j computes what part j % N of old iteration j / N computed. Until the last of N new
iterations, the old state stays unchanged, except for sums. So reads of this state return the same values.
Cost: each iteration slices N micro-batches instead of one, and has a select for each small element of the state.
"""

from __future__ import annotations

from dhelix.passes.hlo import Builder, Computation, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.edit import copy_instructions, drop_dead, has_side_effect, read_through, replace_all_uses
from dhelix.passes.hlo.graph import ancestors
from dhelix.passes.hlo.stacks import read_slot, stack, static_slot, write_slot
from dhelix.passes.strands.microbatches.written_out.equal_parts import Parts, is_heavy
from dhelix.passes.strands.microbatches.written_out.loop_rolling import NAME, add, compute, counts_to, empty

_LARGE = 16 * 2**20  # limit in bytes for the state that each iteration selects, so that memory traffic stays small


def flatten(loop: WhileLoop, parts: Parts) -> Instruction | None:
    """Replaces `loop`, whose body holds `parts`, by a new loop and returns it. Returns None if `loop` must stay."""
    trips = loop.trip_count
    carried = _carried(loop, parts)
    if not trips or carried is None or not _is_little(loop, parts, carried):
        return None
    computation, old = loop.instruction.computation, loop.instruction
    outside = Builder(computation)
    start = [outside.element(old.operands[0], k) for k in range(loop.size)]
    start += [outside.scalar(0, shapes.S32), *(empty(outside, value, parts.count) for value in parts.kept)]
    initial = outside.tuple(start)
    body = _body(loop, parts, carried, initial)
    condition = counts_to(
        computation.module.new_computation(f"{NAME}_condition"), initial, loop.size, trips * parts.count
    )
    new = outside.while_loop(initial, body, condition, old, NAME)
    replace_all_uses(computation, {old: outside.tuple([outside.element(new, k) for k in range(loop.size)])})
    read_through(computation)
    drop_dead(computation)
    return new


def _carried(loop: WhileLoop, parts: Parts) -> dict[int, int] | None:
    """A map from each state element that carries a sum over parts to the sum's number.

    None unless the loop carries every sum over parts.
    """
    users, root = loop.body.users(), loop.body.root
    found: dict[int, int] = {}
    for n, one in enumerate(parts.sums):
        if one.start is None or one.start not in loop.reads:
            return None
        element, result = loop.reads[one.start], one.chain.result
        if root.operands[element] is not result or root.operands.count(result) > 1 or users[result] != [root]:
            return None
        found[element] = n
    return found


def _is_little(loop: WhileLoop, parts: Parts, carried: dict[int, int]) -> bool:
    """Whether the work outside of the parts is cheap enough to be repeated for each part."""
    others = [k for k in range(loop.size) if k not in carried and k not in loop.invariants]
    if sum(shapes.byte_size(loop.instruction.shape.tuple_shapes[k]) for k in others) > _LARGE:
        return False
    if any(map(has_side_effect, loop.body.instructions)):
        return False
    sums = {read for read, k in loop.reads.items() if k in carried}
    rest = _rest(loop, parts, carried)
    read = {*_wanted(loop, parts, carried), *(operand for i in rest for operand in i.operands)}
    return sums.isdisjoint(read) and not any(map(is_heavy, rest))


def _wanted(loop: WhileLoop, parts: Parts, carried: dict[int, int]) -> list[Instruction]:
    """The inputs and shared values of the parts, and the new state except for sums."""
    read = [i for value in (*parts.inputs, *parts.shared) for i in value.instances]
    return read + [value for k, value in enumerate(loop.body.root.operands) if k not in carried]


def _rest(loop: WhileLoop, parts: Parts, carried: dict[int, int]) -> list[Instruction]:
    """Instructions outside of the parts and sums: they make inputs, or they depend on results of the parts."""
    made = {result.instruction for result in parts.results}
    needed = set(_wanted(loop, parts, carried))
    for i in reversed(loop.body.instructions):
        if i in needed and i not in made:
            needed.update(i.operands)
    return [i for i in loop.body.instructions if i in needed - made and i not in loop.reads and i.opcode != "parameter"]


def _body(loop: WhileLoop, parts: Parts, carried: dict[int, int], initial: Instruction) -> Computation:
    """The body of the new loop. Its state is the old state, the counter j, and the stacks of results."""
    body = Builder(loop.body.module.new_computation(NAME))
    parameter = body.parameter(0, initial.shape)
    state = [body.element(parameter, k) for k in range(len(initial.operands))]
    counter, stacks = state[loop.size], state[loop.size + 1 :]
    number = body.scalar(parts.count, shapes.S32)
    part = body.binary("remainder", counter, number)
    copies = {read: state[k] for read, k in loop.reads.items()}
    rest = _rest(loop, parts, carried)
    before = ancestors(loop.body, [i for value in (*parts.inputs, *parts.shared) for i in value.instances])
    copy_instructions(body, [i for i in rest if i in before], copies)
    made = {v: copies[v.first] for v in parts.shared}
    for value in parts.inputs:
        whole = stack(body, [copies[i] for i in value.instances])
        made[value] = read_slot(body, whole, part, value.first.shape)
    compute(body, parts, made)
    sums = {k: add(body, parts.sums[n], state[k], made) for k, n in carried.items()}
    stacks = [write_slot(body, old, made[v], part) for v, old in zip(parts.kept, stacks, strict=True)]
    whole = dict(zip(parts.kept, stacks, strict=True))
    for result in parts.results:
        copies[result.instruction] = static_slot(body, whole[result.value], result.part)
    copy_instructions(body, rest, copies)
    last = _equals(body, part, body.scalar(parts.count - 1, shapes.S32))
    elements = []
    for k, value in enumerate(loop.body.root.operands):
        if k in carried:
            elements.append(sums[k])
        elif k in loop.invariants:
            elements.append(state[k])
        else:
            elements.append(_select(body, last, copies[value], state[k]))
    following = body.binary("add", counter, body.scalar(1, shapes.S32))
    return body.finish(body.tuple([*elements, following, *stacks]))


def _equals(builder: Builder, a: Instruction, b: Instruction) -> Instruction:
    return builder.make("compare", shapes.scalar(shapes.PRED), [a, b], comparison_direction="EQ")


def _select(builder: Builder, condition: Instruction, one: Instruction, other: Instruction) -> Instruction:
    if one.shape.dimensions:
        shape = type(one.shape)(element_type=shapes.PRED, dimensions=one.shape.dimensions)
        if one.shape.HasField("layout"):
            shape.layout.CopyFrom(one.shape.layout)
        condition = builder.make("broadcast", shape, [condition])
    return builder.make("select", one.shape, [condition, one, other])
