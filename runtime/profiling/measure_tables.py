"""Runs the programs of `collective_tables` on the GPUs, and reads the times of collectives from a profiler trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from dhelix.errors import DhelixError
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Timing
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.profiling.collective_tables import TableProgram
from dhelix.runtime.profiling.measure import COMPILER_ERRORS, reason
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.profiling.traces.executions import Execution


def run(program: TableProgram) -> tuple[dict[CollectiveKey, Timing], dict[str, str]]:
    """Returns the times of the program's collectives, and the reason for each collective without a time.

    All processes that have GPUs of the program call this function together. Each process traces its own GPUs only.
    """
    try:
        compiled = program.lower().compile(dict(NO_GRAPHS))
        module = compiled_module(compiled)
        where, marks = program.instances(module), program.marks(module)
        arguments = program.arguments()
        jax.block_until_ready(compiled(*arguments))
        found = executions.record(lambda: jax.block_until_ready(compiled(*arguments)), module.name)
    except (DhelixError, *COMPILER_ERRORS) as error:
        return {}, {str(key): reason(error) for key in program.keys}
    timings = times(program, found, where, marks)
    return timings, {str(key): "the profiler saw no kernel of it" for key in program.keys if key not in timings}


def times(
    program: TableProgram,
    gpus: Mapping[int, Sequence[Execution]],
    where: Mapping[str, tuple[CollectiveKey, int]],
    marks: Mapping[str, tuple[CollectiveKey, int]],
) -> dict[CollectiveKey, Timing]:
    """The time of each collective: a median over the repeats. `TableProgram.seconds` combines the times of all GPUs.

    Args:
      program: the program that ran.
      gpus: executions by the GPU's number in this process.
      where, marks: the results of `TableProgram.instances` and `.marks`. If a collective has no execution with its
        name, the executions without a name that follow its mark count as its executions.
    """
    instances = sorted(set(where.values()))
    numbers = {device.local_hardware_id: device.id for device in jax.local_devices()}
    devices = [device for group in program.groups for device in group]
    seconds = np.zeros((len(instances), len(devices)))
    for gpu, found in gpus.items():
        if numbers[gpu] in devices:
            durations = _durations(found, where, marks)
            seconds[:, devices.index(numbers[gpu])] = [durations.get(instance, 0.0) for instance in instances]
    samples: dict[CollectiveKey, list[float]] = defaultdict(list)
    for (key, _), row in zip(instances, _of_all_processes(program, seconds), strict=True):
        known = {device: value for device, value in zip(devices, row, strict=True) if value > 0}
        if known:
            samples[key].append(program.seconds(key, known))
    return {key: Timing.of(of_key) for key, of_key in samples.items()}


def _durations(
    found: Sequence[Execution],
    where: Mapping[str, tuple[CollectiveKey, int]],
    marks: Mapping[str, tuple[CollectiveKey, int]],
) -> dict[tuple[CollectiveKey, int], float]:
    """Seconds of each run of a collective on one GPU, from the start of its first kernel to the end of its last."""
    named: dict[tuple[CollectiveKey, int], tuple[float, float]] = {}
    nameless: dict[tuple[CollectiveKey, int], tuple[float, float]] = {}
    for execution in executions.between_marks(found, marks.__contains__):
        for spans, instance in ((named, where.get(execution.name)), (nameless, marks.get(execution.name))):
            if instance is not None:
                start, end = spans.get(instance, (execution.start, execution.end))
                spans[instance] = (min(start, execution.start), max(end, execution.end))
    return {instance: end - start for instance, (start, end) in {**nameless, **named}.items()}


def _of_all_processes(program: TableProgram, seconds: np.ndarray) -> np.ndarray:
    """Combines the times of all processes. Each process has the times of its own GPUs and zeros for the others."""
    processes = {device.process_index for device in program.mesh.devices.flat}
    if len(processes) < 2 or len(processes) < jax.process_count():
        return seconds
    return np.asarray(multihost_utils.process_allgather(seconds.astype(np.float32))).max(axis=0)
