"""A baseline order in which operators of two strands take turns."""

from hypothesis import given, settings

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.simulation.round_robin import RoundRobin, round_robin
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Program, build, runs_rightly
from dhelix.tests.passes.two_strands import BOTH, FORWARD, PRODUCTS, limits_of, two_strands


def test_operators_take_turns() -> None:
    module, costs = build(BOTH, ["f2", "b2"])
    order = round_robin(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    heads = [i.name for i in order if i.name in ("f1", "fg", "f2", "b1", "bg", "b2")]
    assert heads == ["f1", "b1", "fg", "bg", "f2", "b2"]


def test_one_strand_keeps_its_order() -> None:
    module, costs = build(FORWARD, ["f2"])
    sequence = module.schedule[module.entry]
    assert round_robin(module.entry, sequence, costs, limits_of(module)) == sequence


@settings(deadline=None, max_examples=40)
@given(two_strands())
def test_turns_are_legal(drawn: tuple[Program, list[str]]) -> None:
    program, results = drawn
    module, costs = build(program, results)
    order = round_robin(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    verify_sequence(module.entry, order)
    assert runs_rightly(program, order)


def test_a_baseline_is_applied_although_it_is_slower() -> None:
    """Strand pairing finds the best order. Taking turns makes it slower again."""
    source = HloModule.from_text(PRODUCTS).to_bytes()
    best, _ = PassManager([StrandPairing(H200_NO_P2P, memory_slack=1.0)], strict=True).run(Stage.POST_SCHEDULER, source)
    assert best is not None
    after, report = PassManager([RoundRobin(H200_NO_P2P, memory_slack=1.0)], strict=True).run(
        Stage.POST_SCHEDULER, best
    )
    facts = next(n.facts for n in report.passes[0].notes if "seconds_after" in n.facts)
    assert after is not None and facts["seconds_after"] >= facts["seconds_before"]


def test_memory_comes_first() -> None:
    source = HloModule.from_text(PRODUCTS).to_bytes()
    after, report = PassManager([RoundRobin(H200_NO_P2P, memory_limit=1)]).run(Stage.POST_SCHEDULER, source)
    assert after is None and "the smallest needs" in str(report.passes[0])
