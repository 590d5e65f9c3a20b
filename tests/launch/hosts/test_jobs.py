"""Four CPU processes below fake schedulers: one curve, and a message that names a process that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dhelix.runtime.processes.this_machine import free_port
from dhelix.tests.machine import PATIENCE

PROGRAM = """
import os, signal, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
if "--itself" in sys.argv:
    jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
batch = jax.jit(lambda: jnp.sin(jnp.arange(32.0)).reshape(8, 4), out_shardings=NamedSharding(mesh, P("x")))()

@jax.jit
def step(w, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - 0.5) ** 2))(w)
    return w - 0.3 * gradient, loss

w = jnp.ones(4)
for n in range(4):
    w, loss = step(w, batch)
    print("loss", jax.process_index(), n, f"{loss:.6f}", flush=True)
    if n == 2 and f"--kill={jax.process_index()}" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 2 and f"--raise={jax.process_index()}" in sys.argv:
        raise ValueError("the program's own")
"""
SCHEDULED = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM", "JAX_PROCESS", "KUBERNETES_", "JOB_", "XLA_FLAGS")


def scheduler(kind: str, number: int, port: int) -> dict[str, str]:
    """The variables of process `number` of four."""
    if kind == "Slurm":
        return {
            "SLURM_JOB_ID": str(port),  # JAX makes the port of it
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
            "SLURM_STEP_TASKS_PER_NODE": "4",
        }
    if kind == "Open MPI":
        return {
            "OMPI_MCA_orte_hnp_uri": f"{port * 2**12}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": str(number),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        }
    found = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": str(number)}
    return found | ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(number)} if kind else {})


def start(folder: Path, variables: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SCHEDULED)}
    environment = {**inherited, "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def job(folder: Path, kind: str, *words: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of four processes that a scheduler starts."""
    port = free_port()
    flags = ("-m", "dhelix", "launch", "--cpu_devices", "1", "--heartbeat", "5")
    launched = [start(folder, scheduler(kind, n, port), *flags, *words) for n in range(4)]
    return [(one.returncode, *said) for one in launched for said in [one.communicate(timeout=PATIENCE)]]


def losses(text: str, process: int) -> list[str]:
    return [words[3] for words in map(str.split, text.splitlines()) if words[:2] == ["loss", str(process)]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of one process with four devices, without dhelix."""
    one = start(tmp_path_factory.mktemp("alone"), {"JAX_NUM_CPU_DEVICES": "4"}, "program.py")
    found = losses(one.communicate(timeout=PATIENCE)[0], 0)
    assert len(found) == 4 and found[0] != found[3]
    return found


@pytest.mark.parametrize(
    "kind", ["Slurm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Open MPI", "Kubernetes", ""))]
)
def test_four_processes_of_a_scheduler_train_one_curve(kind: str, tmp_path: Path, alone: list[str]) -> None:
    first, *others = job(tmp_path, kind, "--mesh", "dp=2,tp=2", "program.py")
    assert first[0] == 0 and losses(first[1], 0) == alone
    assert f"dhelix launch: {kind or 'plain variables'}: process 0 of 4" in first[2]
    assert "4 processes on 1 host with 4 devices (cpu)" in first[2]
    assert all(f"{axis} " in first[2] for axis in ("all devices", "dp", "tp"))
    shown = kind not in ("Slurm", "Open MPI")  # whose output is mixed
    assert [(code, losses(out, n)) for n, (code, out, _) in enumerate(others, 1)] == [(0, alone if shown else [])] * 3


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, 0], ids=["worker", "coordinator"])
def test_after_a_kill_all_sides_end_and_name_the_process(killed: int, tmp_path: Path) -> None:
    ended = job(tmp_path, "Slurm", "program.py", f"--kill={killed}")
    for number, (code, _, said) in enumerate(ended):
        own = number == killed
        assert code == (137 if own else 134), said
        words = f"process {killed} (pid" if own else f"dhelix launch: process {killed} ("  # with the name of its host
        assert words in said and (f"process {number} of 4 was ended by SIGABRT because of it" in said) != own


@pytest.mark.slow
def test_a_program_that_fails_in_one_process_is_named_in_the_others(tmp_path: Path) -> None:
    ended = job(tmp_path, "", "--nocheck", "program.py", "--raise=2")
    assert [code for code, _, _ in ended] == [1] * 4
    assert "dhelix launch" not in ended[2][2].partition("\n")[2]  # its own traceback is all
    for number in (0, 1, 3):
        assert ") failed: ValueError: the program's own; process" in ended[number][2]


@pytest.mark.slow
def test_local_processes_train_one_curve_whether_the_program_joins_itself_or_not(
    tmp_path: Path, alone: list[str]
) -> None:
    for more in ((), ("--itself",)):
        words = ("-m", "dhelix", "launch", "--processes", "2", "--cpu_devices", "2", "program.py", *more)
        one = start(tmp_path, {}, *words)
        out, err = one.communicate(timeout=PATIENCE)
        assert one.returncode == 0 and losses(out, 0) == alone, err


@pytest.mark.slow
def test_a_mesh_of_other_devices_stops_all_with_one_line(tmp_path: Path) -> None:
    one = start(tmp_path, {}, "-m", "dhelix", "launch", "--processes", "2", "--cpu_devices", "1", "--mesh", "dp=3",
                "program.py")  # fmt: skip
    _, err = one.communicate(timeout=PATIENCE)
    assert one.returncode == 1
    assert err == "dhelix launch: --mesh dp 3 has 3 devices, but the job has 2\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, said",
    [
        ("jax.__version__ = '0.11.1'", "hosts disagree on version of jax: "),
        ("jax.config.update('jax_num_cpu_devices', 3)", "hosts disagree on number of devices of a process: "),
    ],
)
def test_processes_that_differ_stop_with_one_line_that_names_them(tmp_path: Path, change: str, said: str) -> None:
    text = f"import json, os, jax\nif json.loads(os.environ['DHELIX_LAUNCH'])['process']: {change}\njax.devices()\n"
    (tmp_path / "differs.py").write_text(text)
    one = start(tmp_path, {}, "-m", "dhelix", "launch", "--processes", "2", "--cpu_devices", "1", "differs.py")
    _, err = one.communicate(timeout=PATIENCE)
    assert one.returncode == 1 and len(err.splitlines()) == 1
    assert err.startswith(f"dhelix launch: {said}") and " in process 1 (" in err
