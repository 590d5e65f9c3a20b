"""Costs of operators from a step's trace; step and executions are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dhelix.passes.hlo import HloModule
from dhelix.profiles.keys import Key
from dhelix.profiles.profile import Timing
from dhelix.runtime.profiling.traces import step_trace
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.step_trace import ENOUGH
from dhelix.tests.runtime.profiling import small_step
from dhelix.tests.runtime.profiling.recorded_traces import execution
from dhelix.tests.runtime.profiling.small_step import key, keys

MODULE = small_step.module()


def timings(*gpus: Sequence[Execution]) -> dict[Key, Timing]:
    return step_trace.timings(gpus, MODULE, keys)[0]


def ran(name: str, *seconds: float, shared: float = 0.0) -> list[Execution]:
    """Executions one millisecond apart; `seconds` are their durations in microseconds."""
    return [execution(name, 1000 * n, 1000 * n + s, shared) for n, s in enumerate(seconds)]


def microseconds(value: float) -> Any:
    return pytest.approx(value * 1e-6)


def test_every_name_that_a_trace_may_use_leads_to_the_key() -> None:
    found = step_trace.instruction_keys(MODULE, keys)
    for name in ("gather-start", "gather.inside"):
        assert found[name] == key("gather")
    for name in ("fusion-start", "doubled.inside"):
        assert found[name] == key("doubled")
    for name in ("gemm", "moved", "scatter", "small"):
        assert found[name] == key(name)
    assert not {"x", "product", "gather-done", "result", "twice"} & set(found)


def test_bodies_of_loops_have_keys_too() -> None:
    module = HloModule.from_text("""HloModule jit_step, is_scheduled=true
    body {
      state = (s32[], f32[64]) parameter(0)
      count = s32[] get-tuple-element(state), index=0
      one = s32[] constant(1)
      next = s32[] add(count, one)
      held = f32[64] get-tuple-element(state), index=1
      moved = f32[64] copy(held)
      ROOT carried = (s32[], f32[64]) tuple(next, moved)
    }
    condition {
      state.1 = (s32[], f32[64]) parameter(0)
      count.1 = s32[] get-tuple-element(state.1), index=0
      limit = s32[] constant(4)
      ROOT goes_on = pred[] compare(count.1, limit), direction=LT
    }
    ENTRY main {
      state.2 = (s32[], f32[64]) parameter(0)
      ROOT loop = (s32[], f32[64]) while(state.2), condition=condition, body=body
    }""")
    assert {"moved", "next", "goes_on"} <= set(step_trace.instruction_keys(module, keys))


def test_the_median_of_undisturbed_executions_counts() -> None:
    found = timings([*ran("gemm", 10, 30, 20, 40), *ran("gemm", 900, shared=500)])
    assert found == {key("gemm"): Timing(microseconds(25), microseconds(15), 4, "trace")}


def test_of_computation_all_gpus_count() -> None:
    found = timings(ran("gemm", 10, 30), ran("gemm", 20, 40))
    assert (found[key("gemm")].seconds, found[key("gemm")].samples) == (microseconds(25), 4)


def test_of_a_collective_the_gpu_counts_that_came_last() -> None:
    found = timings(ran("gather.inside", 50, 20, 90), ran("gather.inside", 30, 40, 80))
    assert found == {key("gather"): Timing(microseconds(30), microseconds(30), 3, "trace")}


def test_the_last_gpu_must_be_undisturbed() -> None:
    late = [*ran("gather.inside", 30, 30), execution("gather.inside", 2000, 2030, shared=20)]
    assert timings(ran("gather.inside", 50, 50, 50), late) == {}


def test_instructions_of_one_key_share_their_executions() -> None:
    found = timings([*ran("gather-start", 10, 10), *ran("gather.inside", 10)])
    assert found[key("gather")].samples == ENOUGH


@pytest.mark.parametrize("shared", [0.0, 8.0])
def test_few_executions_are_not_enough(shared: float) -> None:
    assert timings(ran("gemm", *[10.0] * (ENOUGH - 1))) == {}
    assert timings(ran("gemm", *[10.0] * ENOUGH, shared=shared)).keys() == ({key("gemm")} if not shared else set())


def test_what_the_module_does_not_have_is_left_out() -> None:
    assert timings(ran("dot.77", 1, 2, 3, 4)) == {}
    assert timings(ran("", 1, 2, 3, 4)) == {}


def test_a_gpu_that_ran_less_is_no_error() -> None:
    found = timings(ran("gather.inside", 10, 10, 10, 10), ran("gather.inside", 20, 20, 20), ran("gemm", 5))
    assert found == {}  # it is unknown which GPU came last
    found = timings(ran("gemm", 10, 10), ran("gemm", 10), ran("moved", 5))
    assert set(found) == {key("gemm")}


def test_gap_is_the_middle_gpus() -> None:
    gpus = [[execution("gemm", 0, 10), execution("moved", 10 + gap, 20 + gap)] for gap in (1.0, 8.0, 2.0)]
    assert step_trace.timings(gpus, MODULE, keys)[1] == pytest.approx(2e-6)
