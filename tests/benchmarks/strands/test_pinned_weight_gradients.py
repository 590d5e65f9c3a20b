"""Weight gradients that no order may move."""

import pytest

from dhelix.benchmarks.strands.pinned_weight_gradients import PinnedWeightGradients
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes import strand_module
from dhelix.tests.passes.schedules import build
from dhelix.tests.passes.two_strands import FORWARD

PAIRING = StrandPairing(H200_NO_P2P, memory_slack=1.0)


def ordered(text: str, *passes: object) -> HloModule:
    after, _ = PassManager(passes, strict=True).run(Stage.POST_SCHEDULER, HloModule.from_text(text).to_bytes())  # type: ignore[arg-type]
    assert after is not None
    module = HloModule.from_bytes(after)
    verify_sequence(module.entry, module.schedule[module.entry])
    return module


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_gradient_runs_where_it_becomes_ready(turned: bool) -> None:
    """It comes last in XLA's order, and the next computing operator of its strand waits for it."""
    text, a = strand_module.text(turned), "a" if turned else "alpha"
    for passes in ((PinnedWeightGradients(H200_NO_P2P),), (PinnedWeightGradients(H200_NO_P2P), PAIRING)):
        module = ordered(text, *passes)
        names = [i.name for i in module.schedule[module.entry]]
        assert names.index(f"{a}_x") < names.index(f"{a}_w") < names.index(f"{a}_y")
        waiting = next(i for i in module.entry.instructions if i.name == f"{a}_y")
        assert [i.name for i in waiting.control_predecessors] == [f"{a}_w"]


def test_one_strand_keeps_its_order() -> None:
    module, _ = build(FORWARD, ["f2"])
    after, _ = PassManager([PinnedWeightGradients(H200_NO_P2P)]).run(Stage.POST_SCHEDULER, module.to_bytes())
    assert after is None
