"""Reads from the profiler trace of a real step how long its operators take.

The step should be compiled without XLA's latency-hiding scheduler (`UNSCHEDULED`). Then its collectives run alone. So
nearly every execution in the trace is undisturbed, and still runs with the caches and clock rates of a real step.

    timings, gap = step_trace.timings(list(executions.record(run, module.name).values()), module, key_of)
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.keys import CollectiveKey, Key
from dhelix.profiles.profile import Timing
from dhelix.runtime.profiling.traces.executions import Execution, gap_seconds

UNSCHEDULED: Mapping[str, bool] = MappingProxyType({"xla_gpu_enable_latency_hiding_scheduler": False})
"""XLA options of a step in whose trace operators and collectives do not overlap."""
ENOUGH = 3
"""Smallest number of undisturbed executions that give a time. An operator with fewer is measured outside the step."""


def instruction_keys(module: HloModule, key_of: Callable[[Instruction], Key | None]) -> dict[str, Key]:
    """Maps names of instructions in a trace to the keys of the instructions in profiles.

    `key_of` returns the key of an instruction, or None. The map contains the names of all instructions that have a key.
    In a trace, an async start may have the name of the instruction that it wraps, so the map contains that name, too.
    """
    keys = {}
    for computation in module.schedule:
        for instruction in computation.instructions:
            key = key_of(instruction)
            if key is not None:
                inner = instruction.called[0].root.name if instruction.opcode == "async-start" else instruction.name
                keys[instruction.name] = keys[inner] = key
    return keys


def timings(
    gpus: Sequence[Sequence[Execution]], module: HloModule, key_of: Callable[[Instruction], Key | None]
) -> tuple[dict[Key, Timing], float]:
    """Returns the time of each key from its undisturbed executions, and the median idle time between two kernels.

    A key with fewer than ENOUGH undisturbed executions has no time.

    Args:
      gpus: executions by GPU, see `executions.of_trace`.
      module: the compiled module that was traced.
      key_of: see `instruction_keys`.
    """
    keys = instruction_keys(module, key_of)
    samples: dict[Key, list[float]] = defaultdict(list)
    for name, of_gpus in sorted(_by_instruction(gpus).items()):
        key = keys.get(name)
        if key is not None:
            samples[key] += _samples(of_gpus, isinstance(key, CollectiveKey))
    found = {key: Timing.of(seconds, "trace") for key, seconds in samples.items() if len(seconds) >= ENOUGH}
    return found, statistics.median(gap_seconds(list(of_gpu)) for of_gpu in gpus)


def _by_instruction(gpus: Sequence[Sequence[Execution]]) -> dict[str, list[list[Execution]]]:
    """The executions of each instruction, by its name, as one list for each GPU."""
    found: dict[str, list[list[Execution]]] = {}
    for number, of_gpu in enumerate(gpus):
        for execution in of_gpu:
            found.setdefault(execution.name, [[] for _ in gpus])[number].append(execution)
    return found


def _samples(of_gpus: list[list[Execution]], collective: bool) -> list[float]:
    """Seconds of the undisturbed executions of one instruction.

    Of each execution of a collective, only the time of the GPU that arrived last counts, because other GPUs waited.
    """
    if not collective:
        return [e.seconds for of_gpu in of_gpus for e in of_gpu if e.undisturbed]
    together = zip(*of_gpus, strict=False)
    last = (min(of_each, key=lambda e: e.seconds) for of_each in together)
    return [e.seconds for e in last if e.undisturbed]
