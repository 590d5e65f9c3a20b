"""Executions by instruction, of a step whose loop runs three times, with a product, a gather and an exchange."""

import pytest

from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.module_executions import by_instruction
from dhelix.tests.runtime.profiling.recorded_traces import execution

STEP = """\
HloModule m, is_scheduled=true

wrapped {
  p = f32[8]{0} parameter(0)
  ROOT all-to-all.7 = f32[8]{0} all-to-all(p), replica_groups={{0,1}}, dimensions={0}
}

body {
  state = (s32[], f32[8]{0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[8]{0} get-tuple-element(state), index=1
  gather-start = (f32[8]{0}, f32[16]{0}) all-gather-start(x), replica_groups={{0,1}}, dimensions={0}
  product = f32[8]{0} custom-call(x), custom_call_target="product"
  exchange-start = ((f32[8]{0}), f32[8]{0}) async-start(product), calls=wrapped
  exchange-done = f32[8]{0} async-done(exchange-start)
  gather-done = f32[16]{0} all-gather-done(gather-start)
  ROOT next = (s32[], f32[8]{0}) tuple(i, exchange-done)
}

condition {
  state = (s32[], f32[8]{0}) parameter(0)
  ROOT again = pred[] constant(true)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  zero = s32[] constant(0)
  state = (s32[], f32[8]{0}) tuple(zero, x)
  loop = (s32[], f32[8]{0}) while(state), condition=condition, body=body,
    backend_config={"known_trip_count":{"n":"3"}}
  ROOT y = f32[8]{0} get-tuple-element(loop), index=1
}
"""


def times(found: list[Execution]) -> dict[str, list[tuple[float, float]]]:
    """Start and end in microseconds, by instruction."""
    runs = by_instruction(HloModule.from_text(STEP.replace(",\n    backend", ", backend")), found)
    return {i.name: [(round(1e6 * e.start, 3), round(1e6 * e.end, 3)) for e in of] for i, of in runs.items()}


def step(pieces: int, iterations: int = 3) -> list[Execution]:
    """Executions of 100 us per iteration; each gather is `pieces` events without a name."""
    found = []
    for begin in range(0, 100 * iterations, 100):
        found += [execution("", begin + 10 * n, begin + 10 * n + 8) for n in range(pieces)]
        found += [execution("product", begin, begin + 50), execution("all-to-all.7", begin + 60, begin + 90)]
    return found


def test_an_async_pair_runs_under_the_name_of_what_it_wraps() -> None:
    assert times(step(0))["exchange-start"] == [(60, 90), (160, 190), (260, 290)]


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_has_no_name_belongs_to_collectives_that_the_trace_does_not_name(pieces: int) -> None:
    end = 10 * pieces - 2
    assert times(step(pieces))["gather-start"] == [(0, end), (100, 100 + end), (200, 200 + end)]


def test_what_does_not_come_out_even_is_left_out() -> None:
    assert "gather-start" not in times([*step(1), execution("", 300, 310)])


def test_a_loop_lasts_from_its_first_execution_to_its_last() -> None:
    assert times(step(0))["loop"] == [(0, 290)]


def test_two_steps_in_a_trace_are_two_executions_of_the_loop() -> None:
    assert times(step(2, iterations=6))["loop"] == [(0, 290), (300, 590)]


def test_other_programs_are_left_out() -> None:
    assert times([execution("unknown", 0, 10)]) == {}


def test_one_kernel_that_the_trace_has_split_moves_no_loop() -> None:
    split = [execution("product", 55, 58)]
    assert times([*step(1, iterations=6), *split])["loop"] == [(0, 290), (300, 590)]
