"""What overlap costs, from equal executions that ran alone."""

import random

import pytest

from dhelix.runtime.profiling.traces import disturbance
from dhelix.runtime.profiling.traces.executions import Execution


def run(start: float, seconds: float, shared: float = 0.0) -> Execution:
    return Execution("dot", start, start + seconds, shared)


def test_the_median_of_what_ran_alone_is_the_time() -> None:
    samples = [("dot", run(0, 1.0)), ("dot", run(2, 1.1)), ("dot", run(4, 5.0)), ("dot", run(9, 9.0, shared=4.0))]
    assert disturbance.alone(samples) == {"dot": pytest.approx(1.1)}
    assert disturbance.alone(samples[:2]) == {}


def test_loss_and_how_much_of_it_is_known() -> None:
    executions = [("dot", run(0, 1.5)), ("dot", run(2, 1.0)), ("new", run(4, 1.0)), ("dot", run(6, 1.0))]
    found = disturbance.slow_down(executions, [(0.5, 1.0), (4.0, 4.5), (6.98, 8.0)], {"dot": 1.0})
    assert found.seconds == pytest.approx(0.5)
    assert (found.overlapping, found.known) == (pytest.approx(2.5), pytest.approx(1.5))
    assert found.known_share == pytest.approx(0.6)


def test_nothing_overlaps() -> None:
    found = disturbance.slow_down([("dot", run(0, 1.0))], [(1.0, 2.0)], {})
    assert (found.seconds, found.known_share) == (0.0, 1.0)


def test_equal_to_looking_at_every_pair() -> None:
    rng = random.Random(0)
    executions = [(rng.choice("ab"), run(rng.uniform(0, 100), rng.uniform(0.1, 5))) for _ in range(200)]
    edges = sorted(rng.uniform(0, 100) for _ in range(60))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    lost = sum(
        e.seconds - 1.0
        for kind, e in executions
        if kind == "a" and sum(max(0.0, min(e.end, b) - max(e.start, a)) for a, b in spans) > 0.05 * e.seconds
    )
    assert disturbance.slow_down(executions, spans, {"a": 1.0}).seconds == pytest.approx(lost)
