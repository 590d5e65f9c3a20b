"""Lets the processes of a job check that they are alike, and share facts that only some of them know.

All processes of `job` must call the same function together. If a process does not call it in time, the others raise an
error that names this process (`rendezvous`). Without a job, as in a single process, the functions use this process's
value alone. By default, `job` contains all processes of `jax.distributed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dhelix.errors import DhelixError
from dhelix.runtime.processes import records, rendezvous
from dhelix.runtime.processes.records import Record
from dhelix.runtime.processes.rendezvous import AT_WORK, Job, Said

EVERYONE: Any = object()


def check(purpose: str, record: Record, job: Job | None = EVERYONE, times: int = AT_WORK) -> None:
    """Checks that all processes have the same record.

    Args:
      purpose, times: as in `Job.meet`. The functions below also take `purpose` and `job`.
      record: the properties that must be equal (`records.Entry`).
      job: the processes that compare their records; None: only this process, so nothing is compared.

    Raises:
      HostsDisagreeError: the records differ. Every process raises this error; it names the first entry that differs.
    """
    if (found := _job(job)) is not None:
        found.meet(purpose, records.dumps(record), records.check, times)


def largest(purpose: str, value: int, job: Job | None = EVERYONE) -> int:
    """Returns the largest of the values of all processes.

    Use it for a value on which all processes base the same decision. Each process computes the value from its own
    executable or report, so the values may differ.
    """
    if (found := _job(job)) is None:
        return value
    return int(found.meet(purpose, str(value), _largest))


def gathered(purpose: str, text: str, job: Job | None = EVERYONE) -> list[str]:
    """Returns the texts of all processes, in the order of the processes."""
    if (found := _job(job)) is None:
        return [text]
    return json.loads(found.meet(purpose, text, lambda said: json.dumps([one.text for one in said])))


def together[T](
    purpose: str, make: Callable[[], T], errors: tuple[type[Exception], ...], job: Job | None = EVERYONE
) -> T:
    """Calls `make` in all processes, and returns its result if it succeeds in all of them.

    With a plain call, the other processes would hang if `make` failed in one process. `make` must not wait for other
    processes.

    Args:
      errors: the errors that `make` may raise. In a single process, they are raised unchanged.

    Raises:
      DhelixError: `make` failed in some process. Every process raises this error. Its text is the error text of the
        first process that failed.
    """
    if (found := _job(job)) is None:
        return make()
    made: list[T] = []
    why = ""
    try:
        made.append(make())
    except errors as error:  # keeps only the text, because the traceback would keep the objects of `make` alive
        why = " ".join(str(error).split()) or type(error).__name__
    if failed := found.meet(purpose, why, _first_words):
        raise DhelixError(failed)
    return made[0]


def _job(job: Job | None) -> Job | None:
    return rendezvous.everyone() if job is EVERYONE else job


def _largest(said: Sequence[Said]) -> str:
    return str(max(int(one.text) for one in said))


def _first_words(said: Sequence[Said]) -> str:
    return next((one.text for one in said if one.text), "")
