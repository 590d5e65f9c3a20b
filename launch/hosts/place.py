"""Which process of which job this is. JAX's own detection says it for Slurm and Open MPI.

    plain variables    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    Kubernetes         the same, which `--template jobset` sets; otherwise JAX's detection asks the cluster's API
    Slurm, Open MPI    JAX's detection reads their variables

Plain variables come first, so they also serve schedulers that JAX does not know.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.runtime.processes.this_machine import gpus_here, visible_gpus

COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_POD = "JOB_COMPLETION_INDEX"  # in each pod of an indexed Job of Kubernetes, and so of a JobSet
_NAMES = {"SlurmCluster": "Slurm", "OmpiCluster": "Open MPI", "K8sCluster": "Kubernetes"}
_SHARED_OUTPUT = ("Slurm", "Open MPI")


@dataclass(frozen=True)
class Place:
    """A process of a job.

    Attributes:
      found_by: what says so, such as "Slurm".
      coordinator: host:port of process 0.
      processes: number of processes.
      process: number of this process.
      local_device_ids: GPUs of the host that this process uses; empty: all.
    """

    found_by: str
    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...] = ()

    @property
    def shares_output(self) -> bool:
        """Whether the scheduler writes the output of all processes to one place."""
        return self.found_by in _SHARED_OUTPUT

    def __str__(self) -> str:
        ids = self.local_device_ids
        devices = f"device {','.join(map(str, ids))} of this host" if ids else "all devices of this host"
        return f"{self.found_by}: process {self.process} of {self.processes}, coordinator {self.coordinator}, {devices}"


def find(environment: Mapping[str, str]) -> Place | None:
    """The place of this process; None if no job is found.

    Raises:
      DhelixError: variables are missing, no numbers, or contradict one another, or JAX's detection fails.
    """
    own = _plain(environment)
    if own is not None:
        return own
    if "KUBERNETES_SERVICE_HOST" in environment and _POD not in environment and not _scheduled(environment):
        return None  # a pod that no indexed Job made
    from dhelix.passes import jax_compat

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the package `kubernetes`, which _nothing names
            found = jax_compat.detected_cluster()
    except Exception as error:  # of any kind, for example of the API of Kubernetes
        words = " ".join(str(error).split())
        raise DhelixError(
            f"JAX cannot detect the job ({words}); or set {COORDINATOR}, {PROCESSES}, {PROCESS}"
        ) from None
    if found is None:
        return _nothing(environment)
    kind, (coordinator, processes, process, ids) = found
    chosen = environment.get("JAX_LOCAL_DEVICE_IDS", "")
    if not chosen and _alone(environment):  # JAX would give it one GPU, and leave the others idle
        ids = ()
    return _checked(
        Place(_NAMES.get(kind, kind), coordinator, processes, process, _numbers(chosen) or tuple(ids or ()))
    )


def _plain(environment: Mapping[str, str]) -> Place | None:
    """The place that plain variables describe. Without a number of processes, JAX's detection completes them."""
    if not environment.get(PROCESSES) and (not environment.get(COORDINATOR) or _scheduled(environment)):
        return None
    in_pod = _POD in environment
    number = environment.get(PROCESS) or environment.get(_POD, "")
    values = {COORDINATOR: environment.get(COORDINATOR, ""), PROCESSES: environment.get(PROCESSES), PROCESS: number}
    for name, value in values.items():
        if not value:
            raise DhelixError(f"{name} is not set: a job needs {COORDINATOR}=host:port, {PROCESSES} and {PROCESS}, or "
                              "--coordinator, --num_processes and --process_id")  # fmt: skip
        if name != COORDINATOR and not value.isdecimal():
            raise DhelixError(f"{name}={value} is not a whole number")
    ids = _numbers(environment.get("JAX_LOCAL_DEVICE_IDS", ""))
    found_by = "Kubernetes" if in_pod else "plain variables"
    return _checked(Place(found_by, str(values[COORDINATOR]), int(values[PROCESSES] or 0), int(number), ids))


def _checked(place: Place) -> Place:
    if not re.fullmatch(r".+:\d+", place.coordinator):
        raise DhelixError(f"the coordinator is {place.coordinator!r}: give host:port of process 0 in {COORDINATOR}")
    if not 0 <= place.process < place.processes:
        raise DhelixError(
            f"this is process {place.process} of {place.processes} by {place.found_by}; processes are numbered from 0 "
            f"to {place.processes - 1}"
        )
    return place


def _nothing(environment: Mapping[str, str]) -> None:
    if _POD in environment:
        raise DhelixError(
            f"this is a pod of an indexed Job, but {COORDINATOR} and {PROCESSES} are not set: use the job of `dhelix "
            "launch --template jobset`, or pip install 'jax[k8s]', so that JAX asks the cluster"
        )
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NODELIST" not in environment:  # a batch script has SLURM_PROCID=0
        raise DhelixError("this is a job of Slurm, but no step of it: start with `srun dhelix launch ...`, or give "
                          "--processes to use this node alone")  # fmt: skip


def _scheduled(environment: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in environment or "OMPI_COMM_WORLD_RANK" in environment


def _alone(environment: Mapping[str, str]) -> bool:
    """Whether the scheduler started one process on each host."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE", "")
    return re.fullmatch(r"1(\(x\d+\))?", tasks) is not None  # "1(x4)": one on each of four


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise DhelixError(f"JAX_LOCAL_DEVICE_IDS={text}: give numbers of GPUs, separated by commas") from None


def local_gpus(environment: Mapping[str, str]) -> list[int]:
    """The numbers of the GPUs that processes of this machine can use, counted among the visible ones."""
    named = visible_gpus(environment)
    return list(range(gpus_here()[1] if named is None else named))
