"""Gathers what a layer needs first while the layer before it runs, if parameters stay split (ZeRO-3, FSDP).

Before, in forward and backward:                 After:
    for l in 0 ... L-1:                              next = all-gather(p[0])
        w = all-gather(p[l])                         for l in 0 ... L-1:
        v = all-gather(q[l])                             w = next; next = all-gather(p[l+1])
        x = (x @ w) @ v                                  v = all-gather(q[l])
                                                         x = (x @ w) @ v

The all-gather of v needs no prefetch: the product before it hides it.

Contract
    Consumes  all-gathers in a loop over layers, or sharding constraints that become all-gathers. Each gathers the slot
              of the iteration from a stack that the loop does not change. A reader of the gathered slot depends on no
              product of the same iteration.
    Makes     the same all-gather of the next iteration's slot, which the loop carries. The first slot is gathered
              before the loop.
    Leaves    loops that gather less than `least` bytes before their first product, that have one iteration, or that
              gather in another order than that of the slots.

Loops in which both strands run are changed, too: at the begin of an iteration, both strands wait.

Why it is legal: the loop does not change the stack, so a slot may be read early. The slot of each iteration follows
from constants (`hlo/loops.py`), so all devices gather in the same order.
Cost: the last iteration gathers a slot once more (XLA clamps its index). Two layers' slots live at once.
Source: PyTorch's FSDP prefetches in the same way, whole modules at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.graph import CONTROL_FLOW, descendants
from dhelix.passes.hlo.loop_state import add_element
from dhelix.passes.hlo.stacks import starts_at_zero

_MOVES = frozenset("convert copy dynamic-slice reshape slice transpose".split())
_PRODUCTS = frozenset(("dot", "convolution", "custom-call", *CONTROL_FLOW))


@dataclass(frozen=True)
class ParameterPrefetch:
    """Gathers parameters an iteration ahead.

    Attributes:
      least: minimal bytes that a loop gathers before its first product; latency dominates smaller messages.
    """

    least: int = 1 << 20

    name = "parameter-prefetch"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed = False
        for computation in list(module.computations):
            for loop in [i for i in computation.instructions if i.opcode == "while"]:
                found = _gathers(loop)
                moved = sum(shapes.byte_size(one.gather.shape) for one in found)
                if found and moved >= self.least:
                    for one in found:
                        _prefetch(loop, one)
                    for edited in (loop.called[0], computation):
                        edited.sort()
                        drop_dead(edited)
                    context.note("parameters gathered a layer ahead", loop, gathers=len(found), bytes=moved)
                    changed = True
        return changed


@dataclass(frozen=True)
class _Gather:
    """An all-gather of the slot of an iteration.

    Attributes:
      read: the instruction that reads the stack in the body.
      way: the instructions from `read` to the all-gather, which comes last.
      index: the number of the slot in each iteration.
      slots: the first slots in the order of reading.
    """

    read: Instruction
    way: Sequence[Instruction]
    index: Instruction
    slots: tuple[int, int]

    @property
    def gather(self) -> Instruction:
        return self.way[-1]


def _gathers(loop: Instruction) -> list[_Gather]:
    """The all-gathers of a loop on which its first products wait."""
    try:
        whole = WhileLoop(loop)
    except PassRefusal:
        return []
    if not any(_is_gather(i) for i in whole.body.instructions) or (whole.trip_count or 0) < 2:
        return []
    users = whole.body.users()
    products = [i for i in whole.body.instructions if i.opcode in _PRODUCTS and not is_sharding_constraint(i)]
    after = descendants(whole.body, products)
    found = [_found(whole, i) for i in whole.body.instructions if _is_gather(i)]
    return [one for one in found if one and any(after.isdisjoint(reader.operands) for reader in users[one.gather])]


def _is_gather(value: Instruction) -> bool:
    """Whether `value` is an all-gather, or a constraint after which fewer axes split an array than before."""
    if value.opcode == "all-gather":
        return len(value.operands) == 1
    if not is_sharding_constraint(value):
        return False
    whole, shards = stated(value), stated(value.operands[0])
    if whole is None or shards is None:
        return False
    said = [pair for *pair, free in zip(whole.axes, shards.axes, whole.free, strict=True) if not free]
    return all(set(after) <= set(before) for after, before in said) and any(after != before for after, before in said)


def _found(loop: WhileLoop, gather: Instruction) -> _Gather | None:
    """The all-gather, if it gathers one slot of a stack that the loop does not change, in the order of slots."""
    way, value = [gather], gather.operands[0]
    while value.opcode in _MOVES or is_sharding_constraint(value):
        way.append(value)
        value = value.operands[0]
    taken = [step for step in way if step.opcode == "dynamic-slice"]
    if loop.reads.get(value) not in loop.invariants or loop.initial(loop.reads[value]) is None or len(taken) != 1:
        return None
    index, *others = taken[0].operands[1:]
    table = loop.index_table(index) if starts_at_zero(others) else None
    layers = value.shape.dimensions[0]
    if taken[0].operands[0] is not value or table is None or not all(0 <= slot < layers for slot in table):
        return None
    step = table[1] - table[0]
    if abs(step) != 1 or table != list(range(table[0], table[0] + step * len(table), step)):
        return None
    return _Gather(value, tuple(reversed(way)), index, (table[0], table[1]))


def _prefetch(loop: Instruction, one: _Gather) -> None:
    outside, body = Builder(loop.computation), Builder(loop.called[0])
    stack = WhileLoop(loop).initial(one.read.tuple_index)
    assert stack is not None  # see _found
    first = outside.scalar(one.slots[0], one.index.shape.element_type)
    ready = add_element(loop, _again(outside, one, stack, first))
    for user in body.computation.users()[one.gather]:
        user.operands = [ready if operand is one.gather else operand for operand in user.operands]
    forwards = one.slots[1] > one.slots[0]
    step = body.scalar(1, one.index.shape.element_type)
    after = body.binary("add" if forwards else "subtract", one.index, step)
    body.computation.root.operands[-1] = _again(body, one, one.read, after)


def _again(builder: Builder, one: _Gather, stack: Instruction, index: Instruction) -> Instruction:
    """Gathers slot `index` of `stack` as `one` does."""
    value = stack
    for step in one.way:
        others = step.operands[1:]
        if step.opcode == "dynamic-slice":
            others = [index, *(builder.scalar(0, other.shape.element_type) for other in others[1:])]
        value = builder.copy(step, [value, *others])
    return value
