"""Ends what the processes of a job leave behind, such as processes that load data for one that was killed.

    adopt()     # before the job: a process below us whose parent ends becomes our child
    end()       # after the job's processes have ended: ends those that are still there

Only Linux lets us adopt them. Elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_ADOPTS = 36  # PR_SET_CHILD_SUBREAPER
_WAIT = 1.0  # seconds that they get to end by themselves, and the same again after SIGTERM
_POLL = 0.05  # seconds


def adopt() -> None:
    """From here on, a process below us whose parent ends becomes our child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPTS, 1)


def end() -> None:
    """Ends all children of this process. Those that it started itself must have ended, and been waited for.

    SIGTERM comes before SIGKILL, because the resource tracker of multiprocessing ignores it, and frees shared memory
    when the others have ended.
    """
    for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0 is no signal
        until = time.monotonic() + _WAIT
        sent: set[int] = set()
        while (found := _running()) and time.monotonic() < until:
            for one in set(found) - sent:  # the children of one that ends become ours
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, number)
            sent |= set(found)
            time.sleep(_POLL)


def _running() -> list[int]:
    """Children of this process that have not ended. Those that have are waited for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) != os.getpid():
            continue
        if state != "Z":
            found.append(int(folder.name))
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(folder.name), os.WNOHANG)
    return found
