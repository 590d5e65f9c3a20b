"""`dhelix train` as a user sees it: its output, its files, and its errors."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.launch import cli
from dhelix.launch.train import loop
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.runtime.profiling.traces import traced_modules
from dhelix.tests.machine import PATIENCE

SMALL = ("--layers=2", "--seq=16", "--mesh=dp=2,tp=4", "--microbatches=2", "--steps=4", f"--data={__file__}")


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *arguments])
    return stopped.value.code or 0  # type: ignore[return-value]


def train(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Runs `dhelix train`. Returns its results and progress lines."""
    assert status(*SMALL, "--json", *arguments) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err.splitlines()


def numbers(results: dict[str, Any]) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in results["steps"]]


def test_the_last_step_is_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    results, _ = train(capsys, "--plain", "--microbatches=1", f"--trace={tmp_path}")
    assert len(results["steps"]) == 4
    assert "--xla_gpu_enable_command_buffer=" in os.environ["XLA_FLAGS"]  # otherwise traces name no instructions
    assert "jit_train_step" in {module.name for module in traced_modules.load(tmp_path)}
    assert status(*SMALL, "--steps=1", f"--trace={tmp_path}") != 0
    assert "give --steps 2 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_interleaved_trains_as_plain_does(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train(capsys, "--plain", "--peak_tflops=0.001")
    interleaved, lines = train(capsys, "--interleave")
    assert numbers(plain) == numbers(interleaved)
    assert numbers(plain)[-1][0] < numbers(plain)[0][0]

    assert lines[0].startswith("llama-demo: ") and "2 micro-batches, passes on; dp 2 x tp 4" in lines[0]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 4 and steps[-1].startswith("step 4/4  loss ") and steps[-1].endswith("tokens/s  0 s left")
    assert any(line.startswith("jit_train_step: two strands over 2 layers, 2 micro-batches") for line in lines)
    outcomes = {p["name"]: p["outcome"] for s in interleaved["passes"]["stages"] for p in s["passes"]}
    assert outcomes["strand-duplication"] == "changed"

    assert plain["passes"] is None
    assert plain["mesh"] == {"dp": 2, "tp": 4}
    assert plain["tokens_per_step"] == 4 * 16
    assert plain["tokens_per_second"] == pytest.approx(64 / plain["step_seconds"])
    flops = 64 * (6 * (plain["parameters"] - 256 * 128) + 12 * 2 * 8 * 16 * 16)
    assert plain["mfu"] == pytest.approx(flops / (plain["step_seconds"] * 8 * 1e9))


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_an_unbroken_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = "--plain", f"--checkpoint_dir={tmp_path / 'run'}"
    whole, _ = train(capsys, *run, "--save_every=2")
    shutil.rmtree(tmp_path / "run" / "4")  # as if it had been stopped after step 2
    rest, lines = train(capsys, *run, "--resume", "--warmup=1")
    assert [step["number"] for step in rest["steps"]] == [3, 4]
    assert numbers(rest) == numbers(whole)[2:]
    assert f"resumed from step 2 in {tmp_path / 'run'}" in lines

    shutil.rmtree(tmp_path / "run" / "4")
    again, _ = train(capsys, *run, "--auto_resume", "--warmup=1")
    assert numbers(again) == numbers(rest)

    # Each of these fails with one clear line and leaves the checkpoints unchanged.
    before = sorted((tmp_path / "run").rglob("*"))
    for arguments, says in (
        ([], "holds checkpoints up to step 4; give --resume"),
        (["--resume"], "already holds step 4; give a larger --steps"),
        (["--resume", "--layers=3"], "another model: its model.layers is 2, and this run's is 3"),
        (
            ["--resume", "--preset=llama-8b", "--seq=32"],
            "holds checkpoints of llama-demo, but this run trains llama-8b; give --preset llama-demo",
        ),
    ):
        assert status(*SMALL, *run, *arguments) == 1
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plain", "--interleave"], "exclude each other"),
        (["--plain", "--verify"], "leave out --plain or --verify"),
        (["--plain", "--schedule=dp"], "leave out --plain or --schedule"),
        (["--plain", "--max_in_flight=1"], "leave out --plain or --max_in_flight"),
        (["--pp=2", "--mesh=dp=1,tp=4", "--layers=4", "--microbatches=4", "--skew=1"], "by its own schedule"),
        (["--plain", "--collective_matmul=ring"], "leave out --plain or --collective_matmul"),
        (["--collective_matmul=rings"], "rings"),
        (["--schedule=xla", "--max_in_flight=1"], "use another schedule"),
        (["--plan=/nowhere.json"], "/nowhere.json"),
        (["--profile=/nowhere.json"], "/nowhere.json': no such file"),
        (["--vocab=100"], "the model has 100 tokens, but the tokenizer (bytes) has 256; give --vocab 256"),
        (["--eval_data=/nowhere", "--eval_every=1"], "no file or folder /nowhere"),
        ([f"--eval_data={__file__}"], "--eval_data needs --eval_every"),
        (["--eval_batches=2"], "--eval_batches has no effect without --eval_every"),
        (["--temperature=1"], "--temperature has no effect without --generate"),
        (["--keep=2"], "--keep has no effect without --checkpoint_dir"),
        (["--lr=nan"], "--lr nan is no number to train with"),
        ([f"--export={__file__}/out"], f"--export {__file__}/out cannot be written"),
        ([f"--trace={__file__}"], f"--trace {__file__} cannot be written (File exists)"),
        (["--dtype=float16"], "CPU devices do not compute in float16; give --dtype float32"),
        (["--eval_every=1", "--eval_fraction=2"], "give a part of the documents"),
        (["--tokenizer=/nowhere"], "there is no tokenizer /nowhere"),
        (["--end_token=x"], "--end_token needs --tokenizer"),
        (["--optimizer=adamix"], "is no function of optax"),
        (["--trace_steps=3"], "--trace_steps needs --trace"),
        (["--trace_steps=3-9", "--trace=/tmp"], "give steps from 2"),
        (["--compare_plain"], "give --steps 21 or more"),
        (["--compare_plain", "--plain"], "leave out --plain or --compare_plain"),
        (["--vocab=302"], "vocab = 302 is not divisible by tp = 4"),
        (["--resume"], "--resume needs --checkpoint_dir"),
        (["--resume_step=2", "--checkpoint_dir=/tmp"], "--resume_step needs --resume"),
        (["--save_every=2"], "--save_every needs --checkpoint_dir"),
        (["--auto_resume"], "--auto_resume needs --checkpoint_dir"),
        (["--process_id=0"], "has no effect without --distributed"),
        (["corpus.txt"], "'corpus.txt' is not a flag"),
        (["--mesh=pp=2"], "give sizes of the axes dp, cp and tp"),
        (["--mesh=dp=4,tp=4"], "needs 16 devices, but there are 8; to try it out on N CPU devices, give --cpu_devices"),
        (["--mesh=dp=1,tp=8"], "kv_heads = 4 is not divisible by tp = 8"),
        (["--batch=6"], "a batch of 6 rows is not divisible by 2 micro-batches x dp 2; use a multiple of 4"),
        (["--seq=18"], "is not divisible by tp 4"),
        (["--data=/nowhere"], "no file or folder /nowhere"),
        (["--seq=1000000"], "a row of --seq 1000000 needs 1000001"),
        (["--states=zero9"], "--states zero9: zero9 is neither dp, zero1, "),
        (["--remat=some"], "remat='some' is unknown"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # --trace adds a flag, also if it is refused
    assert status(*SMALL, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dhelix train: ") and says in captured.err and captured.err.count("\n") == 1


def test_a_plan_that_sets_the_order_excludes_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_files.dumps(Plan("llama-demo")))
    assert status(*SMALL, "--schedule=dp", f"--plan={file}") == 1
    assert "leave out --schedule or --plan" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_train_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = train(capsys)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
    shared = ("--json", "--cpu_devices=4", "--distributed", coordinator, "--num_processes=2")
    command = [sys.executable, "-c", "from dhelix.launch import cli; cli.main()", "train", *SMALL, *shared]
    processes = [
        subprocess.Popen([*command, f"--process_id={i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert not outputs[1][0], "process 0 prints the results"
    both = numbers(json.loads(outputs[0][0]))  # no line of Gloo, which connects CPU devices, is among them
    assert both == [pytest.approx(step, rel=1e-5) for step in numbers(one)]


@pytest.mark.slow
def test_strands_that_are_apart_train_as_plain_does(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train(capsys, "--plain", "--layers=4", "--microbatches=4", "--batch=8")
    apart, _ = train(capsys, "--skew=1", "--layers=4", "--microbatches=4", "--batch=8")
    outcomes = {p["name"]: p["outcome"] for s in apart["passes"]["stages"] for p in s["passes"]}
    assert outcomes["strand-ends"] == "changed"
    assert numbers(apart) == [pytest.approx(step, rel=1e-6) for step in numbers(plain)]


@pytest.mark.slow
def test_automatic_sharding_trains_too(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train(capsys, "--plain", "--sharding=fsdp")
    interleaved, lines = train(capsys, "--sharding=fsdp")
    assert any(line.startswith("jit_train_step: two strands over 2 layers, 2 micro-batches") for line in lines)
    assert numbers(interleaved) == [pytest.approx(step, rel=1e-6) for step in numbers(plain)]


def test_interrupted_runs_say_what_is_kept_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    assert status(*SMALL, f"--checkpoint_dir={tmp_path / 'run'}") == 130
    assert capsys.readouterr().out.splitlines()[-1].startswith("Interrupted; there is no complete checkpoint in")


def test_json_of_a_training_that_fails_has_its_steps_and_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: loop.Run, *_: Any) -> None:
        run.taken.append(loop.Step(1, float("nan"), 1.0, 2.0))
        raise DhelixError("the disk\nis full")

    monkeypatch.setattr(loop, "train", fails)
    monkeypatch.setattr(loop.Run, "report", lambda run: None)
    assert status(*SMALL, "--json") == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["error"] == "the disk is full" and captured.err.splitlines()[-1] == "dhelix train: the disk is full"
    assert [step["loss"] for step in found["steps"]] == [None], "JSON has no NaN"


def test_resuming_from_no_folder_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, f"--checkpoint_dir={tmp_path / 'run'}", "--resume") == 1
    assert "leave out --resume to start a new run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
