"""Finds out what a dumped module was compiled for, and chooses the GPU whose times are used.

XLA writes `*.gpu_target_config.pbtxt`, the target description, next to a module that it compiles for a GPU.

    what the dump says                                                  GPU whose times are used
    the target description names a GPU that `hardware.py` describes     that GPU
    the target description describes another GPU                        a description made from it, and a note
    the file's name gives only the compute capability, as in sm_9.0a    a GPU of that capability, and a note
    no information, or compiled for CPU                                 an H200, and a note
    another backend: TPU, ROCm                                          refused, unless the user names a GPU
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware
from dhelix.profiles.hardware import Hardware

DEFAULT = hardware.H200
_SAY = "name another GPU with --hardware"
ASK = f"which dhelix does not know; choose a GPU for the times with --hardware: {', '.join(hardware.GPUS)}"
_ALIKE = 0.15  # nominal and reported memory may differ by this fraction (GB or GiB, and memory that the driver takes)

# Compute capability -> the GPU to assume if only the capability is known, and words for all GPUs with the capability.
_OF_CAPABILITY: dict[tuple[int, int], tuple[Hardware, str]] = {
    (8, 0): (hardware.A100, "A100 and A800"),
    (8, 6): (hardware.A40, "A40, A10 and others"),
    (8, 9): (hardware.L40S, "L40S, L4 and others"),
    (9, 0): (hardware.H200, "H100 and H200"),
    (10, 0): (hardware.B200, "B200 and GB200"),
}
_TOLD_BY_MEMORY = {(9, 0): (hardware.H100, hardware.H200)}  # GPUs of one capability whose memory tells them apart
# Dense bf16 operations per multiprocessor and clock cycle: peak / (cores * boost clock), from NVIDIA's data sheets.
_OPERATIONS = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
               (10, 3): 8192, (12, 0): 1024}  # fmt: skip
_NVLINK = {7: 25e9, 8: 25e9, 9: 25e9, 10: 50e9}  # bytes per second of a link in one direction, by major capability
_REACHED = 330 / 450  # fraction of NVLink's bandwidth that NCCL reaches, on H100
_FIELD = re.compile(r'(\w+):\s*(?:"([^"\n]*)"|([^\s{}"]+))')


@dataclass(frozen=True)
class Target:
    """What a dump says about the target of its module.

    Attributes:
      backend: GPU, CPU, TPU or ROCm.
      gpu: name of the GPU in the dump; empty if the dump does not name a GPU.
      hardware: the GPU whose times are used; None if the dump does not say enough, or if dhelix does not know `gpu`.
      notes: sentences on where `hardware` comes from, if the user must know it.
    """

    backend: str = "GPU"
    gpu: str = ""
    hardware: Hardware | None = None
    notes: tuple[str, ...] = ()


def read(file: Path, module: HloModule) -> Target:
    """The target of a dumped module, according to the target description, the file's name and the module's content."""
    backend = _backend(file, module)
    if backend != "GPU":
        return Target(backend)
    description = _description(file)
    if description:
        return _described(description)
    capability = re.search(r"\bsm_(\d+)\.?(\d)", file.name)
    if not capability:
        return Target()
    number = int(capability[1]), int(capability[2])
    if number not in _OF_CAPABILITY:
        return Target(gpu=f"a GPU of compute capability {capability[1]}.{capability[2]}")
    gpu, who = _OF_CAPABILITY[number]
    words = f"{file.name} gives only the compute capability {capability[1]}.{capability[2]}, which fits {who}"
    return Target(hardware=gpu, notes=(f"{words}: times are for {_a(gpu)}; {_SAY}",))


def choose(file: Path, module: HloModule, chosen: Hardware | None) -> tuple[Hardware, tuple[str, ...]]:
    """The GPU whose times are used, and notes on this choice for the user.

    Args:
      chosen: the GPU that the user has named, which is always taken; None if the user has named none.

    Raises:
      DhelixError: the user has named no GPU, and the module is for TPUs, ROCm or a GPU that dhelix does not know.
    """
    target = read(file, module)
    name = _a(chosen or DEFAULT)
    if target.backend == "CPU":
        words = "compiled for CPU, where no collective is asynchronous: compile for GPUs to see overlap"
        return chosen or DEFAULT, (f"{words}; times are for {name}",)
    if target.backend != "GPU":
        if chosen is None:
            raise DhelixError(
                f"{file} was compiled for {target.backend}, but only times of NVIDIA GPUs are known; name a GPU with "
                "--hardware to use its times, or compile the step for GPUs"
            )
        return chosen, (f"compiled for {target.backend}; times are for {name}",)
    if chosen is not None:
        other = target.gpu and target.gpu.partition("-")[0] != chosen.name.partition("-")[0]
        return chosen, (f"compiled for {target.gpu}; times are for {name}",) if other else ()
    if target.hardware is not None:
        return target.hardware, target.notes
    if target.gpu:
        raise DhelixError(f"{file} was compiled for {target.gpu}, {ASK}")
    return DEFAULT, (f"{file.name} does not say which GPU it was compiled for: times are for {name}; {_SAY}",)


def of_kind(kind: str) -> tuple[Hardware, tuple[str, ...]]:
    """The GPU whose times are used for devices of JAX's kind `kind`; a default and a note if the kind is unknown."""
    gpu = hardware.ALL.get(hardware.gpu_name(kind))
    if gpu is not None:
        return gpu, ()
    return DEFAULT, (f"compiled for {kind or 'no device'}, which dhelix does not know: times are for {_a(DEFAULT)}",)


def of_facts(facts: Mapping[str, Any]) -> tuple[Hardware, tuple[str, ...]]:
    """The GPU whose times are used for a GPU that the profiler describes by numbers, and notes on this choice.

    Raises:
      DhelixError: the GPU is not NVIDIA's, or dhelix does not know one of its compute capability.
    """
    vendor = str(facts.get("device_vendor", "Nvidia"))
    if vendor.lower() != "nvidia":
        raise DhelixError(f"only times of NVIDIA GPUs are known, and this is one of {vendor}; {_SAY}")
    capability = int(facts.get("compute_cap_major", 0)), int(facts.get("compute_cap_minor", 0))
    if capability == (0, 0):
        return DEFAULT, (f"the trace does not say which GPU ran: times are for {_a(DEFAULT)}; {_SAY}",)
    if capability not in _OF_CAPABILITY:
        raise DhelixError(f"the trace is of a GPU of compute capability {capability[0]}.{capability[1]}, {ASK}")
    gpu, _ = _OF_CAPABILITY[capability]
    if memory := float(facts.get("memory_size", 0)):
        gpu = min(_TOLD_BY_MEMORY.get(capability, (gpu,)), key=lambda one: abs(one.memory_bytes - memory))
    return gpu, ()


def _a(gpu: Hardware) -> str:
    """The name of the GPU with "a" or "an" before it."""
    return f"{'an' if gpu.name[0] in 'AHLR' else 'a'} {gpu.name}"


def _backend(file: Path, module: HloModule) -> str:
    if "cpu_after" in file.name:
        return "CPU"
    if re.search(r"\bgfx[0-9a-f]+", file.name):
        return "ROCm"
    calls = (i for c in module.computations for i in c.instructions if i.opcode == "custom-call")
    if any(_is_tiled(i.shape) for i in module.entry.instructions) or any(
        call.proto.custom_call_target == "tpu_custom_call" for call in calls
    ):
        return "TPU"
    platform = _fields(_description(file)).get("platform_name", "CUDA")
    return {"CUDA": "GPU", "ROCM": "ROCm"}.get(platform.upper(), platform)


def _is_tiled(shape: Any) -> bool:
    """Whether a layout is tiled, such as `{1,0:T(8,128)}`; only TPUs have such layouts."""
    return bool(shape.layout.tiles) or any(map(_is_tiled, shape.tuple_shapes))


def _description(file: Path) -> str:
    """The text of `module_0001.jit_step.gpu_target_config.pbtxt` next to the module; empty if there is none."""
    parts = file.name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        beside = file.with_name(f"{'.'.join(parts[:count])}.gpu_target_config.pbtxt")
        if beside.is_file():
            text = beside.read_text(errors="replace")
            return "".join(c if c.isprintable() or c == "\n" else " " for c in text)  # names in it are shown
    return ""


def _fields(description: str) -> dict[str, str]:
    """All fields in a protobuf text message, also nested ones. If a name occurs twice, the first value counts."""
    lines = [line for line in description.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, str] = {}
    for name, text, word in _FIELD.findall("\n".join(lines)):
        found.setdefault(name, text or word)
    return found


def _described(description: str) -> Target:
    fields = _fields(description)
    kind = fields.get("name") or fields.get("device_description_str", "")
    name = hardware.gpu_name(kind) if kind else "unknown"
    memory = _number(fields, "device_memory_size")
    same_chip = [gpu for gpu in hardware.ALL.values() if gpu.name in hardware.GPUS and _is_card(gpu, name)]
    for gpu in sorted(same_chip, key=lambda gpu: abs(gpu.memory_bytes - memory)):
        if not memory or abs(gpu.memory_bytes - memory) < _ALIKE * memory:
            return Target(gpu=gpu.name, hardware=gpu)
    return _derived(fields, description, name, kind)


def _is_card(gpu: Hardware, name: str) -> bool:
    """Whether `name` may mean this GPU. `A100` may mean the 80 GB card or `A100-40GB`, which have the same chip."""
    return gpu.name == name or re.fullmatch(rf"{re.escape(name)}-\d+GB", gpu.name) is not None


def _derived(fields: dict[str, str], description: str, name: str, kind: str) -> Target:
    """A target whose hardware is made from the numbers in the target description.

    Other values are those of an H100 if the GPU has NVLink, else those of an A40. If a number is missing, the target
    has no hardware.
    """
    block = re.search(r"cuda_compute_capability\s*\{([^}]*)\}", description)
    version = _fields(block[1]) if block else {}
    capability = int(_number(version, "major")), int(_number(version, "minor"))
    cores, clock = _number(fields, "core_count"), _number(fields, "clock_rate_ghz")
    bandwidth, memory = _number(fields, "memory_bandwidth"), _number(fields, "device_memory_size")
    operations = _OPERATIONS.get(capability, 0)
    words = kind or f"a GPU of compute capability {'.'.join(map(str, capability))}"
    if not (cores and clock and bandwidth and memory and operations):
        return Target(gpu=words)
    if name in hardware.ALL:  # the GPU is a part of a known GPU, or has another memory size
        name = f"{name}-{memory / 1e9:.0f}GB"
    peak = cores * clock * 1e9 * operations / (2 if "GeForce" in kind else 1)
    links = _number(fields, "active_links") * _NVLINK.get(capability[0], 0.0)
    like = replace(hardware.H100, intra_bandwidth=links * _REACHED) if links else hardware.A40
    gpu = replace(like, name=name, peak_flops=peak, memory_bandwidth=bandwidth, memory_bytes=memory, like="")
    over = f"{links * _REACHED / 1e9:.0f} GB/s over NVLink" if links else "PCIe"
    note = (
        f"no measured or published times of {words}: times are estimated from its target description ({cores:.0f} "
        f"cores at {clock:g} GHz, {bandwidth / 1e12:.2f} TB/s) and from {over}; {_SAY}"
    )
    return Target(gpu=name, hardware=gpu, notes=(note,))


def _number(fields: dict[str, str], name: str) -> float:
    """The value of a field as a number; 0 if the field is missing or no number."""
    try:
        return float(fields.get(name, 0))
    except ValueError:
        return 0.0
