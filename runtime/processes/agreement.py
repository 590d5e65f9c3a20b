"""Agreement between the processes of a job: that they are alike, and on facts that only some of them know.

All processes of `job` must call these functions together. A process that does not come in time is named in the error
(`rendezvous`). Without a job, in a single process, nothing happens. By default the job is all processes of
`jax.distributed`.
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
      purpose, times: as in `Job.meet`, here and below.

    Raises:
      HostsDisagreeError: the records differ. Raised in every process, with the first entry that differs.
    """
    if (found := _job(job)) is not None:
        found.meet(purpose, records.dumps(record), records.check, times)


def largest(purpose: str, value: int, job: Job | None = EVERYONE) -> int:
    """The largest of all processes' values.

    Use it for decisions that all processes must take alike, because reports and executables may differ between them.
    """
    if (found := _job(job)) is None:
        return value
    return int(found.meet(purpose, str(value), _largest))


def gathered(purpose: str, text: str, job: Job | None = EVERYONE) -> list[str]:
    """The texts of all processes, in the order of the processes."""
    if (found := _job(job)) is None:
        return [text]
    return json.loads(found.meet(purpose, text, lambda said: json.dumps([one.text for one in said])))


def together[T](
    purpose: str, make: Callable[[], T], errors: tuple[type[Exception], ...], job: Job | None = EVERYONE
) -> T:
    """Returns the result of `make` if it succeeds in all processes. If it failed in only one, the others would hang.

    `make` must not wait for other processes.

    Args:
      errors: the errors that `make` may raise. In a single process they are raised unchanged.

    Raises:
      DhelixError: `make` failed somewhere. Raised in every process, with the error text of the first that failed.
    """
    if (found := _job(job)) is None:
        return make()
    made: list[T] = []
    why = ""
    try:
        made.append(make())
    except errors as error:  # keep only the text: the traceback would keep the objects of `make` alive
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
