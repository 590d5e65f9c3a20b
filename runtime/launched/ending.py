"""Ends a process that failed, and tells why.

At its end, a process of `jax.distributed` waits up to five minutes for the others. If it failed, they wait for it in a
collective: nothing moves, and nobody is told. So a process that failed does not wait:

    it failed by itself           it tells the launcher and the other processes why, and ends
    it lost another process       it waits until it knows which one: either that process told it, or JAX's coordination
                                  service misses its heartbeat, and ends this process with a message that names it

A process that was killed tells nothing. For it, the launcher (`launch/hosts`) or the heartbeat speaks.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import sys
import time
from typing import Any

from dhelix.runtime.launched.task import Task

_FAILED = "dhelix/launched/failed"
_FOR_OTHERS = 1.0  # seconds for which the coordinator stays, so that the others can read why it ends
_SLACK = 5.0  # seconds after the heartbeat in which JAX's coordination service says which process is dead
_LOST = re.compile(
    r"Gloo|NCCL|Connection (reset|closed|refused)|Socket closed|heartbeat|coordination service|UNAVAILABLE|ABORTED",
    re.IGNORECASE,
)
"""Texts of errors of JAX that another process may have caused."""

_code: list[int] = []
_leaves: list[int] = []


def prepare() -> None:
    """Call this at the start of the process, so that what it registers comes last at its end.

    From here on, the code that `sys.exit` was last called with is remembered, which functions at exit do not see.
    """
    atexit.register(_leave)
    original = sys.exit

    def exit_(status: Any = None, /) -> Any:
        _code[:] = [status if isinstance(status, int) else int(status is not None)]
        original(status)

    sys.exit = exit_


def install(mine: Task) -> None:
    """From here on, this process ends as described above. It must be called after jax is imported."""
    atexit.register(_at_exit, mine, os.getpid())


def lost_another(error: BaseException | None) -> bool:
    """Whether a collective, or JAX's coordination service, failed in a way in which a dead process makes it fail."""
    return isinstance(error, ValueError | RuntimeError) and bool(_LOST.search(str(error)))


def _at_exit(mine: Task, process: int) -> None:
    from dhelix.passes import jax_compat

    error: BaseException | None = getattr(sys, "last_exc", None)
    interrupted = isinstance(error, KeyboardInterrupt)
    code = 130 if interrupted else 1 if error is not None else next(iter(_code), 0)
    if not code or os.getpid() != process:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may arrive twice, from the terminal and from the launcher
    sys.stdout.flush()
    sys.stderr.flush()
    store = jax_compat.coordination_client()
    if store is None:
        mine.tell(failed=code)
        return
    if lost_another(error):
        mine.tell(failed=code, because=_first_failure(store, mine))
    else:
        _publish(store, mine, error, code)
        mine.tell(failed=code)
        if mine.process == 0:
            time.sleep(_FOR_OTHERS)
    jax_compat.leave_job()
    _leaves.append(code)


def _leave() -> None:
    """Ends this process without destroying what JAX's coordination service still uses, if it does not wait for others.

    Otherwise the threads of the service would find it destroyed, and abort the process.
    """
    if _leaves:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_leaves[0])


def _publish(store: Any, mine: Task, error: BaseException | None, code: int) -> None:
    why = f"exit status {code}" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:300]
    words = {"host": socket.gethostname(), "why": why}
    try:
        store.key_value_set(f"{_FAILED}/{mine.process}", json.dumps(words))
    except Exception:  # the coordinator may have ended
        pass


def _first_failure(store: Any, mine: Task) -> str:
    """Waits until another process has said that it failed, and returns its words; "" if none does."""
    end = time.monotonic() + mine.heartbeat + _SLACK
    while time.monotonic() < end:
        try:
            found = store.key_value_dir_get(f"{_FAILED}/")
        except Exception:
            found = []
        if found:
            key, value = min(found)
            words = json.loads(value)
            return f"process {key.rpartition('/')[2]} ({words['host']}) failed: {words['why']}"
        time.sleep(0.2)
    return ""
