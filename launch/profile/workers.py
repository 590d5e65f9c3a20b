"""Processes that measure on this machine's GPUs: how they are started, listened to and ended.

    for node, environment in environments("connections1", "nvlink", gpus=2):
        worker = Worker([sys.executable, "-m", "...", "request.json"], environment, Path("stderr.txt"))
    worker.patience = 60.0                        # seconds of silence that are too long
    for message in worker.messages(): ...         # JSON objects that the worker prints
    worker.end()

The environment variables and XLA flags of a launch setting hold for a whole process. So each setting has workers of its
own, and the process that starts them neither changes its own environment nor uses the GPUs. If it dies, its workers end
themselves (`end_with_stdin`), so that the GPUs become free. The link `two-nodes` needs two workers, which NCCL treats
as two nodes (`dhelix.runtime.processes.nodes`).
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.profiles.profile import SETTINGS
from dhelix.runtime.processes.nodes import emulated_nodes
from dhelix.runtime.processes.this_machine import free_port, gpus_here

_LINKS: Mapping[str, Mapping[str, str]] = {"nvlink": {}, "no-p2p": {"NCCL_P2P_DISABLE": "1"}, "two-nodes": {}}
_PATIENCE = 10  # seconds that a worker gets to end itself before it is killed


class SilentError(DhelixError):
    """A worker has said nothing for too long."""


def environments(
    setting: str, link: str, gpus: int | None = None, flags: Sequence[str] = ()
) -> Iterator[tuple[Mapping[str, Any] | None, dict[str, str]]]:
    """The place in a job and the environment of each worker of a launch setting.

    Args:
      setting: name of the launch setting.
      link: link between the GPUs, one of `hardware.LINKS`.
      gpus: number of the machine's GPUs to use; None: all.
      flags: further XLA flags.

    Returns:
      One entry for each worker. The place has the keywords of `jax.distributed.initialize`: coordinator, processes,
      process and local_device_ids. It is None for a worker that is a job of its own.
    """
    known = SETTINGS[setting]
    environment = {**os.environ, **known.environment, **_LINKS[link]}
    environment["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *known.xla_flags, *flags]).strip()
    count = gpus_here()[1]
    if gpus is not None and gpus < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    if link != "two-nodes":
        yield None, environment
        return
    for node in emulated_nodes(2, (gpus or count) // 2, free_port()):
        place: dict[str, Any] = {
            "coordinator": node.coordinator,
            "processes": node.processes,
            "process": node.process,
            "local_device_ids": list(node.local_device_ids),
        }
        yield place, {**environment, **node.environment}


class Worker:
    """A process that prints JSON objects, one per line.

    Attributes:
      patience: seconds of silence after which `messages` gives up; None: never. It may change between messages.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        """Starts the process in a session of its own.

        Ctrl-C then interrupts only this process, which ends the worker properly. If this process is killed, the
        worker's stdin ends, and the worker ends itself.

        Args:
          errors: file for its stderr.
        """
        self.patience: float | None = None
        self._errors, pipe = errors, subprocess.PIPE
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=pipe,
                stdout=pipe,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def messages(self) -> Iterator[dict[str, Any]]:
        """The JSON objects that the worker prints. Other lines, which libraries may print, are skipped.

        Raises:
          SilentError: the worker was silent for too long.
        """
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=self.patience)
            except queue.Empty:
                raise SilentError(f"no answer for {self.patience:g} s") from None
            if line is None:
                return
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                yield message

    def _read(self, lines: queue.Queue[str | None]) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                lines.put(line)
        except ValueError:  # `end` has closed it
            pass
        lines.put(None)

    def end(self) -> None:
        """Ends the process, if it has not ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def last_words(self) -> str:
        """The line of its stderr that tells most: the last fatal log line, or else the last line with words.

        A fatal log line comes from a failed check in C++. The stack trace after it is left out.
        """
        text = self._errors.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
        telling = [line for line in lines if re.match(r"F\d{4} ", line)] or lines
        return telling[-1][:300] if lines else "it said nothing"


def wait(workers: Sequence[Worker]) -> None:
    """Waits until the workers have ended by themselves, but not for ever."""
    deadline = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return


def end_with_stdin() -> None:
    """Starts a thread that ends this process at once when its stdin ends. Workers call it."""

    def listen() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def tell(**what: Any) -> None:
    """Prints a message of a worker."""
    print(json.dumps(what), flush=True)
