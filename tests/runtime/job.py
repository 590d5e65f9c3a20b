"""Runs a job of several processes on CPU devices, all with the same program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dhelix.runtime.processes.this_machine import free_port
from dhelix.tests.machine import PATIENCE


class Ended(NamedTuple):
    """Exit status of a process, and what it wrote."""

    status: int
    output: str
    errors: str


def run(
    program: str, *arguments: object, devices: int = 1, environments: Sequence[Mapping[str, str]] = ({}, {})
) -> list[Ended]:
    """Runs a program in each process until all have ended.

    Args:
      program: Python code; its arguments are the process's number, a free port, and `arguments`.
      devices: number of devices per process.
      environments: one per process, in addition to this process's environment.
    """
    port = free_port()
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number), str(port), *map(str, arguments)],
            env={**shared, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, environment in enumerate(environments)
    ]
    try:
        # a process stops when its pipe is full, and then all stop, so all pipes are read
        with ThreadPoolExecutor(len(processes)) as pool:
            results = list(pool.map(lambda process: process.communicate(timeout=PATIENCE), processes))
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *result) for process, result in zip(processes, results, strict=True)]


def outputs(program: str, *arguments: object, **options: object) -> list[str]:
    """Runs a program as `run` does, asserts that all processes succeed, and returns what they printed."""
    ended = run(program, *arguments, **options)  # type: ignore[arg-type]
    for one in ended:
        assert one.status == 0, one.errors[-3000:]
    return [one.output for one in ended]
