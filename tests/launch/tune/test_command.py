"""`dhelix tune` with a stand-in for the worker: what it asks for, failures, and what it shows and writes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli
from dhelix.launch.profile import workers
from dhelix.launch.tune import processes
from dhelix.launch.tune.process_search import CHANNELS, CHUNK, PLACE, VARIABLES, search, single
from dhelix.launch.tune.tables import Row, drawn
from dhelix.launch.tune.worker import COMPILES, patience
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.passes.tuning.measurements import LimitReached
from dhelix.profiles.channels.nccl_setting import NcclSetting

WORKER = """
import json, os, sys, time
from pathlib import Path
request = json.load(open(sys.argv[1]))
def tell(**what): print(json.dumps(what), flush=True)
log = Path(os.environ["SEEN"])
names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS", "NCCL_P2P_DISABLE")
names += ("JAX_PLATFORMS",)
seen = {name: os.environ[name] for name in names if name in os.environ}
with log.open("a") as file: file.write(json.dumps({"environment": seen, "request": request}) + "\\n")
tell(what="compiles the step", patience=60)
records = Path(request["records"])
mode = os.environ.get("WORKER_MODE", "")
failed = "failed" in records.read_text() if records.is_file() else False
if mode and not failed and (request["minutes"] or mode == "early"):
    if mode != "early":
        records.write_text(json.dumps({"program": "p", "settings": "s", "began": True}) + "\\n")
    tell(what="all collectives ring ll", patience=1)
    if mode == "hang": time.sleep(60)
    if mode == "fits":
        tell(patience=60)
        time.sleep(1.5)
    if mode == "refused": tell(error="ncclInternalError", crashed=True); sys.exit(1)
    if mode != "fits": sys.exit("Fatal: the card is on fire")
faster = {"NCCL_BUFFSIZE=262144": 0.9, "NCCL_MIN_NCHANNELS=16": 0.95}
default = 0.1
for name, value in seen.items(): default *= faster.get(f"{name}={value}", 1.0)
tunes = request["minutes"] > 0
plan = Path(os.environ["PLAN"]).read_text()
Path(request["out"]).write_text(plan)
section = json.loads(plan)["tuning"]
if not tunes and not request["check"]: section["collectives"] = []
key = "all-gather 512B 2x1 groups=1 nccl"
seconds = {"NCCL's defaults": default}
maps = [{"channels": n, "chunk": 4194304, "communication": 0.01 / n, "computation": 0.02 + n / 1e3,
         "whole": max(0.01 / n, 0.02 + n / 1e3)} for n in (1, 2, 4, 8)]
if tunes:
    default *= 1.03  # a process that has traced steps is slower
    seconds = {"NCCL's defaults": default}
    seconds |= {"one setting for all": 0.98 * default, "each alone": 1.01 * default, "dhelix": 0.95 * default}
elif request["check"]:
    seconds["dhelix"] = float(os.environ.get("CHECKED", 0.95)) * default
body = {"body": "0" * 16, "name": "both strands: 4 collectives", "runs": 12, "kind": "ring simple",
        "collectives": [["0" * 16, key, 1]], "default": {"collectives": [0.01], "computations": [0.02], "whole": 0.024},
        "map": maps}
tell(finished={"seconds": seconds, "gain": 1 / 0.95, "noise": 0.003, "measured": 31 if tunes else 0, "spent": 12.0,
               "iterations": ["round 1: the step's order, 31 measurements, 95.0 ms a step"] if tunes else [],
               "sends": False, "notes": ["settings that failed count as slow: one"] if failed else [],
               "bodies": [body] if tunes else [], "tuning": section})
"""
ROW = TunedCollective("0" * 16, "all-gather 512B 2x1 groups=1 nccl", 1, NcclSetting("ring", "simple", 4))
TARGET = PlanTarget.of("H100", "no-p2p", "connections1", 2)
PLAN = Plan("a step", TARGET, tuning=CollectiveSettings("2.28", 2, (ROW,), 1e5, 0.95e5))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(workers, "gpus_here", lambda: ("NVIDIA H100", 2))
    plan_files.save(PLAN, tmp_path / "a plan")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PLAN", str(tmp_path / "a plan"))
    for name in ("WORKER_MODE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)


def dhelix_tune(tmp_path: Path, *arguments: object, settings: str = "--settings=connections1") -> int:
    given = ["--preset=llama-demo", "--records", str(tmp_path / "records"), *filter(None, [settings])]
    given += [] if any("--implementations" in str(one) for one in arguments) else ["--implementations=nccl"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", *given, *map(str, arguments)])
    return stopped.value.code or 0  # type: ignore[return-value]


def seen(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]


def test_implementations_are_measured_under_the_fastest_launch_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A form that is not faster is not chosen; one that is goes on, and the user reads how to train with it."""
    script, out = tmp_path / "worker.py", tmp_path / "plan.json"
    for seconds, chosen in ((1.0, {}), (0.9, {"collective_matmul": "ring"})):
        form = f"{{'ring': {seconds}}}.get(request['options'].get('collective_matmul'), 1)"
        tunes = 'tunes = request["minutes"] > 0'
        assert tunes in WORKER
        script.write_text(WORKER.replace(tunes, f"{tunes}\ndefault *= {form}"))
        (tmp_path / "seen").unlink(missing_ok=True)
        given = "--implementations=nccl,ring,auto", "--noprocess", "--force", "--out", out
        assert dhelix_tune(tmp_path, *given, settings="--settings=default,connections1") == 0
        asked = [run["request"]["options"].get("collective_matmul") for run in seen(tmp_path)]
        assert asked[:4] == [None, None, "ring", "auto"]
        assert seen(tmp_path)[-1]["request"]["options"] == chosen
        assert ("--collective_matmul ring" in capsys.readouterr().out) == bool(chosen)


def test_the_process_is_tuned_first_then_each_collective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "plan.json", tmp_path / "map.png"
    assert dhelix_tune(tmp_path, "--link=no-p2p", "--skew=1", "--out", out, "--picture", png) == 0
    runs = seen(tmp_path)
    assert all(run["environment"]["NCCL_P2P_DISABLE"] == "1" for run in runs)
    assert all(run["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" for run in runs)
    assert [run["request"]["minutes"] > 0 for run in runs] == [False] * (len(runs) - 2) + [True, False]
    assert runs[-1]["environment"]["NCCL_BUFFSIZE"] == "262144"
    assert runs[-1]["environment"]["NCCL_MIN_NCHANNELS"] == "16" and "NCCL_NTHREADS" not in runs[-1]["environment"]
    assert runs[-1]["request"]["options"] == {"skew": 1} and runs[-1]["request"]["preset"]["preset"] == "llama-demo"
    text = capsys.readouterr().out
    assert "81.2 ms instead of 100.0 ms: 1.231 x, of which 1.193 x by settings of the whole process and 1.032 x" in text
    assert "both strands: 4 collectives" in text and "ring" in text
    assert plan_files.load(out).tuning is not None and png.stat().st_size


def test_the_processes_that_measure_look_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert dhelix_tune(tmp_path, "--noprocess") == 0
    assert all("JAX_PLATFORMS" not in run["environment"] for run in seen(tmp_path))


def test_what_each_round_gained_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_tune(tmp_path, "--noprocess", "--noorder", "--out", tmp_path / "plan.json") == 0
    text = capsys.readouterr().out
    assert "Round 1: the step's order, 31 measurements, 95.0 ms a step." in text and "dhelix train --plan" in text
    assert seen(tmp_path)[-1]["request"]["order"] is False


def test_results_are_also_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_tune(tmp_path, "--noprocess", "--json") == 0
    before, searched, checked = json.loads(capsys.readouterr().out)
    assert before["setting"] == "connections1" and list(before["seconds"]) == ["NCCL's defaults"]
    assert checked["seconds"]["dhelix"] == pytest.approx(0.095) and searched["tuning"] == checked["tuning"]
    assert [row["searched"] for row in (before, searched, checked)] == [False, True, False]


def test_the_fastest_launch_setting_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_tune(tmp_path, "--noprocess", "--link=no-p2p", settings="") == 0
    runs = seen(tmp_path)
    assert all(run["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" for run in runs)
    assert [run["environment"].get("NCCL_BUFFSIZE") for run in runs] == [None, *3 * ["262144"]]


@pytest.mark.parametrize("mode", ["hang", "crash", "refused"])
def test_a_measurement_that_fails_is_marked_and_tuning_goes_on(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKER_MODE", mode)
    assert dhelix_tune(tmp_path, "--noprocess") == 0
    text = capsys.readouterr().out
    whys = {"hang": "no answer for 1 s", "refused": "ncclInternalError"}
    why = whys.get(mode, "ended with status 1 (Fatal: the card is on fire)")
    assert why in text and "settings that failed count as slow" in text
    assert [run["request"]["minutes"] > 0 for run in seen(tmp_path)] == [False, True, True, False]


def test_the_picture_shows_the_row_that_was_chosen() -> None:
    def row(setting: str, seconds: float, channels: tuple[int, ...]) -> Row:
        result = {"seconds": {"dhelix": seconds}, "bodies": [{"map": [{"channels": n} for n in channels]}]}
        return Row(setting, {}, result)

    tried, fast, untried = row("connections1", 0.1, (1, 2)), row("connections1", 0.09, ()), row("default", 0.2, ())
    assert drawn([untried, fast, tried]) is tried and drawn([untried, fast]) is fast


def test_what_was_found_is_measured_again_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that searches is slower than one that trains. So what it found is measured in another one."""
    out = tmp_path / "plan.json"
    assert dhelix_tune(tmp_path, "--noprocess", "--out", out) == 0
    assert seen(tmp_path)[-1]["request"]["check"] and "95.0 ms instead of 100.0 ms: 1.053 x" in capsys.readouterr().out
    monkeypatch.setenv("CHECKED", "1.0")
    assert dhelix_tune(tmp_path, "--noprocess", "--out", out) == 0
    assert "100.0 ms instead of 100.0 ms: 1.000 x" in capsys.readouterr().out


def test_fits_of_models_are_no_silence_of_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKER_MODE", "fits")
    assert dhelix_tune(tmp_path, "--noprocess") == 0
    assert "no answer" not in capsys.readouterr().out and len(seen(tmp_path)) == 3


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("compiles the step", COMPILES),
        ("round 2: compiles the step in another order of 3 computations", COMPILES),
        ("orders the step for the tuned collectives", COMPILES),
        ("the settings found so far, in the new order", 90.0),
        ("all collectives ring ll", 90.0),
    ],
)
def test_only_measurements_have_little_patience(what: str, seconds: float) -> None:
    assert patience(what, 90.0) == seconds


def test_a_failure_outside_of_a_measurement_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKER_MODE", "early")
    opened = json.dumps({"program": "p", "settings": "s", "began": True}) + "\n"  # by a command that was interrupted
    (tmp_path / "records").write_text(opened)
    assert dhelix_tune(tmp_path) == 1
    assert "setting connections1: the process ended with status 1" in capsys.readouterr().err
    assert (tmp_path / "records").read_text() == opened and len(seen(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--settings=fast"], "--settings fast is unknown"),
        (["--mesh=tp=4"], "the step needs 4 GPUs, but there are 2"),
        (["--plan=none.json"], "none.json: cannot be read"),
        (["--out=/nowhere/plan.json"], "there is no such folder"),
        (["--out=/tmp"], "/tmp is a folder"),
        (["--picture=map.jpeg"], "map.jpeg"),
        (["--records=/tmp"], "/tmp: measurements cannot be read"),
        (["--records=/tmp", "--force"], "/tmp: measurements cannot be read"),
        (["more"], "is not a flag"),
    ],
)
def test_wrong_arguments_are_one_clear_error(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dhelix_tune(tmp_path, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_gpus_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "gpus_here", lambda: ("", 0))
    assert dhelix_tune(tmp_path) == 1
    assert "this machine has none; run it there" in capsys.readouterr().err


def test_buffers_and_channels_move_together() -> None:
    def evaluate(environment: Mapping[str, str]) -> float:
        if not environment:
            return 1.0
        buffer, channels = (
            int(environment.get(name, most)) for name, most in (("NCCL_BUFFSIZE", 1 << 22), (CHANNELS, 4))
        )
        return 0.9 + 0.1 * abs(math.log2(buffer * channels / (8 << 20))) + 0.02 * abs(math.log2(channels / 16))

    found = search(evaluate)
    assert dict(found.environment) == {"NCCL_BUFFSIZE": "524288", CHANNELS: "16", "NCCL_MIN_P2P_NCHANNELS": "32"}
    assert found.seconds == pytest.approx(0.9) and len(found.tried) <= 12
    hand_found = {"NCCL_BUFFSIZE": "262144", CHANNELS: "16", "NCCL_MIN_P2P_NCHANNELS": "32"}
    assert hand_found not in [dict(environment) for environment, _ in found.tried[:4]]  # it is no start


def test_larger_chunks_of_sends_are_kept_where_they_are_faster() -> None:
    def evaluate(environment: Mapping[str, str]) -> float:
        small = 0.1 * ("NCCL_BUFFSIZE" in environment) - 0.05 * (environment.get("NCCL_NTHREADS") == "256")
        return 1.0 + small - 0.04 * (CHUNK in environment) + 0.01 * (PLACE in environment)

    found = search(evaluate, first=lambda: single("no-p2p", sends=True))
    assert dict(found.environment) == {CHUNK: "524288", "NCCL_NTHREADS": "256"}
    assert [dict(tried) for tried, _ in found.tried[:3]] == [{}, {CHUNK: "524288"}, {CHUNK: "524288", PLACE: "1"}]
    assert all(CHUNK in tried for tried, _ in found.tried[1:])
    kept = search(evaluate, fixed={CHUNK}, first=lambda: single("no-p2p", sends=True))
    assert not any(CHUNK in tried for tried, _ in kept.tried)
    assert single("no-p2p", sends=False) == ({PLACE: "1"},) and single("nvlink", sends=True) == ()


def test_the_search_over_processes_keeps_what_the_user_set_and_survives_failures() -> None:
    tried: list[Mapping[str, str]] = []

    def evaluate(environment: Mapping[str, str]) -> float:
        tried.append(environment)
        if environment.get("NCCL_MIN_NCHANNELS") == "32":
            return math.inf
        return 1.0 - 0.1 * ("NCCL_MIN_NCHANNELS" in environment)

    found = search(evaluate, fixed={"NCCL_BUFFSIZE"})
    assert dict(found.environment) == {CHANNELS: "8", "NCCL_MIN_P2P_NCHANNELS": "16"} and found.seconds == 0.9
    assert not any("NCCL_BUFFSIZE" in environment for environment in tried) and len(found.tried) == len(tried)

    def late(environment: Mapping[str, str]) -> float:
        if environment:
            raise LimitReached("late")
        return 1.0

    assert dict(search(late).environment) == {}

    def in_the_descent(environment: Mapping[str, str]) -> float:
        tried.append(environment)
        if len(tried) > 6:
            raise LimitReached("late")
        return 1.0 - 0.1 * (environment.get("NCCL_BUFFSIZE") == "524288" and environment.get(CHANNELS) == "8")

    tried.clear()
    assert search(in_the_descent).environment["NCCL_BUFFSIZE"] == "524288"
