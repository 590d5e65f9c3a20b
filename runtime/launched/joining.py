"""Joins the job that `dhelix launch` started, when the program first uses devices.

    the program                                     what happens
    calls jax.distributed.initialize()              arguments that it leaves out are the launcher's
    calls it with all arguments                     as without dhelix
    never calls it                                  it is called before JAX looks for devices
    never uses devices                              nothing: the process does not join

`start` is called by the `sitecustomize` of `dhelix run`. It does nothing in children of the launched process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from dhelix.errors import DhelixError
from dhelix.runtime.launched import ending, task
from dhelix.runtime.launched.task import Task
from dhelix.runtime.undecorated.start import when_jax_is_imported

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PATIENCE = 30.0  # seconds for which a process waits for others before it says so


def start() -> None:
    """Prepares this process, if it is one that the launcher started. Does not import jax."""
    mine = task.mine()
    if mine is None:
        return
    if sys.platform == "linux":  # a launcher that is killed takes its processes with it
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    ending.prepare()
    when_jax_is_imported(lambda: _prepare(mine))


def _prepare(mine: Task) -> None:
    import jax

    from dhelix.passes import jax_compat

    original = jax.distributed.initialize

    @functools.wraps(original)
    def initialize(*positional: Any, **named: Any) -> None:
        with _patience(mine):
            original(**arguments(mine, positional, named))
        mine.tell(joined=True)

    jax.distributed.initialize = initialize
    jax_compat.around_first_devices(lambda: _join(mine), lambda: _check(mine))
    ending.install(mine)


def arguments(mine: Task, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize`: those of a program, and the launcher's where it leaves them out.

    A program that says where its coordinator is, or which process it is, describes a job of its own. Then only the
    time of the heartbeat is the launcher's.
    """
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    given = {**dict(zip(names, positional, strict=False)), **named}
    given = {name: value for name, value in given.items() if value is not None}
    ours: dict[str, Any] = {"heartbeat_timeout_seconds": mine.heartbeat}
    if not given.keys() & set(names[:3]) and "cluster_detection_method" not in given:
        # An empty list means all devices, and that JAX detects nothing.
        place = (mine.coordinator, mine.processes, mine.process, list(mine.local_device_ids))
        ours |= dict(zip(names, place, strict=True))
    return {**ours, **given}


def _join(mine: Task) -> None:
    import jax

    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())
        advice = "check that process 0 runs, and that this host reaches its port"
        if "start RPC server" in words:  # process 0 itself
            advice = "its port is in use, perhaps by an earlier job; choose another"
        sys.exit(
            f"dhelix launch: process {mine.process} cannot join the {mine.processes} processes at {mine.coordinator}: "
            f"{words}; {advice}"
        )


@contextlib.contextmanager
def _patience(mine: Task) -> Iterator[None]:
    """Says after a while that this process still waits for others, one of which may have died before it joined."""
    words = (
        f"dhelix launch: process {mine.process} has waited {_PATIENCE:.0f} s for all {mine.processes} processes to "
        "join the job; look whether each was started and still runs"
    )
    timer = threading.Timer(_PATIENCE, lambda: print(words, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check(mine: Task) -> None:
    import jax

    from dhelix.passes import jax_compat

    if not mine.check or jax_compat.process_total() != mine.processes:  # the program has made a job of its own
        return
    from dhelix.runtime.launched import health

    try:
        with jax.ensure_compile_time_eval():  # the program may be tracing
            health.check(mine)
    except DhelixError as error:
        sys.exit(f"dhelix launch: {' '.join(str(error).split())}")
