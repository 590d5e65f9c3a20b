"""The step of a dump: the GPU whose times it gets, and the notes about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.plan import program as plan_step
from dhelix.launch.profile import step as profile_step

TEXT = "HloModule jit_f, is_scheduled=true\n\nENTRY main {\n  ROOT a = f32[8] parameter(0)\n}\n"
NAME = "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"


def write(folder: Path, name: str = NAME, gpu: str = "") -> Path:
    (folder / name).write_text(f"{TEXT}what a shell said\n")
    if gpu:
        (folder / "module_0001.jit_f.gpu_target_config.pbtxt").write_text(gpu)
    return folder / name


def test_the_gpu_of_the_dump_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path, gpu='name: "NVIDIA H100 80GB HBM3"')
    step = profile_step.of_dump(file)
    assert step.hardware == "H100"
    assert step.notes == ("the text from line 6 on is not part of the module",)
    step = profile_step.of_dump(file, "A100")
    assert (step.hardware, step.notes[-1]) == ("A100", "compiled for H100; times are for an A100")
    program = plan_step.of_dump(file, "A100")
    assert (program.hardware, program.notes) == (step.hardware, step.notes)


def test_nothing_is_taken_for_an_h200_in_silence(tmp_path: Path) -> None:
    step = profile_step.of_dump(write(tmp_path, "step.hlo"))
    assert step.hardware == "H200" and "times are for an H200" in step.notes[-1]


CARD = """name: "NVIDIA H100 PCIe"
core_count: 114  clock_rate_ghz: 1.755  memory_bandwidth: 2039000000000  device_memory_size: 85000000000
cuda_compute_capability { major: 9 }
"""


def test_a_gpu_that_nothing_describes_is_asked_for(tmp_path: Path) -> None:
    """Profiles and plans need a GPU that dhelix knows or the caller names. `inspect` takes the dump's description."""
    file = write(tmp_path, gpu=CARD)
    with pytest.raises(
        DhelixError,
        match="was compiled for H100-PCIe, which dhelix does not know; choose a GPU for the times with --hardware",
    ):
        profile_step.of_dump(file)
    assert profile_step.of_dump(file, "H100-PCIe").hardware == "H100-PCIe"  # as on a machine that has this GPU


def test_a_dump_of_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="was compiled for CPU, but profiles are for GPUs"):
        profile_step.of_dump(write(tmp_path, "module_0001.jit_f.cpu_after_optimizations.txt"))
