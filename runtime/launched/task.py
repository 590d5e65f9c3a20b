"""What `dhelix launch` tells a process, in the variable DHELIX_LAUNCH, and the pipe in which the process answers.

    task = Task("host0:1234", processes=4, process=2, heartbeat=10)
    os.environ[VARIABLE] = task.dumps()       # in the launcher, for the process that it starts
    mine().tell(failed=1)                     # in this process

Children of the process inherit the variable. They are not meant, because the launcher is not their parent. This module
does not import jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

VARIABLE = "DHELIX_LAUNCH"


@dataclass(frozen=True)
class Task:
    """One process of a job.

    Attributes:
      coordinator: host:port of process 0.
      processes: number of processes in the job.
      process: number of this process.
      local_device_ids: the GPUs of the host that this process uses; empty: all.
      heartbeat: seconds without a sign of life after which a process counts as dead.
      check: whether all processes are checked before the program uses devices.
      mesh: sizes of mesh axes, outermost first, whose bandwidth is measured.
      launcher: process id of the launcher.
      pid: this process, once it has started; 0 before. Children that the launcher adopts are other ones.
      pipe: file descriptor to which the process writes what it tells the launcher; -1: none.
    """

    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...] = ()
    heartbeat: int = 100
    check: bool = True
    mesh: Mapping[str, int] = field(default_factory=dict)
    launcher: int = 0
    pid: int = 0
    pipe: int = -1

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    def tell(self, **words: Any) -> None:
        """Tells the launcher something, if it still listens: one line of JSON."""
        try:
            os.write(self.pipe, json.dumps(words).encode() + b"\n")
        except OSError:
            pass


def loads(text: str) -> Task:
    found = json.loads(text)
    return Task(**{**found, "local_device_ids": tuple(found["local_device_ids"])})


def mine() -> Task | None:
    """The task of this process. None if the launcher started not this process, but perhaps one of its parents."""
    text = os.environ.get(VARIABLE)
    task = loads(text) if text else None
    if task is None or task.launcher != os.getppid() or task.pid not in (0, os.getpid()):
        return None
    task = replace(task, pid=os.getpid())
    os.environ[VARIABLE] = task.dumps()
    return task
