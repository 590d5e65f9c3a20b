"""Stacks that loops read and write slot by slot: detection, and stacks made longer, shorter or shared."""

from __future__ import annotations

import numpy as np
import pytest

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, HloModule, Instruction, Shape, WhileLoop, shapes, verify
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.loop_state import merge
from dhelix.passes.hlo.stacks import last_reader, mirror_reads, resize, resized, slot_reads, slot_write, slots_changed
from dhelix.tests.passes.hlo.interpreter import Value, run, same
from dhelix.tests.passes.hlo.modules import base

SLOTS = 4


def result(module: HloModule) -> Value:
    drop_dead(module.entry)
    module.to_bytes()
    verify(module)
    return run(module.entry, [np.array([1, -2, 3, 4], np.int32)])[0]


def stack(builder: Builder, slots: int) -> Instruction:
    shape = Shape(element_type=shapes.S32, dimensions=[slots, 4])
    return builder.make("broadcast", shape, [builder.scalar(0, shapes.S32)])


def loop(
    builder: Builder, start: Instruction, trips: int, first: int, step: int = 1, reads: bool = False
) -> Instruction:
    """A loop whose iteration t uses slot `first + step * t` of a stack.

    With `reads`, it adds the slot to the total. Otherwise it stores the total in the slot, then adds one to the total.
    """
    total = builder.module.entry.parameters[0]
    initial = builder.tuple([builder.scalar(0, shapes.S32), total, start])
    body = Builder(builder.module.new_computation("body"))
    state = body.parameter(0, initial.shape)
    counter, total, kept = (body.element(state, k) for k in range(3))
    one = body.scalar(1, shapes.S32)
    walked = body.binary("multiply", counter, body.scalar(step, shapes.S32))
    place = [body.binary("add", walked, body.scalar(first, shapes.S32)), body.scalar(0, shapes.S32)]
    slot = Shape(element_type=shapes.S32, dimensions=[1, 4])
    if reads:
        read = body.make("dynamic-slice", slot, [kept, *place], dynamic_slice_sizes=[1, 4])
        total = body.binary("add", total, body.make("reshape", total.shape, [read]))
    else:
        kept = body.make("dynamic-update-slice", kept.shape, [kept, body.make("reshape", slot, [total]), *place])
        total = body.binary("add", total, body.make("broadcast", total.shape, [one]))
    body.finish(body.tuple([body.binary("add", counter, one), total, kept]))
    condition = Builder(builder.module.new_computation("condition"))
    counter = condition.element(condition.parameter(0, initial.shape), 0)
    goes_on = [counter, condition.scalar(trips, shapes.S32)]
    condition.finish(condition.make("compare", shapes.scalar(shapes.PRED), goes_on, comparison_direction="LT"))
    return builder.make("while", initial.shape, [initial], called=[body.computation, condition.computation])


def written_and_read() -> tuple[Instruction, Instruction]:
    """A loop that fills a stack from the first slot on, and a loop that reads it from the last slot on."""
    builder = Builder(base().entry)
    writer = loop(builder, stack(builder, SLOTS), SLOTS, 0)
    reader = loop(builder, builder.element(writer, 2), SLOTS, SLOTS - 1, -1, reads=True)
    builder.finish(builder.element(reader, 1))
    builder.module.to_bytes()
    return writer, reader


def test_reads_and_writes_of_single_slots_are_found() -> None:
    writer, reader = written_and_read()
    assert slot_write(WhileLoop(writer), 2).opcode == "dynamic-update-slice"
    (read,) = slot_reads(WhileLoop(reader), 2)
    assert WhileLoop(reader).index_table(read.operands[1]) == [3, 2, 1, 0]
    found, element = last_reader(writer, 2)
    assert (found.instruction, element) == (reader, 2)
    assert slots_changed(WhileLoop(writer), 2) == {0, 1, 2, 3}
    assert slots_changed(WhileLoop(reader), 2) is None  # the reader changes no slot
    with pytest.raises(PassRefusal, match="does not write the stack slot by slot"):
        slot_write(WhileLoop(reader), 2)
    with pytest.raises(PassRefusal, match="does not read one slot at a time"):
        slot_reads(WhileLoop(writer), 2)


@pytest.mark.parametrize("moved", [0, 2])
def test_a_longer_stack_with_its_slots_elsewhere(moved: int) -> None:
    writer, reader = written_and_read()
    before = result(writer.computation.module)
    builder = Builder(writer.computation)
    filler = WhileLoop(writer).initial(2)
    assert filler is not None
    resize(writer, 2, resized(builder, filler, SLOTS + 2), moved)
    resize(reader, 2, builder.element(writer, 2), moved)
    assert list(reader.shape.tuple_shapes[2].dimensions) == [SLOTS + 2, 4]
    assert same(result(writer.computation.module), before)


def test_slots_that_a_value_of_the_loop_moves() -> None:
    writer, reader = written_and_read()
    before = result(writer.computation.module)
    builder = Builder(writer.computation)
    filler = WhileLoop(writer).initial(2)
    assert filler is not None
    inside = Builder(writer.called[0])
    resize(writer, 2, resized(builder, filler, SLOTS + 1), inside.scalar(1, shapes.S32))
    resize(reader, 2, builder.element(writer, 2), 1)
    assert same(result(writer.computation.module), before)


def test_a_stack_stored_the_other_way_round() -> None:
    writer, reader = written_and_read()
    before = result(writer.computation.module)
    write = slot_write(WhileLoop(writer), 2)
    inside = Builder(writer.called[0])
    write.operands[2] = inside.binary("subtract", inside.scalar(SLOTS - 1, shapes.S32), write.operands[2])
    writer.called[0].sort()
    mirror_reads(WhileLoop(reader), 2)
    assert same(result(writer.computation.module), before)


def test_two_loops_over_different_slots_of_one_stack_become_one() -> None:
    """The second loop starts with the stack that the first one leaves. Each merged iteration writes a slot of both."""
    builder = Builder(base().entry)
    first = loop(builder, stack(builder, 2 * SLOTS), SLOTS, 0)
    second = loop(builder, builder.element(first, 2), SLOTS, SLOTS)
    reader = loop(builder, builder.element(second, 2), 2 * SLOTS, 0, reads=True)
    builder.finish(builder.element(reader, 1))
    module = builder.module
    before = result(module)
    one, other = slots_changed(WhileLoop(first), 2), slots_changed(WhileLoop(second), 2)
    assert one == {0, 1, 2, 3} and other == {4, 5, 6, 7}
    merged, _, _ = merge(first, second, "merged", {2: 2})
    assert WhileLoop(merged).trip_count == SLOTS
    assert same(result(module), before)
    assert [i.name for i in module.entry.instructions if i.opcode == "while"] == [merged.name, reader.name]
