"""Runs a train step under the profiler, to measure how long its operators take within the step.

    step = compiled_step(lowered)                                      # a session.Step: the operators to measure
    step = observe(step, lowered, make_arguments, gpus_per_node=4)     # adds times from a trace

The step is compiled twice: as it will run, and without XLA's latency-hiding scheduler. The profiler traces runs of the
second program. Each run gets arguments of its own, because a step may donate them. So the memory holds one state at a
time. All processes of a job call `observe` together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.framework.manager import say_once
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.profiling import measure
from dhelix.runtime.profiling.session import Step
from dhelix.runtime.profiling.traces import executions, step_trace

_TRACED_STEPS = 2


def compiled_step(lowered: jax.stages.Lowered) -> Step:
    """Compiles the step as it will run. Returns a `Step`, whose operators `session` measures."""
    return Step(compiled_module(lowered.compile()))


def observe(
    step: Step,
    lowered: jax.stages.Lowered,
    make_arguments: Callable[[], tuple[Any, ...]],
    gpus_per_node: int = 8,
    implementation: str = "nccl",
    options: Mapping[str, Any] | None = None,
) -> Step:
    """Returns `step` with times from a trace in which operators run alone.

    If the step cannot be traced, the function returns `step` unchanged and logs the reason.

    Args:
      step: the step as compiled.
      lowered: the lowered step that `step` was compiled from.
      make_arguments: makes the arguments of one run.
      gpus_per_node, implementation: see `operator_keys.key_of`.
      options: XLA options of the step itself.
    """
    try:
        # NO_GRAPHS: in a trace, kernels of a CUDA graph do not name their instruction.
        changed = {**(options or {}), **NO_GRAPHS, **step_trace.UNSCHEDULED}
        serial = agreement.together(
            "compile the step to trace", lambda: lowered.compile(changed), measure.COMPILER_ERRORS
        )
        module = compiled_module(serial)
        _run(serial, make_arguments)
        found = executions.record_everywhere(
            lambda: [_run(serial, make_arguments) for _ in range(_TRACED_STEPS)], module.name
        )
    except (DhelixError, *measure.COMPILER_ERRORS) as error:
        why = measure.reason(error)
        say_once(f"the step itself was not traced ({why}), so its operators run alone", ("observe", why))
        return step
    of_key = partial(key_of, gpus_per_node=gpus_per_node, implementation=implementation)
    traced, gap = step_trace.timings(found, module, of_key)
    return replace(step, traced=traced, gap_seconds=gap)


def _run(compiled: jax.stages.Compiled, make_arguments: Callable[[], tuple[Any, ...]]) -> None:
    arguments = agreement.together("make the arguments of the step", make_arguments, measure.COMPILER_ERRORS)
    jax.block_until_ready(compiled(*arguments))
