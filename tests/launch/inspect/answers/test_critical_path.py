"""What decides the length of a step."""

import pytest

from dhelix.launch.inspect.answers.critical_path import PAUSE, critical_path
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Interval, Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.hlo import HloModule
from dhelix.profiles.hardware import ALL


def timeline(*intervals: Interval) -> Timeline:
    return Timeline(max(i.end for i in intervals), 0.0, 0.0, 0.0, 0.0, intervals, ())


def on(name: str, start: float, end: float, lane: Lane = Lane.COMPUTE) -> Interval:
    return Interval(name, lane, start, end)


def path(found: Timeline, pause: float = 0.0) -> dict[str, float]:
    return {one.instruction: one.ms for one in critical_path(found, pause)}


def test_through_a_collective_that_compute_waits_for() -> None:
    found = timeline(on("a", 0, 2), on("b", 2, 4), on("gather", 2, 7, Lane.COMM), on("c", 7, 9))
    assert path(found) == {"gather": 5e3, "a": 2e3, "c": 2e3}


def test_not_through_one_that_is_hidden() -> None:
    found = timeline(on("a", 0, 2), on("gather", 1, 3, Lane.COMM), on("b", 2, 5))
    assert path(found) == {"b": 3e3, "a": 2e3}


def test_a_collective_that_ends_in_a_usual_pause_is_not_waited_for() -> None:
    kernels = [on(f"k{n}", n, n + 0.9) for n in range(5)]
    found = path(timeline(*kernels, on("gather", 1.5, 2.95, Lane.COMM)), pause=0.1)
    assert "gather" not in found
    assert found[PAUSE] == pytest.approx(400)


def test_a_chain_of_collectives() -> None:
    found = timeline(on("a", 0, 1), on("g1", 1, 4, Lane.COMM), on("g2", 4, 6, Lane.COMM), on("b", 1, 2), on("c", 6, 7))
    assert path(found) == {"g1": 3e3, "g2": 2e3, "a": 1e3, "c": 1e3}


def test_loops_count_as_often_as_they_run() -> None:
    body = timeline(on("x", 0, 1), on("gather", 0, 3, Lane.COMM), on("y", 3, 4))
    loop = Interval("while", Lane.COMPUTE, 1, 41, body, 10)
    found = critical_path(timeline(on("a", 0, 1), loop), 0.0)
    assert {one.instruction: (one.ms, one.executions) for one in found} == {
        "gather": (pytest.approx(30e3), 10),
        "y": (pytest.approx(10e3), 10),
        "a": (pytest.approx(1e3), 1),
    }


def test_it_is_as_long_as_the_step() -> None:
    gather = "all-gather-start(dot), dimensions={0}, replica_groups={{0,1}}"
    body = f"""
  x = f32[4096,4096] parameter(0)
  dot = f32[4096,4096] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  start = (f32[4096,4096], f32[8192,4096]) {gather}
  dot.2 = f32[4096,4096] dot(x, dot), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  done = f32[8192,4096] all-gather-done(start)
  ROOT out = (f32[8192,4096], f32[4096,4096]) tuple(done, dot.2)"""
    module = HloModule.from_text(f"HloModule m, is_scheduled=true, num_partitions=2\n\nENTRY main {{{body}\n}}\n")
    hardware = ALL["H200"]
    played = simulate_module(module, hardware, Costs(hardware))
    assert sum(one.ms for one in critical_path(played, 0.0)) == pytest.approx(1e3 * played.seconds)
