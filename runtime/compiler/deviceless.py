"""Compiles programs for GPUs on a machine that has no GPU.

    deviceless.prepare_environment()                   # before JAX looks for devices
    mesh = deviceless.mesh({"dp": 2, "tp": 4})         # 8 H200s that this machine does not have
    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct(..., sharding=NamedSharding(mesh, ...)))
    compiled = deviceless.compile(lowered)             # its as_text() and memory_analysis() are as on the GPU

JAX's CUDA plugin compiles for a described target instead of an attached device. It cannot run kernels, so it cannot
tune fusions and products. Instead, it reads the choices that XLA's autotuner made on a real GPU from a file
(`autotune_results`):

                                       result known      result unknown
    matrix product                     as on the GPU     cuBLASLt, which picks the algorithm itself
    other fusions, `compile`           not tuned         not tuned
    other fusions, `tuned.compile`     as on the GPU     not tuned

The target description must agree with the real GPU in the values that XLA hashes for its device key (clock, memory
bandwidth, L2 size). Otherwise XLA finds no results.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from dhelix.errors import DhelixError
from dhelix.runtime.compiler import autotune_results

TARGETS = Path(__file__).parent / "targets"
_GPUS_PER_HOST = 8
_INSTALL = "pip install 'dhelix[compile]'"
_LOAD = "xla_gpu_load_autotune_results_from"
COMPILER_OPTIONS: Mapping[str, str | int | bool] = {
    # There is no device to time kernels on. Above level 0, XLA would also look up all other fusions, and compile
    # unknown fusions one by one. It would also apply untuned.pbtxt to library calls and crash.
    "xla_gpu_autotune_level": 0,
    "xla_candidate_configs_file": str(autotune_results.SHIPPED / "untuned.pbtxt"),
}


class DevicelessError(DhelixError):
    """This machine or environment cannot compile for GPUs."""


def prepare_environment() -> None:
    """Lets the CUDA plugin load on a machine without GPUs. Call this function before JAX looks for devices.

    Without this call, the plugin reports missing libraries on such a machine, and cannot compile. JAX_PLATFORMS=cpu has
    the same effect as this call. On a machine with GPUs, the call does nothing.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def targets() -> list[str]:
    """Names of the GPUs that `topology` accepts."""
    return sorted(path.stem for path in TARGETS.glob("*.pbtxt"))


def topology(target: str = "h200", shape: str = "1x1x4") -> topologies.TopologyDescription:
    """Returns a description of GPUs that this machine need not have.

    Its attribute `devices` lists the GPUs slice by slice and, in a slice, host by host.

    Args:
      target: one of `targets()`, or the path of a file with XLA's `GpuTargetConfigProto` in text form.
      shape: the numbers of slices, hosts per slice and GPUs per host, such as "1x1x4". NVLink connects the GPUs of a
        slice.

    Raises:
      DevicelessError: the target is unknown, the shape is malformed, or there is no CUDA plugin.
    """
    sizes = shape.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise DevicelessError(f"shape is slices x hosts x GPUs, for example '1x1x4', not {shape!r}")
    path = Path(target) if "." in target or "/" in target else TARGETS / f"{target.lower()}.pbtxt"
    if not path.is_file():
        raise DevicelessError(f"GPU {target!r} is unknown: use one of {targets()} or a path")
    return _topology(path.read_text(), shape)


def mesh(
    axes: Mapping[str, int],
    target: str = "h200",
    shape: str | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Returns a mesh of GPUs that this machine need not have. The last axis spans neighbouring GPUs.

    Args:
      axes: size of each axis by name, outermost first: `{"dp": 2, "tp": 4}`.
      target: as in `topology`.
      shape: as in `topology`. The default is one slice of hosts with at most 8 GPUs each.
      axis_type: the type of all axes.

    Raises:
      DevicelessError: `axes` does not map names to whole numbers of at least 1, `axes` and `shape` have different
        numbers of GPUs, or `topology` raises this error.
    """
    sizes = list(axes.values()) if isinstance(axes, Mapping) else [None]
    if not all(isinstance(size, int | np.integer) and size >= 1 and size is not True for size in sizes):
        raise DevicelessError(
            f"axes {axes!r}: give each axis a name and a size of at least 1, such as {{'dp': 2, 'tp': 4}}"
        )
    count = math.prod(axes.values())
    if shape is None:
        per_host = min(count, _GPUS_PER_HOST)
        shape = f"1x{-(-count // per_host)}x{per_host}"
    devices = topology(target, shape).devices
    if len(devices) != count:
        raise DevicelessError(f"axes {dict(axes)} need {count} GPUs, but topology {shape} has {len(devices)}")
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(axis_type,) * len(axes))


def compile(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """Compiles a program for devices of `topology`.

    For matrix products, XLA uses the choices that its autotuner made on a real GPU, if they are known.

    Args:
      lowered: result of `.lower` with arguments that are sharded over a mesh of such devices.
      options: XLA options without leading dashes, such as `xla_gpu_enable_latency_hiding_scheduler=True`. They override
        XLA_FLAGS and COMPILER_OPTIONS.

    Raises:
      DhelixError: the file with the choices is damaged.
    """
    with autotune_results.blaming():
        return lowered.compile({**COMPILER_OPTIONS, **results_option(), **options})


def are_attached(devices: Sequence[Any]) -> bool:
    """Whether this process can run programs on these devices. False for devices that `topology` describes."""
    return bool(devices) and devices[0] in jax.devices()


def results_option() -> dict[str, str]:
    """Returns the XLA option that loads the known autotuning results, as a mapping from name to value.

    The mapping is empty if no results are known, or if XLA_FLAGS already names a file. XLA reads the file at the first
    compilation that has this option, and uses it in all later compilations of the process.
    """
    file = autotune_results.file()
    return {} if file is None or _LOAD in os.environ.get("XLA_FLAGS", "") else {_LOAD: str(file)}


@functools.cache
def _topology(target_config: str, shape: str) -> topologies.TopologyDescription:
    plugins = importlib.util.find_spec("jax_plugins")
    folders = [] if plugins is None else plugins.submodule_search_locations
    if not any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders)):
        raise DevicelessError(f"compiling for GPUs needs JAX's CUDA plugin: {_INSTALL}")
    prepare_environment()
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target_config, topology=shape
        )
    except NotImplementedError:
        raise DevicelessError(
            "JAX looked for devices too early and dropped its CUDA plugin: call "
            "dhelix.runtime.compiler.deviceless.prepare_environment() at the start of the program"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise DevicelessError(f"the CUDA plugin refuses this target: {str(error).splitlines()[0]}") from error
