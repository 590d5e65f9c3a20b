"""Loop states with added and dropped elements, merged and split loops: all compute the same as before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, HloModule, Instruction, WhileLoop, shapes, verify
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.loop_state import add_element, drop_elements, inline_single_trip, merge, split
from dhelix.tests.passes.hlo.interpreter import Value, run, same
from dhelix.tests.passes.hlo.modules import VECTOR, base, loop, vector

ARGUMENT = np.array([1, -2, 3, 1 << 30], np.int32)


def result(module: HloModule) -> Value:
    module.to_bytes()
    verify(module)
    return run(module.entry, [ARGUMENT])[0]


def counted(
    builder: Builder, trips: int, values: list[Instruction], first: int = 0, step: int = 1, jump: bool = False
) -> Instruction:
    """A loop over (counter, values[0], values[1], ...) that adds the others, which are invariant, to values[0].

    With `jump`, the counter ends with another value than its steps lead to.
    """
    initial = builder.tuple([builder.scalar(first, shapes.S32), *values])
    body = Builder(builder.module.new_computation("body"))
    state = body.parameter(0, initial.shape)
    counter, total, *others = (body.element(state, k) for k in range(len(values) + 1))
    following = body.binary("add", counter, body.scalar(step, shapes.S32))
    if jump:
        last = body.scalar(first + step * (trips - 1), shapes.S32)
        goes_on = body.make("compare", shapes.scalar(shapes.PRED), [counter, last], comparison_direction="LT")
        far = body.scalar(1000, shapes.S32)
        following = body.make("select", counter.shape, [goes_on, following, far])
    for other in (*others, body.make("broadcast", VECTOR, [counter])):
        total = body.binary("add", total, other)
    body.finish(body.tuple([following, total, *others]))
    condition = Builder(builder.module.new_computation("condition"))
    counter = condition.element(condition.parameter(0, initial.shape), 0)
    bound = condition.scalar(first + step * trips, shapes.S32)
    condition.finish(condition.make("compare", shapes.scalar(shapes.PRED), [counter, bound], comparison_direction="LT"))
    called = [body.computation, condition.computation]
    return builder.make("while", initial.shape, [initial], called=called)


def all_elements(builder: Builder, loops: list[Instruction], whole: bool = False) -> None:
    elements = [builder.element(w, k) for w in loops for k in range(len(w.shape.tuple_shapes))]
    builder.finish(builder.tuple([*elements, *(loops if whole else [])]))


def test_an_added_element_is_invariant_and_can_be_changed() -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    before = result(module)
    read = add_element(made, vector(Builder(module.entry), 5))
    view = WhileLoop(made)
    assert view.size == 4 and 3 in view.invariants and view.reads[read] == 3
    assert same(result(module), before)
    body = view.body
    body.root.operands[3] = Builder(body).binary("add", read, read)
    body.sort()
    builder = Builder(module.entry)
    builder.finish(builder.element(made, 3))
    assert same(result(module), np.full(4, 5 * 8, np.int32))


def test_an_element_is_added_to_a_state_that_is_built_elsewhere() -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    before = result(module)
    builder = Builder(module.entry)
    made.operands = [builder.make("opt-barrier", made.shape, made.operands)]
    add_element(made, vector(builder, 5))
    module.to_bytes()
    verify(module)
    assert [i.opcode for i in made.operands[0].operands] == ["get-tuple-element"] * 3 + ["broadcast"]
    fence = next(i for i in module.entry.instructions if i.opcode == "opt-barrier")
    for read in [i for i in module.entry.instructions if fence in i.operands]:
        read.opcode, read.operands = "copy", [fence.operands[0].operands[read.tuple_index]]
    drop_dead(module.entry)
    assert same(result(module), before)


def test_dropped_elements_are_renumbered_away() -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    before = result(module)
    extra = vector(Builder(module.entry), 5)
    for _ in range(3):
        add_element(made, extra)
    Builder(module.entry).element(made, 4)  # a reader without users
    drop_elements(made, [2, 3, 4])
    view = WhileLoop(made)
    assert view.size == 3 and view.invariants == {2} and view.initial(2) is extra
    assert same(result(module), before)


@pytest.mark.parametrize("who", ["body", "condition", "after", "whole"])
def test_an_element_that_is_still_read_cannot_be_dropped(who: str) -> None:
    made = loop(0, 3, 1, bound_in_state=who == "condition")
    computation, source = made.called[0], made.called[0].parameters[0]
    if who == "condition":
        computation, source = made.called[1], made.called[1].parameters[0]
    elif who in ("after", "whole"):
        computation, source = made.computation, made
    builder = Builder(computation)
    if who == "whole":
        builder.make("opt-barrier", made.shape, [source])
    elif who != "condition":
        read = builder.element(source, 2)
        builder.make("negate", read.shape, [read])
    with pytest.raises(ValueError, match="reads the loop state as a whole|still reads a dropped element"):
        drop_elements(made, [2])


@settings(max_examples=40)
@given(
    trips=st.integers(0, 4),
    starts=st.tuples(st.integers(-2, 2), st.integers(-2, 2)),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    jumps=st.tuples(st.booleans(), st.booleans()),
    picks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=2),
    whole=st.booleans(),
    fenced=st.booleans(),
)
def test_a_merged_loop_does_what_both_did(
    trips: int,
    starts: tuple[int, int],
    steps: tuple[int, int],
    jumps: tuple[bool, bool],
    picks: list[list[int]],
    whole: bool,
    fenced: bool,
) -> None:
    module = base()
    builder = Builder(module.entry)
    pool = [module.entry.parameters[0], *(vector(builder, n) for n in range(3))]
    first, second = (
        counted(builder, trips, [pool[k] for k in picks[n]], starts[n], steps[n], jumps[n]) for n in range(2)
    )
    if fenced:
        second.operands = [builder.make("opt-barrier", second.shape, second.operands)]
        module.entry.sort()
    all_elements(builder, [first, second], whole)
    before = result(module)
    assert WhileLoop(first).trip_count == trips
    loop, _, _ = merge(first, second, "both")
    assert WhileLoop(loop).trip_count == trips
    after = result(module)
    assert same(after, before)
    left = [i for i in module.entry.instructions if i.opcode == "while"]
    assert left == [loop]


def test_what_two_loops_share_is_carried_once() -> None:
    module = base()
    builder = Builder(module.entry)
    x, y = module.entry.parameters[0], vector(builder, 2)
    first, second = counted(builder, 3, [x, y, x]), counted(builder, 3, [y, x, y])
    all_elements(builder, [first, second])
    loop, copies, _ = merge(first, second, "both")
    # the first loop's counter, total, y and x; only the total of the second loop
    assert WhileLoop(loop).size == 5
    assert all(i.computation is loop.called[0] for i in copies.values())


@given(
    trips=st.integers(2, 6),
    at=st.integers(1, 5),
    first=st.integers(-2, 2),
    step=st.sampled_from([1, 2, 3]),
    whole=st.booleans(),
)
def test_a_loop_split_in_two_does_what_it_did(trips: int, at: int, first: int, step: int, whole: bool) -> None:
    at = min(at, trips - 1)
    builder = Builder(base().entry)
    made = counted(builder, trips, [vector(builder, 1), vector(builder, 2)], first, step)
    all_elements(builder, [made], whole)
    module = builder.module
    before = result(module)
    one, other = split(made, at, ("one", "other"))
    assert (one.name.startswith("one"), other.name.startswith("other")) == (True, True)
    assert WhileLoop(one).trip_count == at and WhileLoop(other).trip_count == trips - at
    assert WhileLoop(other).initial(2) is WhileLoop(one).initial(2)  # an invariant
    assert same(result(module), before)


@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_loop_is_not_split_where_it_does_not_run(at: int) -> None:
    builder = Builder(base().entry)
    made = counted(builder, 3, [vector(builder, 1)])
    with pytest.raises(PassRefusal, match="not proved to run"):
        split(made, at, ("one", "other"))


def test_a_counter_that_turns_around_splits_no_loop() -> None:
    """The counter takes the values 6, 5 and 7, so comparing it with a bound does not separate early from late."""
    builder = Builder(base().entry)
    made = counted(builder, 3, [vector(builder, 1)], first=6)
    body = Builder(made.called[0])
    counter = next(read for read, k in WhileLoop(made).reads.items() if k == 0)
    six = body.make(
        "compare", shapes.scalar(shapes.PRED), [counter, body.scalar(6, shapes.S32)], comparison_direction="LT"
    )
    down = body.binary("subtract", counter, body.scalar(1, shapes.S32))
    at_six = body.make(
        "compare", shapes.scalar(shapes.PRED), [body.scalar(6, shapes.S32), counter], comparison_direction="LT"
    )
    up = body.binary("add", counter, body.scalar(2, shapes.S32))
    turned = body.make("select", counter.shape, [six, up, down])
    body.computation.root.operands[0] = body.make("select", counter.shape, [at_six, up, turned])
    body.computation.sort()
    assert WhileLoop(made).trip_count == 3
    with pytest.raises(PassRefusal, match="up and down"):
        split(made, 1, ("one", "other"))


@pytest.mark.parametrize("first", [0, 5])
def test_a_loop_of_one_iteration_is_replaced_by_its_body(first: int) -> None:
    module = base()
    made = Builder(module.entry)
    values = [vector(made, 2), vector(made, 3)]
    one = counted(made, 1, values, first)
    all_elements(made, [one])
    before = result(module)
    inline_single_trip(one)
    assert not any(i.opcode == "while" for i in made.computation.instructions)
    assert same(result(module), before)


def test_a_loop_of_one_iteration_may_swap_its_elements() -> None:
    """Results are then initial values, and one loop's results are another one's initial values."""
    module = base()
    made = Builder(module.entry)
    loops, values = [], [vector(made, 2), vector(made, 3)]
    for _ in range(2):
        one = counted(made, 1, values)
        root = one.called[0].root
        root.operands = [root.operands[0], root.operands[2], root.operands[1]]
        loops.append(one)
        values = [made.element(one, 1), made.element(one, 2)]
    all_elements(made, loops)
    before = result(module)
    for one in loops:
        inline_single_trip(one)
    assert same(result(module), before)


@pytest.mark.parametrize("trips", [0, 2])
def test_other_loops_are_not_replaced(trips: int) -> None:
    module = base()
    made = Builder(module.entry)
    one = counted(made, trips, [vector(made, 2)])
    all_elements(made, [one])
    with pytest.raises(PassRefusal, match="not proved to run once"):
        inline_single_trip(one)
