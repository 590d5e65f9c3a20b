"""Runs requests of `dhelix profile` in workers.

    finished = measure(Request("connections1", out="h200-nvlink.json", preset={...}), on_progress=bar)

If a worker is stopped or dies, the profile's file keeps its results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.profile import in_job, workers
from dhelix.launch.profile.worker import Request
from dhelix.launch.profile.workers import Worker
from dhelix.runtime.compiler import autotune_results

COMMAND = (sys.executable, "-m", "dhelix.launch.profile.worker")


def measure(
    request: Request,
    on_progress: Callable[[int, int, str], bool],
    gpus: int | None = None,
    node: Mapping[str, Any] | None = None,
    on_nodes: Callable[[int], None] = lambda _: None,
) -> bool:
    """Runs a request in one or two workers, until it is done.

    Args:
      on_progress: called with the number of finished measurements, their total, and what comes next. If it returns
        False, the request stops.
      gpus: number of the machine's GPUs to use; None: all.
      node: the worker's place, if this process is one of a job (`in_job.of_worker`).
      on_nodes: called with the number of GPUs that take part on each node.

    Returns:
      True if the request finished, and False if `on_progress` stopped it.

    Raises:
      DhelixError: the worker reported an error, or it died. If it died, the message quotes a line of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="dhelix-profile-") as folder:
        started: list[Worker] = []
        try:
            flags = _autotuning(Path(request.out))
            places = workers.environments(request.setting, request.link, gpus, flags)
            for number, (emulated, environment) in enumerate(places):
                path = Path(folder, f"request{number}.json")
                path.write_text(replace(request, node=node or emulated).to_json())
                if node:
                    environment = in_job.environment(environment)
                started.append(Worker([*COMMAND, str(path)], environment, Path(folder, f"stderr{number}.txt")))
            for message in started[0].messages():
                if "error" in message:
                    raise DhelixError(f"setting {request.setting}: {message['error']}")
                if message.get("finished"):
                    workers.wait(started)
                    return True
                if "gpus_per_node" in message:
                    on_nodes(message["gpus_per_node"])
                if "done" in message and not on_progress(message["done"], message["total"], message["what"]):
                    return False
            status = started[0].process.wait()
            raise DhelixError(
                f"the process that measures setting {request.setting} ended with status {status} "
                f"({started[0].last_words()}); {request.out} holds what it measured, and the same command continues "
                "from there"
            )
        finally:
            for worker in started:
                worker.end()


def _autotuning(profile: Path) -> list[str]:
    """XLA flags that store the autotuner's choices next to the profile, and load them if they exist.

    Without these flags, the autotuner could choose other kernels in each run. Other kernels have other keys in the
    profile.
    """
    file = profile.with_suffix(".autotune.pbtxt")
    known = file if file.is_file() and file.stat().st_size else autotune_results.file()
    load = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    return [f"--xla_gpu_dump_autotune_results_to={file}", *load]
