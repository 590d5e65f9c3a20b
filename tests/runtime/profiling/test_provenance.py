"""Provenance of a profile: hardware and versions, with a stand-in for nvidia-smi."""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path

import jax
import pytest

from dhelix.profiles.profile import Provenance
from dhelix.runtime.profiling.provenance import provenance


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, status: int = 0) -> Provenance:
    """The provenance with an nvidia-smi that prints `output`; None: there is no nvidia-smi."""
    if output is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if output is not None else str(tmp_path))
    return provenance()


def test_what_jax_and_the_driver_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = found(tmp_path, monkeypatch, "GPU-1111, 570.124.06\nGPU-2222, 570.124.06")
    assert (here.gpu, here.gpus) == (jax.devices()[0].device_kind, len(jax.devices()))
    assert (here.driver, here.jax, here.date) == ("570.124.06", jax.__version__, datetime.date.today().isoformat())
    assert len(here.machine) == 8 and "GPU" not in here.machine


def test_a_machine_is_known_again_in_whatever_order_its_gpus_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = found(tmp_path, monkeypatch, "GPU-1, 570\nGPU-2, 570").machine
    assert found(tmp_path, monkeypatch, "GPU-2, 575\nGPU-1, 575").machine == one
    assert found(tmp_path, monkeypatch, "GPU-3, 570\nGPU-1, 570").machine != one


@pytest.mark.parametrize("output", [None, "", "No devices were found", "NVIDIA-SMI has failed, no driver"])
def test_unknown_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    here = found(tmp_path, monkeypatch, output, status=9)
    assert (here.driver, here.machine) == ("", "")


def test_versions_are_those_of_the_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (found(tmp_path, monkeypatch, "").nccl, found(tmp_path, monkeypatch, "").cuda) == ("2.28.9", "")
    del installed["nvidia-nccl-cu13"]
    assert found(tmp_path, monkeypatch, "").nccl == "2.27.3"
