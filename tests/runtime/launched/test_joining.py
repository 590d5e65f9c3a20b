"""What a launched process hears: whose task it is, how it joins, and which errors another process caused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from dhelix.runtime.launched import ending, joining, task
from dhelix.runtime.launched.task import Task

TASK = Task("host0:1", 4, 2, (2,), heartbeat=9, mesh={"dp": 4})


def test_a_task_is_that_of_the_launchers_own_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(task.VARIABLE, raising=False)
    assert task.mine() is None
    told = replace(TASK, launcher=os.getppid())
    monkeypatch.setenv(task.VARIABLE, told.dumps())
    started = replace(told, pid=os.getpid())
    assert task.mine() == started and task.mine() == started
    monkeypatch.setenv(task.VARIABLE, replace(told, pid=1).dumps())  # its parent has ended, and the launcher adopted it
    assert task.mine() is None
    monkeypatch.setenv(task.VARIABLE, replace(TASK, launcher=os.getpid()).dumps())  # meant for a parent of ours
    assert task.mine() is None


def test_what_a_program_leaves_out_is_the_launchers() -> None:
    assert joining.arguments(TASK, (), {}) == {
        "coordinator_address": "host0:1", "num_processes": 4, "process_id": 2, "local_device_ids": [2],
        "heartbeat_timeout_seconds": 9,
    }  # fmt: skip
    changed = joining.arguments(TASK, (None, None), {"local_device_ids": [0, 1], "heartbeat_timeout_seconds": 30})
    assert (changed["coordinator_address"], changed["local_device_ids"]) == ("host0:1", [0, 1])
    assert changed["heartbeat_timeout_seconds"] == 30


def test_a_job_of_the_programs_own_stays_its_own() -> None:
    assert joining.arguments(TASK, ("other:5", 2), {"process_id": 0}) == {
        "coordinator_address": "other:5", "num_processes": 2, "process_id": 0, "heartbeat_timeout_seconds": 9,
    }  # fmt: skip
    assert "num_processes" not in joining.arguments(TASK, (), {"cluster_detection_method": "mpi4py"})


@pytest.mark.parametrize(
    "error, lost",
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 10 bytes"), False),
        (ValueError("hello"), False),
        (KeyError("NCCL"), False),
        (None, False),
    ],
)
def test_errors_that_another_process_may_have_caused(error: Exception | None, lost: bool) -> None:
    assert ending.lost_another(error) == lost
