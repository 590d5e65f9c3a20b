"""Runs workers of `dhelix tune`. A measurement that hangs or kills its worker is marked, and tuning goes on.

    result = tuned(request, Place("connections1", "nvlink", environment={}), told=print)

The records say which measurement a worker had begun. If the worker dies or is silent for too long, this measurement
counts as slow, and another worker goes on from the records.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.profile import workers
from dhelix.launch.profile.workers import SilentError, Worker
from dhelix.launch.tune.worker import COMPILES, Request
from dhelix.runtime.compiler import autotune_results
from dhelix.runtime.tuning.records import mark_failed, read

COMMAND = (sys.executable, "-m", "dhelix.launch.tune.worker")
_RESTARTS = 5


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
      setting, link, gpus: see `workers.environments`.
      environment: further variables of the worker.
    """

    setting: str
    link: str
    environment: Mapping[str, str]
    gpus: int | None = None


def tuned(request: Request, place: Place, told: Callable[[str], None]) -> dict[str, Any]:
    """Runs a request until it is done. Returns what the worker found, as JSON values.

    Args:
      told: called with a line on what comes next.

    Raises:
      DhelixError: the worker reported an error, or died or hung outside of a measurement, or too often.
    """
    records = None if request.records is None else Path(request.records)
    for _ in range(_RESTARTS):
        known = read(records)
        result, why = _once(request, place, told)
        if result is not None:
            return result
        if records is None or not mark_failed(records, why, known):
            raise DhelixError(f"setting {place.setting}: {why}")
        told(f"a measurement failed ({why}); it counts as slow, and tuning goes on")
    raise DhelixError(f"setting {place.setting}: {_RESTARTS} measurements failed; the last one: {why}")


def _once(request: Request, place: Place, told: Callable[[str], None]) -> tuple[dict[str, Any] | None, str]:
    """The result of a worker, or None and why there is none."""
    known = autotune_results.file()
    flags = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    started: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="dhelix-tune-") as folder:
        try:
            for number, (node, own) in enumerate(workers.environments(place.setting, place.link, place.gpus, flags)):
                path = Path(folder, f"request{number}.json")
                path.write_text(replace(request, node=node).to_json())
                worker = Worker(
                    [*COMMAND, str(path)], {**own, **place.environment}, Path(folder, f"stderr{number}.txt")
                )
                worker.patience = COMPILES
                started.append(worker)
            for message in started[0].messages():
                if message.get("crashed"):
                    return None, message["error"]
                if "error" in message:
                    raise DhelixError(f"setting {place.setting}: {message['error']}")
                if "finished" in message:
                    workers.wait(started)
                    return message["finished"], ""
                if "patience" in message:
                    started[0].patience = message["patience"]
                if "what" in message:
                    told(message["what"])
            status = started[0].process.wait()
            return None, f"the process ended with status {status} ({started[0].last_words()})"
        except SilentError as error:
            return None, str(error)
        finally:
            for worker in started:
                worker.end()
