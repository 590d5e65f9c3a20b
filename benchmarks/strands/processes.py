"""The processes of `strands/run.py`: one for each launch setting, or two for a setting that emulates two nodes.

A setting's work has parts: compilation and the first steps, rounds of timed steps, and traces. After each part a
process prints a line and waits for permission to go on. So settings take turns, and only one of them uses the GPUs:

    jobs = [Job(arguments, setting, ...) for setting in settings]
    while jobs:
        jobs = [job for job in jobs if job.turn(deadline)]

A waiting process keeps its GPU memory. So processes that live at the same time each get a share of the memory. The next
process to start reads the autotuning results of earlier ones, so all processes run the same kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strands.results import Result, Run
from dhelix.benchmarks.strands.variants import Setting
from dhelix.errors import DhelixError
from dhelix.runtime.compiler import autotune_results
from dhelix.runtime.processes.nodes import emulated_nodes
from dhelix.runtime.processes.this_machine import free_port

PART_DONE = "dhelix: this part is done"
_CHOICES, _CHOSEN = "autotune.pbtxt", "autotune.part.pbtxt"
_MEMORY = 0.9  # fraction of a GPU's memory for all processes together


class Job:
    """One setting's processes.

    Args:
      seconds: time after which the processes skip optional work.
      together: number of settings whose processes live at the same time.
      worker: script that the processes run.
    """

    def __init__(
        self, arguments: argparse.Namespace, setting: Setting, seconds: float, together: int, worker: Path
    ) -> None:
        self.arguments, self.setting, self.worker = arguments, setting, worker
        self.seconds, self.together = seconds, together
        self.processes: list[subprocess.Popen[bytes]] = []
        self.problem = ""
        self._file = arguments.out / f"{setting.name}.part.json"
        self._file.unlink(missing_ok=True)

    def turn(self, deadline: float) -> bool:
        """Lets the processes do their next part. Returns whether parts are left.

        Args:
          deadline: when the processes are ended, in seconds of `time.monotonic`.
        """
        if self.processes:
            for process in self.processes:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # `wait` reports a process that has ended
                    process.stdin.write(b"\n")
        else:
            self._start()
        running, self.problem = wait(self.processes, deadline)
        keep_choices(self.arguments.out)
        if self.problem:
            print(f"{self.setting.name}: {self.problem}; what was measured until then counts", flush=True)
        return running

    def _start(self) -> None:
        request = {k: v for k, v in vars(self.arguments).items() if k != "settings"}
        request |= {"out": str(self.arguments.out), "setting": self.setting.name, "file": str(self._file)}
        request |= {"seconds": self.seconds}
        self.processes = [
            start([sys.executable, str(self.worker), json.dumps(request | place)], env)
            for place, env in places(self.arguments, self.setting, self.together)
        ]

    @property
    def run(self) -> Run | None:
        """The results so far; None if there are none yet."""
        if not self._file.is_file():
            return None
        record = json.loads(self._file.read_text())
        run = Run(**{**record, "results": [Result(**result) for result in record["results"]]})
        dropped = [*run.dropped, f"setting {self.setting.name}: {self.problem}"] if self.problem else run.dropped
        return dataclasses.replace(run, dropped=dropped)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


def start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[bool, str]:
    """Waits until every process has done its part or has ended, but not beyond `deadline`.

    One failure stops the wait, because the other processes would wait for the failed one forever.

    Returns:
      Whether the processes have more parts, and the problem if there was one. If they have none, they are killed.
    """
    working, paused, problem = list(processes), 0, ""
    while working and not problem:
        outputs = {process.stdout: process for process in working if process.stdout is not None}
        for output in select.select(list(outputs), [], [], 0.1)[0]:
            process, line = outputs[output], output.readline().decode(errors="replace")
            if line.strip() == PART_DONE:
                paused += 1
                working.remove(process)
            elif line:
                print(line, end="", flush=True)
            else:
                working.remove(process)
                if code := process.wait():
                    problem = problem or f"a process ended with code {code}"
        if working and time.monotonic() > deadline:
            problem = problem or "out of time"
    if not problem and 0 < paused < len(processes):
        problem = "a process ended before the others"
    if not problem and paused:
        return True, ""
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    return False, problem


def end_part() -> None:
    """Tells the parent process that a part is done, and waits for the next turn. A job's process calls this."""
    print(PART_DONE, flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody is there to say when to go on")


def places(
    arguments: argparse.Namespace, setting: Setting, together: int = 1
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """For each process of a setting: its place in the distributed run (empty if there is none), and its environment."""
    base = environment(setting, arguments.out, together)
    if arguments.on_paper:
        return [({}, {**base, "JAX_PLATFORMS": "cpu"})]
    if setting.nodes == 1:
        return [({}, base)]
    gpus = arguments.dp * max(arguments.ep, 1) * arguments.cp * arguments.tp
    nodes = emulated_nodes(setting.nodes, gpus // setting.nodes, free_port())
    return [
        ({"coordinator": n.coordinator, "process": n.process, "devices": n.local_device_ids}, {**base, **n.environment})
        for n in nodes
    ]


def environment(setting: Setting, folder: Path, together: int = 1) -> dict[str, str]:
    """The environment of a setting's process. The caller's XLA_FLAGS come last, so they override the setting's.

    Args:
      folder: holds the autotuning results.
      together: number of settings that share the GPU memory.
    """
    result = {**os.environ, **setting.environment}
    flags = [*setting.xla_flags, *_autotuning(folder), os.environ.get("XLA_FLAGS", "")]
    result["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
    result.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{_MEMORY / together:.2f}")
    result.setdefault("NCCL_NVLS_ENABLE", "0")
    return result


def _autotuning(folder: Path) -> list[str]:
    """XLA flags that load the known autotuning results and dump the process's results; none without a GPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    file = folder / _CHOICES
    known = file if file.is_file() else autotune_results.file()
    load = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    return [f"--xla_gpu_dump_autotune_results_to={folder / _CHOSEN}", *load]


def keep_choices(folder: Path) -> None:
    """Merges the dumped autotuning results into the file that the next process loads."""
    chosen_now = folder / _CHOSEN
    if not chosen_now.is_file():
        return
    known = [file for file in (autotune_results.file(), folder / _CHOICES) if file is not None and file.is_file()]
    try:
        (folder / _CHOICES).write_text(autotune_results.merged([*known, chosen_now]))
    except DhelixError as error:  # concurrent compilations may have garbled the file
        print(f"autotuning results are not kept: {error}", flush=True)
    chosen_now.unlink()
