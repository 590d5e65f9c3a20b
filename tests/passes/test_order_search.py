"""Orders of a body: what the search says one takes is what the evaluator says, and moves keep what must hold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.passes.buffers import Memory
from dhelix.passes.collectives import is_done, is_start, start_of
from dhelix.passes.costs import Cost
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.order_search import OrderSearch
from dhelix.passes.orders import Limits, few_in_flight
from dhelix.passes.strand_pairing import plan_body
from dhelix.passes.strand_sequences import find_strands
from dhelix.passes.timeline import simulate
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
    """After random legal moves: legal, right where buffers are shared, and timed as the evaluator does."""
    program, results = drawn
    module, costs = build(program, results)
    search = search_of(module, costs, most)
    order = tuple(search.numbers)
    for _ in range(4):
        moves = [moved for number in order for moved in search._moved(order, number)]
        order = draw.choice(moves) if moves else order
    sequence = search.sequence(order)
    verify_sequence(module.entry, sequence)
    assert runs_rightly(program, sequence)
    assert search.seconds(order) == simulate(module.entry, sequence, costs, H200_NO_P2P).seconds
    assert search.seconds(order, stop=0.0) == float("inf") or not any(c.seconds for c in costs.values())


GATHERS = [
    *(Start(f"g{n}", 1.0, "p", size=50) for n in range(4)),
    Op("x", 6.0, ("p",)),
    *(Done(f"g{n}") for n in range(4)),
    Op("y", 1.0, tuple(f"g{n}_done" for n in range(4))),
]


def in_flight(order: list[Instruction]) -> int:
    """The most starts without their dones."""
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


def test_ends_move_up_where_memory_is_short() -> None:
    """Late, the end of the gather keeps its operand alive beside what comes meanwhile."""
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
