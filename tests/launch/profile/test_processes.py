"""The processes that measure. A stand-in records its environment and request, and behaves as WORKER_MODE says."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.launch import cli
from dhelix.launch.profile import processes as profile_processes
from dhelix.launch.profile import workers
from dhelix.launch.profile.worker import Request
from dhelix.launch.profile.workers import Worker
from dhelix.passes.hlo import HloModule
from dhelix.profiles.files import storage
from dhelix.profiles.profile import Profile, Provenance, Section
from dhelix.tests.machine import slowness

WORKER = """
import json, os, sys, time
request = json.load(open(sys.argv[1]))
def tell(**what): print(json.dumps(what), flush=True)
print("a library says hello", flush=True)
two = request["link"] == "two-nodes"
node = request["node"]["process"] if two else 0
names = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "NCCL_HOSTID", "XLA_FLAGS",
         "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
seen = {name: os.environ[name] for name in names if name in os.environ}
open(f"{request['out']}.{node}", "w").write(json.dumps({"environment": seen, "request": request}))
tell(done=0, total=2, what="operators alone")
tell(done=1, total=2, what="pairs")
mode = os.environ.get("WORKER_MODE")
if mode == "error": tell(error="no room"); sys.exit(1)
if mode == "crash": sys.exit("Traceback\\nFatal: the card is on fire\\n\\n")
if mode == "slow": time.sleep(60)
if request["keep"] and request["module"]:
    open(os.path.join(request["keep"], "step.hlo.pb"), "wb").write(open(request["module"], "rb").read())
tell(finished=True)
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the profile. The stand-in writes its records next to it."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(profile_processes, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(workers, "gpus_here", lambda: ("NVIDIA H200", 4))
    for name in ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "WORKER_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "out.json"


def seen(out: Path, node: int = 0) -> dict[str, Any]:
    return json.loads(Path(f"{out}.{node}").read_text())


def measure(out: Path, setting: str = "default", link: str = "nvlink", gpus: int | None = None) -> list[Any]:
    told: list[Any] = []
    request = Request(setting, str(out), link, module="step.txt")
    assert profile_processes.measure(request, lambda *what: told.append(what) or True, gpus)
    return told


def test_progress_and_settings_reach_each_other(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    before = dict(os.environ)
    assert measure(out, "connections1") == [(0, 2, "operators alone"), (1, 2, "pairs")]
    assert os.environ == before
    environment = seen(out)["environment"]
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    choices = out.with_suffix(".autotune.pbtxt")
    flags = ["--xla_mine=1", "--xla_gpu_enable_command_buffer=", f"--xla_gpu_dump_autotune_results_to={choices}"]
    *given, shipped = environment["XLA_FLAGS"].split()
    assert given == flags and shipped.startswith("--xla_gpu_load_autotune_results_from=")
    choices.write_text("version: 3")
    measure(out)
    assert f"--xla_gpu_load_autotune_results_from={choices}" in seen(out)["environment"]["XLA_FLAGS"].split()
    assert "NCCL_P2P_DISABLE" not in environment and "CUDA_VISIBLE_DEVICES" not in environment
    assert seen(out)["request"]["module"] == "step.txt"


def test_a_link_without_peer_to_peer_and_part_of_the_gpus(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(out, link="no-p2p", gpus=2)
    assert seen(out)["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert seen(out)["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    measure(out, gpus=2)
    assert seen(out)["environment"]["CUDA_VISIBLE_DEVICES"] == "7,5"


def test_two_nodes_are_two_processes(out: Path) -> None:
    measure(out, link="two-nodes")
    nodes = [seen(out, 0), seen(out, 1)]
    assert [n["request"]["node"]["local_device_ids"] for n in nodes] == [[0, 1], [2, 3]]
    assert len({n["environment"]["NCCL_HOSTID"] for n in nodes}) == 2
    assert len({n["request"]["node"]["coordinator"] for n in nodes}) == 1


PLACE = {"JAX_COORDINATOR_ADDRESS": "host0:4000", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}


def test_a_process_of_a_job_starts_the_worker_of_its_place(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    arguments = ("--collectives", "--out", out, "--settings=default,connections1")
    assert dhelix_profile(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""  # process 0 speaks for all
    found = seen(out)
    assert found["request"]["node"] == {
        "coordinator": "host0:4002",  # of the second worker
        "processes": 3,
        "process": 1,
        "local_device_ids": None,
    }
    assert not set(PLACE) & set(found["environment"])
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2")
    assert dhelix_profile(*arguments) == 0
    assert "connections1" in capsys.readouterr().out
    assert seen(out)["request"]["node"]["local_device_ids"] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset=llama-demo", "--mesh=tp=4"), "needs 4 GPUs, but the job has 12; give a larger --mesh"),
        (("--collectives", "--link=two-nodes"), "emulates nodes on one machine, but this is a job"),
    ],
)
def test_a_job_measures_with_all_its_gpus(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, message: str
) -> None:
    for name, value in {**PLACE, "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert dhelix_profile(*arguments, "--out", out) == 1
    assert message in capsys.readouterr().err


def test_a_batch_script_of_slurm_measures_alone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert dhelix_profile("--collectives", "--out", out) == 0
    assert seen(out)["request"]["node"] is None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("error", "setting default: no room"),
        ("crash", "ended with status 1 .Fatal: the card is on fire.*continues from"),
    ],
)
def test_what_goes_wrong_is_said(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str) -> None:
    monkeypatch.setenv("WORKER_MODE", mode)
    with pytest.raises(DhelixError, match=message):
        measure(out)


@pytest.mark.parametrize("how", ["told to stop", "interrupted"])
def test_no_process_is_left_behind(out: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("WORKER_MODE", "slow")
    started = []
    monkeypatch.setattr(profile_processes, "Worker", lambda *a: started.append(Worker(*a)) or started[-1])

    def stop(done: int, total: int, what: str) -> bool:
        if done and how == "interrupted":
            raise KeyboardInterrupt
        return not done

    begun = time.monotonic()
    request = Request("default", str(out), module="step.txt")
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            profile_processes.measure(request, stop)
    else:
        assert not profile_processes.measure(request, stop)
    assert time.monotonic() - begun < 30 * slowness()
    assert [worker.process.poll() is not None for worker in started] == [True]


def dhelix_profile(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["profile", *map(str, arguments)])
    return stopped.value.code or 0  # type: ignore[return-value]


STEP = """HloModule jit_step, is_scheduled=true

ENTRY main {
  x = bf16[8192,8192]{1,0} parameter(0)
  ROOT all-reduce.1 = bf16[8192,8192]{1,0} all-gather(x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}
}
"""


def test_the_command_asks_for_each_setting_in_turn(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage.save(Profile("H200", "nvlink", (Provenance("NVIDIA H200", 4, jax="0.3"),)), out)
    assert dhelix_profile("--collectives", "--out", out, "--settings=default,connections1", "--force") == 0
    text = capsys.readouterr().out
    assert "default 1/2  pairs" in text and "connections1 1/2  pairs" in text
    assert "measured with jax 0.3" in text
    request = seen(out)["request"]
    assert (request["setting"], request["collectives"], request["again"]) == ("connections1", True, True)


def test_the_command_stops_in_time(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**7, 10)).__next__)
    assert dhelix_profile("--preset=llama-demo", "--mesh=tp=4", "--out", out, "--budget_s=5") == 0
    assert f"Stopped after 5 s (--budget_s); {out} holds what was measured" in capsys.readouterr().out
    assert seen(out)["request"]["preset"]["preset"] == "llama-demo"
    assert seen(out)["request"]["preset"]["plain"] is True


def test_one_setting_fails_and_the_others_go_on(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = profile_processes.measure

    def measure(request: Request, *rest: Any) -> bool:
        monkeypatch.setenv("WORKER_MODE", "error" if request.setting == "default" else "")
        return original(request, *rest)

    monkeypatch.setattr(profile_processes, "measure", measure)
    step, keep = tmp_path / "step.txt", tmp_path / "kept"
    step.write_bytes(HloModule.from_text(STEP.replace("4,5,6,7", "4").replace(",4}", "}")).to_bytes())
    step = step.rename(tmp_path / "step.pb")
    assert dhelix_profile(step, "--out", out, "--settings=default,connections1", "--keep", keep) == 1
    shown = capsys.readouterr()
    assert shown.err == "dhelix profile: setting default: no room\n"
    assert "Setting connections1: the step runs" in shown.out
    assert (keep / "connections1" / "step.hlo.pb").is_file()


def test_explain_measures_nothing(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_profile("--collectives", "--out", out, "--explain") == 0
    text = capsys.readouterr().out
    assert "nothing is measured. On 4 x H200" in text
    assert "270 collectives for the tables" in text
    assert not Path(f"{out}.0").exists()


def test_more_gpus_than_there_are(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_profile("--preset=llama-demo", "--mesh=dp=2,tp=4", "--out", out) == 1
    assert "the step needs 8 GPUs, but there are 4" in capsys.readouterr().err
    step = tmp_path / "step.txt"
    step.write_text(STEP.replace("[8192,8192]{1,0} all", "[65536,8192]{1,0} all"))
    assert not Path(f"{out}.0").exists()
    dhelix_profile(step, "--out", out)
    assert "The step is for 8 GPUs, but there are 4: only its operators" in capsys.readouterr().out
    assert seen(out)["request"]["module"] == str(step)


def test_a_file_of_other_hardware_stays_as_it_is(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage.save(Profile("H100", "nvlink").with_section(Section("default", gap_seconds=1e-6)), out)
    before = out.read_bytes()
    assert dhelix_profile("--collectives", "--out", out) == 1
    assert "holds a profile of H100" in capsys.readouterr().err
    assert out.read_bytes() == before and not Path(f"{out}.0").exists()
