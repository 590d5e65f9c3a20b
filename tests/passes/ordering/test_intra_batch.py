"""Intra-batch ordering: the search of strand pairing without strands."""

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.intra_batch import IntraBatch
from dhelix.passes.ordering.strand_pairing import ORDERED_NOTE
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.two_strands import PRODUCTS


def test_all_operators_are_one_strand() -> None:
    after, report = PassManager([IntraBatch(H200_NO_P2P, memory_slack=1.0)], strict=True).run(
        Stage.POST_SCHEDULER, HloModule.from_text(PRODUCTS).to_bytes()
    )
    assert after is not None and report.passes[0].outcome == CHANGED
    assert ORDERED_NOTE in [n.message for n in report.passes[0].notes]
