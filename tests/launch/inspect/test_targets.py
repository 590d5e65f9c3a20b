"""The GPU whose times a dump gets. The dump's own description comes first, and a note names an assumed GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect import targets
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware
from dhelix.profiles.hardware import Hardware

PCIE = hardware.ALL["A40"].intra_bandwidth
MODULE = HloModule.from_text("HloModule m, is_scheduled=true\nENTRY main {\n  ROOT a = f32[8,128] parameter(0)\n}\n")
TILED = HloModule.from_text(
    "HloModule m, is_scheduled=true\nENTRY main {\n"
    "  a = f32[8,128]{1,0:T(8,128)} parameter(0)\n  ROOT t = (f32[8,128]{1,0:T(8,128)}) tuple(a)\n}\n"
)
CONFIG = """# As XLA writes it.
gpu_device_info {
  core_count: %d
  clock_rate_ghz: %g
  memory_bandwidth: %d
  device_memory_size: %d
  cuda_compute_capability { major: %d minor: %d }
  device_interconnect_info { active_links: %d }
  device_vendor: "NVIDIA Corporation"
  name: "%s"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""


def config(
    name: str, memory: float = 85e9, cores: int = 100, capability: tuple[int, int] = (9, 0), links: int = 0
) -> str:
    return CONFIG % (cores, 2.0, 1000e9, memory, *capability, links, name)


def choose(
    folder: Path,
    description: str = "",
    name: str = "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt",
    chosen: Hardware | None = None,
    module: HloModule = MODULE,
) -> tuple[Hardware, tuple[str, ...]]:
    if description:
        (folder / "module_0001.jit_f.gpu_target_config.pbtxt").write_text(description)
    return targets.choose(folder / name, module, chosen)


@pytest.mark.parametrize(
    ("description", "name"),
    [
        (config("NVIDIA H200", 151.4e9), "H200"),
        (config("NVIDIA H100 80GB HBM3"), "H100"),
        (config("NVIDIA A100-SXM4-80GB"), "A100"),
        (config("NVIDIA A100-SXM4-40GB", 42.4e9), "A100-40GB"),
        (config("NVIDIA B200", 191e9, capability=(10, 0)), "B200"),
        (config("NVIDIA GB200", 198e9, capability=(10, 0)), "GB200"),
        (config("NVIDIA L40S", 47.7e9, capability=(8, 9)), "L40S"),
        (config("NVIDIA A10G", 23.6e9, capability=(8, 6)), "A10G"),
        ('device_description_str: "NVIDIA H800"', "H800"),
    ],
)
def test_the_gpu_that_the_dump_describes(tmp_path: Path, description: str, name: str) -> None:
    assert choose(tmp_path, description) == (hardware.ALL[name], ())


@pytest.mark.parametrize(
    ("description", "name", "peak", "link"),
    [
        (config("NVIDIA GeForce RTX 5090", 34e9, 170, (12, 0)), "GeForce-RTX-5090", 170 * 2e9 * 512, PCIE),
        (config("NVIDIA H100 PCIe", 85e9, 114), "H100-PCIe", 114 * 2e9 * 4096, PCIE),
        (config("NVIDIA H200", 71e9, 60, links=18), "H200-71GB", 60 * 2e9 * 4096, 330e9),  # a slice of the GPU
        (config("NVIDIA B300", 288e9, 160, (10, 3), 18), "B300", 160 * 2e9 * 8192, 660e9),
    ],
)
def test_a_gpu_that_nobody_described_is_described_by_its_dump(
    tmp_path: Path, description: str, name: str, peak: float, link: float
) -> None:
    gpu, (note,) = choose(tmp_path, description)
    assert (gpu.name, gpu.memory_bandwidth, gpu.like) == (name, 1000e9, "")
    assert gpu.peak_flops == pytest.approx(peak) and gpu.intra_bandwidth == pytest.approx(link)
    assert "are estimated from its target description" in note and "name another GPU with --hardware" in note


@pytest.mark.parametrize(
    ("name", "gpu", "note"),
    [
        (
            "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt",
            "H200",
            "9.0, which fits H100 and H200: .* an H200",
        ),
        (
            "module_0001.jit_f.sm_8.0_gpu_after_optimizations.hlo.pb",
            "A100",
            "8.0, .*: times are for an A100",
        ),
        ("module_0001.jit_f.sm_10.0a_gpu_after_optimizations.txt", "B200", "10.0, .*: times are for a B200"),
        (
            "step.hlo",
            "H200",
            "^step.hlo does not say which GPU it was compiled for: times are for an H200; name another GPU",
        ),
    ],
)
def test_without_a_description_a_note_says_whose_times(tmp_path: Path, name: str, gpu: str, note: str) -> None:
    found, notes = choose(tmp_path, name=name)
    assert found.name == gpu
    assert len(notes) == 1 and re.search(note, notes[0])


@pytest.mark.parametrize(
    ("description", "name", "what"),
    [
        ("", "module_0001.jit_f.sm_12.0_gpu_after_optimizations.txt", "a GPU of compute capability 12.0"),
        ('name: "NVIDIA T1000"\ncuda_compute_capability { major: 7 minor: 5 }', "x.txt", None),
        (config("NVIDIA X900", capability=(13, 0)), "module_0001.jit_f.after_optimizations.txt", "NVIDIA X900"),
    ],
)
def test_a_gpu_that_cannot_be_described_is_asked_for(
    tmp_path: Path, description: str, name: str, what: str | None
) -> None:
    if what is None:  # the description is of another module, so it does not count
        assert choose(tmp_path, description, name)[0].name == "H200"
        return
    with pytest.raises(
        DhelixError,
        match=f"was compiled for {what}, which dhelix does not know; choose a GPU for the times with --hardware",
    ):
        choose(tmp_path, description, name)
    assert choose(tmp_path, description, name, hardware.H100) == (
        hardware.H100,
        (f"compiled for {what}; times are for an H100",),
    )


def test_the_users_choice_counts(tmp_path: Path) -> None:
    assert choose(tmp_path, config("NVIDIA H100 80GB HBM3"), chosen=hardware.H100_NO_P2P)[1] == ()
    gpu, notes = choose(tmp_path, chosen=hardware.A40)
    assert gpu is hardware.A40 and notes == ("compiled for H100; times are for an A40",)
    assert choose(tmp_path, name="step.hlo", chosen=hardware.A40) == (hardware.A40, ())


@pytest.mark.parametrize(
    ("name", "description", "module", "backend"),
    [
        ("step.hlo", "", TILED, "TPU"),
        ("module_0001.jit_f.gfx942_gpu_after_optimizations.txt", "", MODULE, "ROCm"),
        ("module_0001.jit_f.gpu_after_optimizations.txt", 'platform_name: "ROCM"', MODULE, "ROCm"),
    ],
)
def test_another_backend_is_refused_unless_a_gpu_is_named(
    tmp_path: Path, name: str, description: str, module: HloModule, backend: str
) -> None:
    with pytest.raises(DhelixError, match=f"was compiled for {backend}, but only times of NVIDIA GPUs are known; name"):
        choose(tmp_path, description, name, module=module)
    gpu, notes = choose(tmp_path, description, name, hardware.H100, module)
    assert gpu is hardware.H100 and notes == (f"compiled for {backend}; times are for an H100",)


def test_devices_in_hand() -> None:
    assert targets.of_kind("NVIDIA H100 80GB HBM3") == (hardware.H100, ())
    gpu, (note,) = targets.of_kind("NVIDIA H100 PCIe")
    assert gpu is hardware.H200 and "compiled for NVIDIA H100 PCIe, which dhelix does not know" in note


def test_a_dump_of_cpus_is_shown_and_said_to_be_one(tmp_path: Path) -> None:
    gpu, (note,) = choose(tmp_path, name="module_0001.jit_f.cpu_after_optimizations.txt")
    assert gpu is hardware.H200 and "compiled for CPU" in note and "times are for an H200" in note


@pytest.mark.parametrize(
    ("facts", "gpu"),
    [
        ({"compute_cap_major": 9, "compute_cap_minor": 0, "memory_size": 85_000_000_000}, "H100"),
        ({"compute_cap_major": 9, "compute_cap_minor": 0, "memory_size": 150_000_000_000}, "H200"),
        ({"compute_cap_major": 8, "compute_cap_minor": 0, "memory_size": 85_000_000_000}, "A100"),
        ({}, "H200"),
    ],
)
def test_the_gpu_of_a_trace(facts: dict[str, int], gpu: str) -> None:
    found, notes = targets.of_facts(facts)
    assert found.name == gpu
    assert bool(notes) is (not facts)


def test_gpus_of_traces_that_have_no_times() -> None:
    for facts, words in (({"device_vendor": "AMD"}, "AMD"), ({"compute_cap_major": 7}, "capability 7.0")):
        with pytest.raises(DhelixError, match=words):
            targets.of_facts(facts)
