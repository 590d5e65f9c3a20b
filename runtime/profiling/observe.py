"""Runs a train step under the profiler, to see what its operators cost where they belong.

    step = observe(lowered, (state, batch), gpus_per_node=4)      # a session.Step: compiled module, times alone

The step is compiled twice: as it will run, which says what there is to measure, and without XLA's latency-hiding
scheduler, which is traced. Arguments are not used up: what the step donates is copied first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from dhelix.passes.manager import say_once
from dhelix.passes.operator_keys import key_of
from dhelix.runtime import trace
from dhelix.runtime.lowering import compiled_module
from dhelix.runtime.profiling import executions, measure, step_trace
from dhelix.runtime.profiling.session import Step

NO_GRAPHS: Mapping[str, str] = {"xla_gpu_enable_command_buffer": ""}
"""Kernels of a CUDA graph do not say which instruction they belong to."""
_TRACED_STEPS = 2


def observe(
    lowered: jax.stages.Lowered,
    arguments: tuple[Any, ...],
    gpus_per_node: int = 8,
    implementation: str = "nccl",
    options: Mapping[str, Any] | None = None,
) -> Step:
    """The step as `session.Session` wants it.

    Args:
      lowered: the train step, lowered for `arguments`.
      gpus_per_node, implementation: see `operator_keys.key_of`.
      options: XLA options of the step itself.
    """
    module = compiled_module(lowered.compile(dict(options or {})))
    try:
        serial = lowered.compile({**(options or {}), **NO_GRAPHS, **step_trace.UNSCHEDULED})
        serial_module = compiled_module(serial)
        _run(serial, arguments)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=measure.quiet()):
                for _ in range(_TRACED_STEPS):
                    _run(serial, arguments)
            found = executions.of_trace(trace.load(folder), serial_module.name)
    except jax.errors.JaxRuntimeError as error:
        why = measure.reason(error)
        say_once(f"the step itself was not traced ({why}); its operators are run alone", ("observe", why))
        return Step(module)
    of_key = partial(key_of, gpus_per_node=gpus_per_node, implementation=implementation)
    traced, gap = step_trace.timings(list(found.values()), serial_module, of_key)
    return Step(module, traced=traced, gap_seconds=gap)


def _run(compiled: jax.stages.Compiled, arguments: tuple[Any, ...]) -> None:
    """Once, on copies of the arguments, since the step may donate them."""
    jax.block_until_ready(compiled(*jax.tree.map(_copy, arguments)))


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf
