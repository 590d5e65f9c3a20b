"""`dhelix flags`: what it recommends is accepted by this jaxlib, and what is wrong with a shell is said."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

import pytest

from dhelix.launch import cli
from dhelix.launch.hosts.variables import checks, command
from dhelix.launch.hosts.variables.checks import Fault
from dhelix.profiles.hardware import LINKS
from dhelix.profiles.launching import effects
from dhelix.profiles.launching.reasons import REASONS
from dhelix.profiles.profile import FASTEST, SETTINGS
from dhelix.runtime.processes import launch_settings
from dhelix.tests.quick import slow_after

SYMMETRIC = "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"


def dhelix_flags(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["flags", *arguments])
    return stopped.value.code or 0  # type: ignore[return-value]


@pytest.mark.smoke
def test_every_variable_has_a_reason_and_this_jaxlib_knows_every_flag() -> None:
    every = [command.variables_of(name) for name in SETTINGS]
    flags = " ".join(dict.fromkeys(v.get("XLA_FLAGS", "") for v in every))
    assert not checks.unknown({"XLA_FLAGS": flags})
    names = {name for v in every for name in (*v, *checks.xla_flags(v.get("XLA_FLAGS", "")))} - {"XLA_FLAGS"}
    assert names <= REASONS.keys()


@pytest.mark.parametrize("link", LINKS)
def test_the_shell_commands_give_the_launch_setting(link: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_flags("--link", link, "--shell") == 0
    script = f"{capsys.readouterr().out}\nenv"
    said = subprocess.run(["bash", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    parts = (line.partition("=") for line in said.stdout.splitlines())
    environment = {name: value for name, _, value in parts}
    assert launch_settings.nearest(SETTINGS, environment)[0] == FASTEST[link]


def test_reasons_and_measured_effects_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_flags("--link", "no-p2p") == 0
    text = capsys.readouterr().out
    (plain,) = [one for one in effects.of("no-p2p", "small-buffers") if one.program == "plain"]
    assert plain.median > 1.1 and f"plain steps {plain.median:.2f} x" in text
    assert "NCCL_BUFFSIZE" in text and "host memory" in text and "export NCCL_BUFFSIZE=262144" in text
    assert dhelix_flags("--link", "two-nodes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"] == "sockets" and found["environment"]["NCCL_SOCKET_NTHREADS"] == "4"


@pytest.mark.parametrize(
    ("environment", "link", "said"),
    slow_after(
        3,
        [
            ({}, "nvlink", []),
            ({"NCCL_CTA_POLICY": "2", "XLA_FLAGS": SYMMETRIC}, "nvlink", []),
            ({"NCCL_CTA_POLICY": "2"}, "nvlink", ["NCCL_CTA_POLICY=2: copy engines need --xla_gpu_exp"]),
            ({"XLA_FLAGS": SYMMETRIC}, "nvlink", [f"{SYMMETRIC}: symmetric memory alone gains nothing"]),
            (
                {"NCCL_CTA_POLICY": "2", "XLA_FLAGS": SYMMETRIC},
                "no-p2p",
                ["NCCL_CTA_POLICY=2: copy engines need peer-to"],
            ),
            ({"NCCL_BUFFSIZE": "262144"}, "nvlink", ["NCCL_BUFFSIZE=262144: small buffers are for links"]),
            ({"NCCL_BUFFSIZE": "262144"}, "no-p2p", []),
            ({"CUDA_LAUNCH_BLOCKING": "1"}, "nvlink", ["CUDA_LAUNCH_BLOCKING=1: nothing runs at once"]),
            ({"CUDA_LAUNCH_BLOCKING": "0"}, "nvlink", []),
        ],
        several=True,
    ),
)
def test_harmful_values_are_said(environment: Mapping[str, str], link: str, said: list[str]) -> None:
    found = checks.check(environment, link)
    assert len(found) == len(said) and all(map(str.startswith, map(str, found), said))


def test_unknown_renamed_and_repeated_flags_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--xla_gpu_graph_level=0 --xla_no_such_flag --xla_cpu_enable_fast_math=1 --xla_cpu_enable_fast_math=0"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert dhelix_flags("--check") == 1
    text = capsys.readouterr().out
    assert "stops the job: --xla_gpu_graph_level: is now xla_gpu_enable_command_buffer" in text
    assert "stops the job: --xla_no_such_flag: this jaxlib does not know it" in text
    assert "--xla_cpu_enable_fast_math: it is given 2 times; the last one counts" in text


def test_a_good_shell_has_no_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("XLA_FLAGS", "DHELIX", *REASONS):
        monkeypatch.delenv(name, raising=False)
    assert dhelix_flags("--check", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"link": "nvlink", "faults": []}
    assert str(Fault("a", "b")) == "a: b"


def test_wrong_arguments_are_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_flags("--check", "--shell") == 1
    assert "leave out --shell" in capsys.readouterr().err
    assert dhelix_flags("nvlink") == 1
    assert "'nvlink' is not a flag" in capsys.readouterr().err
