"""Starts a process of a job: with its task, its devices, its output, and a pipe in which it says what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dhelix.launch.hosts.output import Output
from dhelix.runtime.launched.task import VARIABLE, Task


class Child:
    """A process that we started.

    Attributes:
      number: its number in the job.
      output: its output.
      said: what it told us (`Task.tell`), such as {"joined": True, "failed": 1}.
    """

    def __init__(self, program: Sequence[str], task: Task, environment: Mapping[str, str], output: Output) -> None:
        """Starts the program, which is a script or `-m` and a module, with its arguments."""
        self.number, self.output = task.process, output
        self.said: dict[str, Any] = {}
        ours, theirs = os.pipe()
        told = replace(task, launcher=os.getpid(), pipe=theirs)
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=None if task.process == 0 else subprocess.DEVNULL,
            stdout=output.stdout,
            stderr=output.stderr,
            env={**environment, VARIABLE: told.dumps()},
            pass_fds=(theirs,),
        )
        os.close(theirs)
        output.started()
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs.

        A process that we had to kill after it said that it failed has the code of its failure.
        """
        code = self._process.poll()
        return self.said.get("failed", code) if code is not None and code < 0 else code

    def failing(self) -> bool:
        """Whether it ended, or is about to end, with an error."""
        return bool(self.code()) or "failed" in self.said

    def send(self, signal: int) -> None:
        self._process.send_signal(signal)

    def _listen(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self.said |= json.loads(line)
