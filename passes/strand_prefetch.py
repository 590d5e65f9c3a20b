"""Starts the next micro-batch's forward pass, its embedding, in the iteration before.

Before:                                          After:
    strands: while i < M                             x = embed(1)
      x = embed(i)        gather, reduce-scatter     strands: while i < M, carrying x
      layers of both strands, from x                   layers of both strands, from x
      head and loss of i                               head and loss of i
                                                       x = embed(i + 1)

What an iteration begins with is needed at once, so nothing can run beside its collective. An iteration earlier nothing
waits for it: it may lie under the head's products, and the order decides.

Contract
    Consumes  the loop over micro-batches that `strand-duplication` made, of three micro-batches or more.
    Makes     a state element of each value that starts with a collective, or a lookup in a table of 1 MiB or more that
              the partitioner may have to communicate for, and follows from the loop counter and from what the loop
              does not change; it and what alone follows from it without products or loops.
    Leaves    everything else. Layers in a loop of their own keep their collectives (those of FSDP): there the other
              strand computes beside them.

Why it is legal: the same operations on the same values, by the counter of the next iteration; none has an effect. The
last iteration looks up a micro-batch beyond the end, slices clamp, and nothing reads the result.
Cost: that lookup, one more in M; the value, a micro-batch's input of the first layer, lives during the head. It is what
collective pipelining does backward in XLA, for these values alone. DHelix section 4.1 has the embedding as a segment.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.passes.collectives import find_collective
from dhelix.passes.hlo import Builder, HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import copy_instructions, drop_dead, has_side_effect, replace_uses
from dhelix.passes.hlo.loop_state import add_element
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.strand_duplication import STRANDS

_LARGE = 1 << 20  # bytes of a lookup that is worth it
_STOPS = frozenset("while conditional call dot convolution custom-call tuple parameter".split())
_SHARDING = "Sharding"  # a custom call that only says how a value is sharded


@dataclass(frozen=True)
class StrandPrefetch:
    """No options."""

    name = "strand-prefetch"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in [i for i in computation.instructions if i.opcode == "while" and _is_strands(i)]:
                found = _first_values(WhileLoop(loop))
                for value in found:
                    _fetch_earlier(WhileLoop(loop), value)
                if found:
                    fetched = sum(shapes.byte_size(value.shape) for value in found)
                    done = "the next micro-batch begins an iteration earlier"
                    context.note(done, loop, values=len(found), bytes=fetched)
                    changed = True
        return changed


def _is_strands(loop: Instruction) -> bool:
    return loop.name.partition(".")[0] == STRANDS


def _first_values(loop: WhileLoop) -> list[Instruction]:
    """What could come from the iteration before, and is worth it."""
    if loop.induction_index is None or (loop.trip_count or 0) < 2:
        return []
    counter = [read for read, k in loop.reads.items() if k == loop.induction_index]
    known = _following_from(loop, [r for r, k in loop.reads.items() if k in loop.invariants or r in counter])
    moving = graph.descendants(loop.body, counter) & known
    users = loop.body.users()
    found: dict[Instruction, None] = {}
    for instruction in loop.body.instructions:
        if instruction in moving and _begins(instruction):
            found[_end_of_chain(instruction, known, users)] = None
    before = {value: graph.ancestors(loop.body, [value]) - {value} for value in found}
    return [value for value in found if not any(value in before[other] for other in found)]


def _following_from(loop: WhileLoop, reads: Iterable[Instruction]) -> set[Instruction]:
    """What follows from these reads of the state, and from constants, without loops, products or effects."""
    found = set(reads)
    for instruction in loop.body.instructions:
        if instruction.opcode in ("parameter", "get-tuple-element") or _stops(instruction):
            continue
        if all(o in found for o in (*instruction.operands, *instruction.control_predecessors)):
            found.add(instruction)
    return found


def _stops(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call" and instruction.proto.custom_call_target == _SHARDING:
        return False
    return instruction.opcode in _STOPS or has_side_effect(instruction)


def _begins(instruction: Instruction) -> bool:
    lookup = instruction.opcode == "gather" and shapes.byte_size(instruction.shape) >= _LARGE
    return lookup or find_collective(instruction) is not None


def _end_of_chain(
    value: Instruction, known: set[Instruction], users: dict[Instruction, list[Instruction]]
) -> Instruction:
    """The last of what follows from `value` one by one: what reads it, and nothing else does."""
    while len(users[value]) == 1 and users[value][0] in known:
        value = users[value][0]
    return value


def _fetch_earlier(loop: WhileLoop, value: Instruction) -> None:
    """`value` becomes a state element, which the loop makes for its next iteration."""
    body, start = loop.body, loop.instruction.operands[0]
    needed = graph.ancestors(body, [value])
    sources = {read: k for read, k in loop.reads.items() if read in needed}
    made = [i for i in body.instructions if i in needed and i not in sources and i.opcode != "parameter"]

    outside = Builder(loop.instruction.computation)
    first = {read: outside.element(start, k) for read, k in sources.items()}
    copy_instructions(outside, made, first)

    counter = [read for read, k in sources.items() if k == loop.induction_index]
    moving = graph.descendants(body, counter)
    following = {read: body.root.operands[loop.induction_index] for read in counter}
    following |= {i: i for i in needed if i not in moving}
    copy_instructions(Builder(body), [i for i in made if i in moving], following)

    carried = add_element(loop.instruction, first[value])
    body.root.operands[-1] = following[value]
    replace_uses(body, value, carried)
    body.sort()
    drop_dead(body)
    drop_dead(loop.instruction.computation)
