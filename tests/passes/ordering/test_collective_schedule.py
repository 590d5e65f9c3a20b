"""List scheduling of collectives: golden HLO, and properties of the result for random programs."""

import time

import pytest
from hypothesis import assume, given

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done, start_of
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, PassReport
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule, Limits, list_order
from dhelix.profiles.hardware import H200, H200_NO_P2P
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section, Timing
from dhelix.tests.machine import slowness
from dhelix.tests.passes import golden
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, programs, runs_rightly

FILES = golden.files("collective_schedule")
REORDERED = {"gather_under_product", "shared_buffer"}


def run(source: bytes, one: CollectiveSchedule) -> tuple[bytes | None, PassReport]:
    after, report = PassManager([one], strict=True).run(Stage.POST_SCHEDULER, source)
    return after, report.passes[0]


@pytest.mark.parametrize("name", FILES)
def test_golden(name: str) -> None:
    before = HloModule.from_text(golden.read(name)).to_bytes()
    after, report = run(before, CollectiveSchedule())
    golden.filecheck(golden.printed(HloModule.from_bytes(after or before)), name)
    stem = name.rpartition("/")[2].removesuffix(".hlo")
    assert (after is not None) == (report.outcome == CHANGED) == (stem in REORDERED)


def test_memory_limit_with_room() -> None:
    name = "collective_schedule/memory_limit.hlo"
    before = HloModule.from_text(golden.read(name)).to_bytes()
    after, _ = run(before, CollectiveSchedule(memory_limit=2**30))
    assert after is not None
    golden.filecheck(golden.printed(HloModule.from_bytes(after)), name, prefix="ROOMY")


def test_standing_down_is_said() -> None:
    name = "collective_schedule/nothing_to_gain.hlo"
    _, report = run(HloModule.from_text(golden.read(name)).to_bytes(), CollectiveSchedule())
    assert report.outcome == UNCHANGED
    assert [n.message for n in report.notes] == ["XLA's order kept: no order is predicted to be faster"]
    assert report.notes[0].facts["exposed_before"] > 0.0


def test_a_gain_below_the_threshold_is_not_taken() -> None:
    name = "collective_schedule/gather_under_product.hlo"
    before = HloModule.from_text(golden.read(name)).to_bytes()
    assert run(before, CollectiveSchedule(min_gain=0.5))[0] is None  # min_gain is relative to what overlap could save
    assert run(before, CollectiveSchedule(H200_NO_P2P))[0] is not None


def test_measured_pairs_decide() -> None:
    """A gather that runs well under the product moves there; a gather that stops the product stays."""
    before = HloModule.from_text(golden.read("collective_schedule/gather_under_product.hlo"))
    by_name = {i.name: i for i in before.entry.instructions}
    gather, product = key_of(by_name["start"]), key_of(by_name["x"])
    assert isinstance(gather, CollectiveKey) and isinstance(product, OperatorKey)

    def changes(pair: PairTiming) -> bool:
        pairs = {PairKey(gather, product): pair}
        section = Section("default", {product: Timing(1e-3)}, {gather: Timing(1e-3)}, pairs)
        model = CostModel(Profile("H200", "nvlink").with_section(section))
        return run(before.to_bytes(), CollectiveSchedule(model=model))[0] is not None

    assert changes(PairTiming(1.2e-3, 1.2e-3, 1.2e-3, 1e-3, 1e-3))
    assert not changes(PairTiming(2e-3, 1e-3, 2e-3, 1e-3, 1e-3))


def test_an_unscheduled_module_is_left_alone() -> None:
    text = golden.read("collective_schedule/gather_under_product.hlo").replace(", is_scheduled=true", "")
    assert run(HloModule.from_text(text).to_bytes(), CollectiveSchedule())[0] is None


def names(order: list) -> list[str]:
    return [i.name for i in order if i.name not in ("p", "result")]


def schedule(program: Program, results: list[str], limit: int | None = None) -> list:
    module, costs = build(program, results)
    memory = Memory(module)
    sequence = module.schedule[module.entry]
    allowed = memory.peak(module.entry, sequence) if limit is None else limit
    return list_order(module.entry, sequence, costs, Limits(H200_NO_P2P, allowed, memory))


def test_what_the_next_collective_needs_goes_first() -> None:
    """`b` depends on nothing; `a` feeds the collective that the long `rest` waits for."""
    program = [
        Op("b", 4.0, ("p",)),
        Op("a", 1.0, ("p",)),
        Start("g", 4.0, "a"),
        Done("g"),
        Op("rest", 4.0, ("g_done", "b")),
    ]
    assert names(schedule(program, ["rest"])) == ["a", "g", "b", "g_done", "rest"]


def test_a_write_in_place_stays_behind_a_collective_that_reads() -> None:
    program = [
        Op("a", 1.0, ("p",)),
        Start("g", 4.0, "a"),
        Done("g"),
        Op("w", 4.0, ("a", "p"), in_place=True),
        Op("free", 4.0, ("p",)),
    ]
    order = names(schedule(program, ["w", "g_done", "free"], limit=100))
    assert order.index("g_done") < order.index("w")
    assert order.index("g") < order.index("free") < order.index("g_done")


@given(programs())
def test_random_programs(drawn: tuple[Program, list[str]]) -> None:
    program, results = drawn
    module, costs = build(program, results)
    old = module.schedule[module.entry]
    assert runs_rightly(program, old)
    memory = Memory(module)
    limit = memory.peak(module.entry, old)
    new = list_order(module.entry, old, costs, Limits(H200, limit, memory))
    verify_sequence(module.entry, new)
    assert runs_rightly(program, new)
    assert memory.peak(module.entry, new) <= limit
    before, after = (simulate(module.entry, s, costs, H200).seconds for s in (old, new))
    assert after < before or new == old
    assert new == list_order(module.entry, old, costs, Limits(H200, limit, memory))


@given(programs())
def test_memory_is_what_lives(drawn: tuple[Program, list[str]]) -> None:
    """A separate count: a value lives from its instruction to its last reader, and a result lives to the end."""
    program, results = drawn
    assume(not any(isinstance(s, Op) and s.in_place for s in program))
    module, _ = build(program, results)
    sizes = {s.name: s.size for s in program if not isinstance(s, Done)}
    order = [i for i in module.schedule[module.entry] if i.name not in ("p", "result")]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for n, instruction in enumerate(order):
        source = start_of(instruction) if is_done(instruction) else instruction
        for value in (source.name, *(o.name.removesuffix("_done") for o in source.operands)):
            first.setdefault(value, n)
            last[value] = n
    last.update((result.removesuffix("_done"), len(order)) for result in results)
    live = [sum(s for v, s in sizes.items() if first[v] <= n <= last[v]) for n in range(len(order))]
    assert Memory(module).peak(module.entry, module.schedule[module.entry]) == 4 * max(live)


def test_many_instructions_take_seconds() -> None:
    program: list = []
    value = "p"
    for n in range(4000):
        program += [Start(f"g{n}", 2.0, value), Op(f"x{n}", 1.0, ("p",)), Done(f"g{n}")]
        program.append(Op(f"y{n}", 1.0, (f"g{n}_done", f"x{n}")))
        value = f"y{n}"
    module, costs = build(program, [value])
    sequence = module.schedule[module.entry]
    memory = Memory(module)
    begin = time.process_time()
    list_order(module.entry, sequence, costs, Limits(H200, memory.peak(module.entry, sequence), memory))
    assert time.process_time() - begin < 10.0 * slowness()
