"""`dhelix simulate`: what it shows, and what it refuses before it compiles anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli

Simulate = Callable[..., tuple[int, str, str]]
SMALL = ("--preset=llama-8b", "--layers=2", "--seq=1024", "--vocab=1024", "--mesh=dp=2,tp=4", "--microbatches=2")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Runs `dhelix simulate`; returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["simulate", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


def _check(found: dict[str, Any]) -> None:
    """Parts add up to the step, and the MFU is that of the model's operations on the A40's peak."""
    for step in found["steps"]:
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        assert step["guessed"] == pytest.approx(1.0) and 0.0 < step["mfu"] < 1.0 and step["memory"] > 1e8
        assert step["mfu"] == pytest.approx(found["model_flops"] / (found["gpus"] * 149.7e12 * step["seconds"]))


@pytest.mark.deviceless
def test_a_cluster_without_measured_times(simulate: Simulate) -> None:
    status, text, _ = simulate(*SMALL, "--cluster=dhelix-a40", "--systems=blocking,xla", "--json")
    found = json.loads(text)
    assert status == 0
    assert (found["gpus"], found["mesh"]["dp"], found["mesh"]["tp"]) == (8, 2, 4)
    assert found["cluster"]["nodes"] == 1 and "nothing was measured on A40" in found["measured_times"]
    _check(found)
    waiting, scheduled = found["steps"]
    assert waiting["parts"]["exposed"] > waiting["communication"]  # and each collective waits for its last GPU
    assert scheduled["communication"] == pytest.approx(waiting["communication"])


@pytest.mark.slow
@pytest.mark.deviceless
def test_strands_hide_what_the_plain_step_waits_for(simulate: Simulate) -> None:
    status, text, _ = simulate(*SMALL, "--cluster=dhelix-a40", "--systems=megatron,wavelet,strands", "--json")
    found = json.loads(text)
    assert status == 0
    _check(found)
    megatron, _, strands = found["steps"]
    assert strands["parts"]["exposed"] < megatron["parts"]["exposed"]


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_search_writes_what_runs_the_best(simulate: Simulate, tmp_path: Path) -> None:
    flags = ("--preset=llama-8b", "--layers=2", "--seq=1024", "--vocab=1024", "--nodes=1", "--batch=16")
    found = []
    for processes in (1, 2):
        status, text, _ = simulate(
            "--search", *flags, "--mesh=tp=4", "--remat=none", "--pp=1", "--simulations=4", f"--processes={processes}",
            f"--out={tmp_path / 'out'}", "--json",
        )  # fmt: skip
        assert status == 0
        found.append(json.loads(text))
    assert found[0] == found[1]
    first, *others = found[0]["ranked"]
    assert first["axes"]["tp"] == 4 and all(first["step"]["seconds"] <= one["step"]["seconds"] for one in others)
    assert all(0.0 < one["step"]["mfu"] < 1.0 for one in found[0]["ranked"])
    assert {name for name, lost in found[0]["why"]["schedule"].items() if lost["behind"] == 0.0} == {first["system"]}
    script = (tmp_path / "out" / "launch.sh").read_text()
    assert f"--mesh dp={first['axes']['dp']}" in script and "dhelix launch --processes 8" in script
    assert (tmp_path / "out" / "plan.json").exists() == (first["system"] == "strands")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which model? give --preset NAME"),
        (("--preset=llama-8b", "--cluster=moon"), "cluster 'moon' is unknown; give a JSON file, or one of"),
        (
            ("--preset=llama-8b", "--mesh=dp=16,tp=8"),
            "--mesh dp=16,tp=8 needs 128 GPUs, but h100-infiniband has 64; give --nodes 16",
        ),
        (("--preset=llama-8b", "--mesh=dp=3,tp=3"), "9 GPUs do not fill nodes of 8"),
        (("--preset=llama-8b", "--cluster=CLUSTER", "--mesh=tp=8"), "dhelix cannot compile for L40S"),
        (("--preset=llama-8b", "--systems=fast"), "system 'fast' is unknown; choose from blocking"),
        (("--preset=llama-8b", "--systems="), "--systems is empty"),
        (("--preset=llama-8b", "--constants=between_gb_per_second"), "give NAME=NUMBER"),
        (("--preset=llama-8b", "--constants=between_gb_per_second=5e9"), "check the unit"),
        (("--preset=llama-8b", "--constants=speed=5"), "there is no constant 'speed'"),
        (("--preset=llama-8b", "--nodes=0"), "nodes"),
        (("--preset=llama-8b", "--slowest_gpu=0.5"), "slowest_gpu"),
        (("--preset=llama-8b", "--profile=missing.json"), "missing.json"),
        (("--preset=llama-8b", "--simulations=5"), "--simulations needs --search"),
        (("--search",), "which model? give --preset NAME"),
        (("--search", "--preset=llama-8b", "--systems=wavelet"), "--search compares xla and strands, not 'wavelet'"),
        (("--search", "--preset=llama-8b", "--mesh=tp"), "give sizes of axes, such as tp=8"),
        (("--search", "--preset=llama-8b", "--mesh=tp=3"), "no way to run llama-8b"),
        (("--search", "--preset=llama-8b", "--cluster=CLUSTER"), "dhelix cannot compile for L40S"),
    ],
)
def test_bad_input_is_one_clear_error(
    simulate: Simulate, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"gpu": "L40S", "nodes": 1}')
    status, _, errors = simulate(*(argument.replace("CLUSTER", str(cluster)) for argument in arguments))
    assert status in (1, 2) and words in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) <= 2
