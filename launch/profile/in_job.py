"""`dhelix profile` as one process of a job: on several hosts, all processes measure together.

    srun dhelix profile --preset llama-8b --mesh dp=2,tp=8 --settings default,connections1

The scheduler starts the same command in each process, and each command starts its own worker for each launch setting.
The workers of a setting are a job of their own, whose coordinator is a port of process 0's host.

    found = in_job.find()                     # the place of this process; None: it is alone
    node = in_job.of_worker(found, 1)         # the place of its first worker
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.hosts import place
from dhelix.launch.hosts.place import Place
from dhelix.launch.profile import workers
from dhelix.runtime.launched import task
from dhelix.runtime.undecorated import policy

_NOT_OF_WORKERS = (task.VARIABLE, policy.VARIABLE, place.COORDINATOR, place.PROCESSES, place.PROCESS)
"""Variables that would make a worker join the job of the process that started it."""


def find() -> Place | None:
    """The place of this process, by `dhelix launch` or by the scheduler; None if it is no process of a larger job.

    Raises:
      DhelixError: see `hosts.place.find`.
    """
    launched = task.mine()
    if launched is not None:
        found: Place | None = Place("dhelix launch", launched.coordinator, launched.processes, launched.process,
                                    launched.local_device_ids)  # fmt: skip
    elif "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NODELIST" not in os.environ:
        found = None  # a batch script, which runs on one host
    else:
        found = place.find(os.environ)
    return found if found is not None and found.processes > 1 else None


def gpus(found: Place) -> int:
    """GPUs of the job, if all its processes have as many as this one."""
    return found.processes * (len(found.local_device_ids) or workers.gpus_here()[1])


def check(needed: int, count: int, link: str) -> None:
    """Raises DhelixError if a job cannot measure: the step must use all its GPUs, and nodes are real ones."""
    if needed < count:
        raise DhelixError(
            f"the step needs {needed} GPUs, but the job has {count}; give a larger --mesh, or start the command by "
            "itself on one host"
        )
    if link == "two-nodes":
        raise DhelixError("--link two-nodes emulates nodes on one machine, but this is a job; leave it out")


def of_worker(found: Place, number: int) -> dict[str, Any]:
    """The keywords of `jax.distributed.initialize` for a process's worker of this number, from 1.

    Each number has a port of its own, because a port may stay in use for a while after its coordinator has ended.
    """
    host, _, port = found.coordinator.rpartition(":")
    return {
        "coordinator": f"{host}:{_port(int(port) + number)}",
        "processes": found.processes,
        "process": found.process,
        "local_device_ids": list(found.local_device_ids) or None,
    }


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker: those of this process, without the ones that name its place."""
    return {name: value for name, value in given.items() if name not in _NOT_OF_WORKERS}


def _port(number: int) -> int:
    """A port for a number that may be too large: JAX's own port below Slurm may be the last one."""
    return number if number < 65_536 else number - 32_768
