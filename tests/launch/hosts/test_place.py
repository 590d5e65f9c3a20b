"""Which process of which job this is, from the variables of fake schedulers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.hosts import place

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[003-006]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "job-workers-0-0.job:8476",
    "JAX_NUM_PROCESSES": "2",
}
PLAIN = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "KUBERNETES_", "JOB_")
    for name in [name for name in os.environ if name.startswith(names)]:
        monkeypatch.delenv(name)
    yield


def find(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> place.Place | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return place.find(os.environ)


@pytest.mark.parametrize(
    "variables, said",
    [
        (SLURM, "Slurm: process 5 of 8, coordinator node003:61517, device 1 of this host"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, "coordinator node003:61517, all devices of this host"),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, "device 2,3 of this host"),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "other:5"}, "Slurm: process 5 of 8, coordinator other:5"),
        (OPEN_MPI, "Open MPI: process 2 of 4, coordinator 10.96.0.1:"),
        (POD, "Kubernetes: process 1 of 2, coordinator job-workers-0-0.job:8476, all devices of this host"),
        (PLAIN, "plain variables: process 2 of 3, coordinator a:1"),
        (SLURM | PLAIN, "plain variables: process 2 of 3"),
    ],
)
def test_each_scheduler_is_found(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], said: str) -> None:
    assert said in str(find(monkeypatch, variables))


def test_no_scheduler_and_a_pod_of_no_job_are_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, {}) is None
    assert find(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


@pytest.mark.parametrize(
    "variables, said",
    [
        (PLAIN | {"JAX_PROCESS_ID": "3"}, "process 3 of 3"),
        (PLAIN | {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID=two is not a whole number"),
        (PLAIN | {"JAX_COORDINATOR_ADDRESS": "host"}, "give host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES is not set"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "--template jobset"),
        ({"SLURM_JOB_ID": "77"}, "srun dhelix launch"),
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "srun dhelix launch"),  # a batch script
        (OPEN_MPI | {"OMPI_VERSION": "5.0.3"}, "requires mpi4py"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], said: str) -> None:
    with pytest.raises(DhelixError, match=said):
        find(monkeypatch, variables)


def test_gpus_are_counted_among_the_visible_ones() -> None:
    assert place.local_gpus({"CUDA_VISIBLE_DEVICES": "4,5,7"}) == [0, 1, 2]
    assert place.local_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
