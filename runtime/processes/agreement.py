"""Agreement between the processes of a job: that they are alike, and on what only some of them know.

All processes of `job` must call these together; one that does not is named after a while (`meetings`). Without a job,
in a single process, nothing happens. By default the job is all processes of `jax.distributed`.
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
      purpose: see `Job.meet`, as of all functions here; so is `times`.

    Raises:
      HostsDisagreeError: in every process, naming the first entry that differs.
    """
    if (found := _job(job)) is not None:
        found.meet(purpose, records.dumps(record), records.check, times)


def largest(purpose: str, value: int, job: Job | None = EVERYONE) -> int:
    """The largest of all processes' values.

    For decisions that all must take alike: what a report or an executable says may differ between them.
    """
    if (found := _job(job)) is None:
        return value
    return int(found.meet(purpose, str(value), _largest))


def gathered(purpose: str, text: str, job: Job | None = EVERYONE) -> list[str]:
    """What each process says, in the processes' order."""
    if (found := _job(job)) is None:
        return [text]
    return json.loads(found.meet(purpose, text, lambda said: json.dumps([one.text for one in said])))


def together[T](
    purpose: str, make: Callable[[], T], errors: tuple[type[Exception], ...], job: Job | None = EVERYONE
) -> T:
    """What `make` returns, if it returns in all processes: where one failed, the others would wait for it.

    What `make` does must not wait for other processes.

    Args:
      errors: what `make` may raise; in a single process it is raised as it is.

    Raises:
      DhelixError: in every process, with what the first one said that failed.
    """
    if (found := _job(job)) is None:
        return make()
    made: list[T] = []
    why = ""
    try:
        made.append(make())
    except errors as error:  # its text alone: the traceback would keep what `make` held
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
