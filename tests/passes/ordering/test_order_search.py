"""Orders of a body: the search and the evaluator agree on the time, and moves keep orders legal."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.order_rules import Limits, few_in_flight, starts_behind_ends
from dhelix.passes.ordering.order_search import OrderSearch
from dhelix.passes.ordering.order_timing import OrderTiming
from dhelix.passes.ordering.strand_pairing import plan_body
from dhelix.passes.ordering.strand_sequences import find_strands
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, programs, runs_rightly


def search_of(module: HloModule, costs: dict[Instruction, Cost], most: int | None = None, slack: float = 1.0):
    memory, entry = Memory(module), module.entry
    sequence = module.schedule[entry]
    limits = Limits(H200_NO_P2P, int(memory.peak(entry, sequence) * (1.0 + slack)), memory, max_in_flight=most)
    return OrderSearch(find_strands(entry, sequence, costs, limits, 1), costs, limits)


@settings(deadline=None, max_examples=60)
@given(programs(), st.sampled_from([None, 1, 2]), st.randoms(use_true_random=False))
def test_what_an_order_takes(drawn: tuple[Program, list[str]], most: int | None, draw) -> None:
    """After random moves of operators and waits, orders stay legal, correct with shared buffers, and exactly timed."""
    program, results = drawn
    module, costs = build(program, results)
    search = search_of(module, costs, most)
    timing = OrderTiming(search.body, search.states, search.timed, search.parts)
    order = (*search.numbers, *search.waits)
    for _ in range(6):
        order = search._moved(order, draw.choice(order), draw) if order else order
        sequence = search.sequence(order)
        verify_sequence(module.entry, sequence)
        assert runs_rightly(program, sequence)
        seconds = simulate(module.entry, sequence, costs, H200_NO_P2P).seconds
        assert search.seconds(order) == seconds
        assert timing.seconds(order) == pytest.approx(seconds, rel=1e-12)
        assert timing.seconds(order, stop=0.999 * seconds) == float("inf") or not seconds


def test_what_was_played_once_is_looked_up() -> None:
    """After one operator moves, only the operators behind it are evaluated again, until the same ones are in flight."""
    chain = [Op(f"x{n}", 1.0, (f"x{n - 1}" if n else "p",)) for n in range(30)]
    module, costs = build([*chain, Op("y", 1.0, ("p",))], ["x29", "y"])
    search = search_of(module, costs)
    timing = OrderTiming(search.body, search.states, search.timed, search.parts)
    *rest, last = search.numbers
    timing.seconds((*rest, last))
    work = timing.work
    assert timing.seconds((*rest[:15], last, *rest[15:])) == timing.seconds((*rest, last))
    assert timing.work <= work + 3


def test_compute_may_wait_for_a_collective() -> None:
    """Next to the gather, x has a quarter of its speed. Waiting for the gather is faster, but not required."""
    module, costs = build([Start("g", 1.0, "p"), Op("x", 3.0, ("p",)), Done("g")], ["x", "g_done"])
    slow = dataclasses.replace(H200_NO_P2P, compute_rate=0.25, communication_rate=0.25)
    memory = Memory(module)
    limits = Limits(slow, memory.peak(module.entry, module.schedule[module.entry]), memory)
    plan = plan_body(module.entry, module.schedule[module.entry], costs, limits)
    assert plan.seconds == 4.0


def test_compute_waits_for_collectives_and_for_no_copy_that_counts_as_compute() -> None:
    program = [Start("g", 1.0, "p"), Start("copy", 1.0, "p", lane=Lane.COMPUTE), Op("x", 1.0, ("p",))]
    module, costs = build([*program, Done("g"), Done("copy")], ["x", "g_done", "copy_done"])
    search = search_of(module, costs)
    assert [search.body.heads[pair].name for pair in search.waits.values()] == ["g"]


def test_what_travels_with_a_collective_runs_beneath_the_next() -> None:
    """The readers of the first gather are too short to be operators. They need not wait for the second gather."""
    light = [Op(f"x{n}", 1e-5, (f"x{n - 1}" if n else "slice", "g0_done")) for n in range(20)]
    gathers = [Start("g0", 4e-3, "p"), Start("g1", 4e-3, "p"), Op("slice", 1e-5, ("p",)), Op("y", 1e-3, ("p",))]
    module, costs = build([*gathers, Done("g0"), Done("g1"), *light], ["x19", "y", "g1_done"])
    alike = dataclasses.replace(H200_NO_P2P, compute_rate=1.0, communication_rate=1.0)
    memory = Memory(module)
    limits = Limits(alike, 2 * memory.peak(module.entry, module.schedule[module.entry]), memory)
    plan = plan_body(module.entry, module.schedule[module.entry], costs, limits)
    assert plan.seconds_paired == pytest.approx(8e-3)
    assert plan.seconds_xla == pytest.approx(8.2e-3)


GATHERS = [
    *(Start(f"g{n}", 1.0, "p", size=50) for n in range(4)),
    Op("x", 6.0, ("p",)),
    *(Done(f"g{n}") for n in range(4)),
    Op("y", 1.0, tuple(f"g{n}_done" for n in range(4))),
]


def in_flight(order: list[Instruction]) -> int:
    """The largest number of starts in flight."""
    flying, most = set(), 0
    for instruction in order:
        if is_start(instruction):
            flying.add(instruction)
        elif is_done(instruction):
            flying.remove(start_of(instruction))
        most = max(most, len(flying))
    return most


def test_no_more_in_flight_than_allowed() -> None:
    for most in (1, 2, 3, None):
        module, costs = build(GATHERS, ["y", "x"])
        search = search_of(module, costs, most)
        plan = plan_body(module.entry, module.schedule[module.entry], costs, search.limits)
        assert in_flight(list(plan.order)) <= (most or 4)
        verify_sequence(module.entry, list(plan.order))


def test_an_end_that_waits_for_the_next_start_stays() -> None:
    module, costs = build(GATHERS[:2] + GATHERS[4:6] + [Done("g1")], ["x", "g0_done", "g1_done"])
    order = module.schedule[module.entry]
    by_name = {i.name: i for i in order}
    before = {i: list(i.operands) for i in order}
    assert in_flight(few_in_flight(order, before, costs, 1)) == 1
    before[by_name["g0_done"]].append(by_name["g1"])
    assert few_in_flight(order, before, costs, 1) == order


def test_collectives_keep_their_order_where_xla_makes_one_synchronous() -> None:
    """XLA runs a pair with nothing between start and done at the done's place, after collectives started in between."""
    module, costs = build(GATHERS, ["y", "x"])
    by_name = {i.name: i for i in module.schedule[module.entry]}
    before = {i: list(i.operands) for i in by_name.values()}

    def kept(names: str) -> str:
        order = starts_behind_ends([by_name[n] for n in names.split()], before, costs)
        return " ".join(i.name for i in order)

    assert kept("p g0 g1 g0_done x g1_done") == "p g0 g0_done g1 x g1_done"
    assert kept("p g0 g1 g2 g1_done g0_done x g2_done") == "p g0 g1 g1_done g0_done g2 x g2_done"
    for unchanged in ("p g0 x g1 g0_done g1_done", "p g0 g1 x g0_done g1_done", "p g0 g0_done g1 g1_done x"):
        assert kept(unchanged) == unchanged


def test_ends_move_up_where_memory_is_short() -> None:
    """A late end of the gather keeps the gather's operand live while `wide` is made."""
    program = [
        Op("big", 1.0, ("p",), size=1000),
        Start("g", 2.0, "big"),
        Op("x", 4.0, ("p",)),
        Done("g"),
        Op("wide", 4.0, ("x",), size=1000),
        Op("y", 1.0, ("wide", "g_done")),
    ]
    module, costs = build(program, ["y"])
    for slack, late in ((1.0, True), (0.0, False)):
        search = search_of(module, costs, slack=slack)
        names = [i.name for i in search.sequence(search.numbers)]
        assert (names.index("g_done") > names.index("wide")) == late
        assert search.fits(tuple(search.numbers))
