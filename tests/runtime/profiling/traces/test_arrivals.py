"""Who arrives last at collectives, and how far clocks are apart."""

import pytest

from dhelix.runtime.profiling.traces import arrivals
from dhelix.runtime.profiling.traces.executions import Execution


def run(start: float, end: float) -> Execution:
    return Execution("all-reduce.1", start, end)


def test_a_group_waits_for_its_last_gpu() -> None:
    (found,) = arrivals.group_runs({0: [run(0, 10)], 1: [run(6, 10)], 2: [run(4, 11)]}, [(0, 1, 2)])
    assert found.waits == {0: 6, 1: 0, 2: 2}
    assert found.delays == {0: 0, 1: 4, 2: 0}  # from 4 to 6, both others waited for GPU 1 alone
    assert (found.transfer, found.skew) == (5, 6)
    assert found.last == (run(6, 10),)


def test_groups_that_cannot_be_compared_are_left_out() -> None:
    found = {0: [run(0, 1)], 1: [run(0, 1), run(2, 3)], 2: [run(0, 1)], 3: [run(0, 2)]}
    assert [group.gpus for group in arrivals.group_runs(found, [(0, 1), (0, 7), (3,), (2, 3)])] == [(2, 3)]


def test_pairs_of_a_permute_are_one_group() -> None:
    assert arrivals.connected([(0, 1), (4, 5), (1, 2), (2, 0), (5, 4)]) == [(0, 1, 2), (4, 5)]


def test_clocks_of_hosts_that_share_no_collective_with_the_first() -> None:
    hosts = {0: "a", 1: "b", 2: "c", 3: "d"}
    first = ({0: [run(0, 10), run(20, 30)], 1: [run(100, 110), run(120, 130.5)]}, [(0, 1), (2, 3)])
    second = ({1: [run(200, 210)], 2: [run(195, 205)]}, [(1, 2)])
    offsets = arrivals.clock_offsets(hosts, [first, second])
    assert offsets == {"a": 0.0, "b": pytest.approx(100.25), "c": pytest.approx(95.25)}  # nothing aligns d
