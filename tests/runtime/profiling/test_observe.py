"""A step runs for its trace, here on CPU, and the trace gives its operators their times. The trace is a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.hlo import HloModule
from dhelix.profiles.keys import OperatorKey
from dhelix.profiles.profile import Timing
from dhelix.runtime.compiler import lowering
from dhelix.runtime.profiling import observe
from dhelix.runtime.profiling.session import Step
from dhelix.runtime.profiling.traces import executions, trace
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.tests.runtime.profiling.recorded_traces import execution


def train_step(state: jax.Array, batch: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    product = jnp.tanh(batch @ batch) * scale
    return state + product, jnp.sum(product)


@pytest.fixture
def lowered() -> jax.stages.Lowered:
    jitted = jax.jit(train_step, donate_argnums=0)
    return jitted.lower(jnp.ones((16, 16)), jnp.ones((16, 16)), 2.0)


@pytest.fixture
def step(lowered: jax.stages.Lowered) -> Step:
    return observe.compiled_step(lowered)


def arguments() -> tuple[Any, ...]:
    return jnp.ones((16, 16)), np.ones((16, 16), np.float32), 2.0


def traced(names: Callable[[HloModule], list[str]], module: HloModule) -> dict[int, list[Execution]]:
    """Four executions of each instruction, 10 us each and 1 us apart."""
    found = [name for _ in range(4) for name in names(module)]
    return {0: [execution(name, 11 * n, 11 * n + 10) for n, name in enumerate(found)]}


def operators(module: HloModule) -> list[str]:
    return [i.name for i in module.schedule[module.entry] if isinstance(key_of(i), OperatorKey)]


def test_the_step_is_as_it_is_compiled(lowered: jax.stages.Lowered, step: Step) -> None:
    assert step.module.to_bytes() == lowering.compiled_module(lowered.compile()).to_bytes()
    assert step.module.name == "jit_train_step"
    assert (step.traced, step.gap_seconds, step.further) == ({}, None, ())


def test_operators_get_their_times_out_of_the_trace(
    lowered: jax.stages.Lowered, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def of_trace(profile: trace.Profile, module_name: str, *_: Any) -> dict[int, list[Execution]]:
        asked.append(module_name)
        return traced(operators, step.module)

    monkeypatch.setattr(executions, "of_trace", of_trace)
    found = observe.observe(step, lowered, arguments)
    keys = {key_of(i) for i in step.module.schedule[step.module.entry]} - {None}
    assert asked == ["jit_train_step"]
    assert found.module is step.module
    assert set(found.traced) == keys
    assert {timing.source for timing in found.traced.values()} == {"trace"}
    assert found.traced[next(iter(found.traced))].seconds == pytest.approx(1e-5)
    assert found.gap_seconds == pytest.approx(1e-6)


def test_the_memory_holds_one_state_at_a_time(lowered: jax.stages.Lowered, step: Step) -> None:
    made: list[jax.Array] = []

    def make() -> tuple[jax.Array, ...]:
        assert all(state.is_deleted() for state in made)  # the step donates its state
        state, *others = arguments()
        made.append(state)
        return state, *others

    observe.observe(step, lowered, make)
    assert len(made) > 1


def test_the_traced_step_hides_no_communication(step: Step) -> None:
    given: list[dict[str, Any]] = []

    class Lowered:
        def compile(self, options: dict[str, Any]) -> jax.stages.Compiled:
            given.append(options)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    mine = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_autotune_level": 0}
    observe.observe(step, Lowered(), arguments, options=mine)  # type: ignore[arg-type]
    assert given == [
        {
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_latency_hiding_scheduler": False,
            "xla_gpu_enable_command_buffer": "",
        }
    ]


def test_a_step_without_kernels_in_the_trace_is_left_as_it_is(
    lowered: jax.stages.Lowered, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # logged only once
        assert observe.observe(step, lowered, arguments) is step
    (record,) = [r for r in caplog.records if "was not traced" in r.getMessage()]
    assert "the trace has no kernels of jit_train_step" in record.getMessage()
    assert "so its operators run alone" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes\nat ..."), "(out of memory)"),
        (DhelixError("no such thing"), "(no such thing)"),
    ],
)
def test_a_step_that_does_not_run_is_said(
    step: Step, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Lowered:
        def compile(self, options: dict[str, Any]) -> jax.stages.Compiled:
            raise error

    known = Step(step.module, traced={OperatorKey("copy", "contiguous", (8,)): Timing(1e-5)})
    assert observe.observe(known, Lowered(), arguments) is known  # type: ignore[arg-type]
    assert said in caplog.text
