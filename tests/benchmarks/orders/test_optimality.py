"""The long search, with which orders of layer bodies are compared, and the table."""

import pytest

from dhelix.benchmarks.orders.optimality import Row, long_search, table
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.order_rules import Limits
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Done, Op, Start, build

STRANDS = [
    *(Op("f1", 1e-3, ("p",)), Start("fg", 4e-3, "f1"), Done("fg"), Op("f2", 4e-3, ("fg_done",))),
    *(Op("b1", 4e-3, ("p",)), Start("bg", 4e-3, "b1"), Done("bg"), Op("b2", 1e-3, ("bg_done",))),
]


def test_the_longer_search_finds_something_faster() -> None:
    """A second search finds the same order, because its random numbers are always the same."""
    module, given = build(STRANDS, ["f2", "b2"])
    costs = Costs(H200_NO_P2P)
    costs.update(given)
    sequence = module.schedule[module.entry]
    limits = Limits(H200_NO_P2P, 10**9, Memory(module))
    found = long_search(module.entry, sequence, costs, limits, 200)
    verify_sequence(module.entry, found)
    assert evaluate(found, costs).seconds < 0.95 * evaluate(sequence, costs).seconds
    assert long_search(module.entry, sequence, costs, limits, 200) == found


def test_gaps_are_shares_of_an_order_s_time() -> None:
    row = Row("tiny", "nvlink", "default", 9.0, 4.0, 12.0, 11.0, 10.0, 10.0, 9.6, 9.5, False, 0.1)
    assert (row.gap, row.best_gap) == pytest.approx((0.05, 0.1 / 9.6))
    assert "| tiny | nvlink, default | 9 / 4 | 12 | 11 | 10 | 10 | 10 | 10 | 5.0% | 1.0% |" in table([row])
