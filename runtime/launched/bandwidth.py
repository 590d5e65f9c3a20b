"""Measures how fast an all-gather is over all devices and over each axis of a mesh, and what the profile says.

    axes = ways(jax.devices(), {"dp": 2, "tp": 4})     # all devices, dp, tp
    measured(axes[1])                                  # 212e9: bytes/s that each device receives
    expected(axes[1])                                  # 240e9, or None for devices without a profile

A mesh has the devices in JAX's order, outermost axis first. All processes must measure the same ways in the same order.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import CostModel
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import gpu_name
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.processes import launch_settings, nodes

_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20  # of a whole buffer on each device
_REPEATS, _CALLS = 5, 4  # timed repeats, and calls in each of them


@dataclass(frozen=True)
class Way:
    """An axis of a mesh, or all devices.

    Attributes:
      name: name of the axis.
      mesh: the mesh, which has this axis.
    """

    name: str
    mesh: Mesh

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]

    @property
    def bytes(self) -> int:
        """Size of the gathered buffer on one device, a multiple of 4 x `size`."""
        whole = _CPU_BYTES if self.mesh.devices.flat[0].platform == "cpu" else _GPU_BYTES
        return whole // (4 * self.size) * 4 * self.size

    def bandwidth(self, seconds: float) -> float:
        """Bytes/s that each device receives if the all-gather takes this long."""
        return self.bytes * (self.size - 1) / self.size / seconds


def ways(devices: Sequence[Any], axes: Mapping[str, int]) -> list[Way]:
    """All devices as one axis, and the axes of more than one device, outermost first.

    Raises DhelixError if the axes do not multiply to the number of devices.
    """
    if axes and math.prod(axes.values()) != len(devices):
        words = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise DhelixError(f"--mesh {words} has {math.prod(axes.values())} devices, but the job has {len(devices)}")
    grid = np.array(devices, dtype=object)
    found = [Way("all devices", Mesh(grid, ("all devices",)))]
    mesh = Mesh(grid.reshape(tuple(axes.values())), tuple(axes)) if len(axes) > 1 else None
    return found + [Way(name, mesh) for name, size in axes.items() if mesh is not None and size > 1]


def measured(way: Way) -> float:
    """Bytes/s that each device receives in an all-gather over the axis, while all groups communicate. The median."""
    spec = PartitionSpec(way.mesh.axis_names)
    elements = way.bytes // 4 // way.size * way.mesh.size
    zeros = functools.partial(jax.lax.broadcast, np.float32(0), (elements,))  # jnp.zeros would ask for local devices
    value = jax.jit(zeros, out_shardings=NamedSharding(way.mesh, spec))()
    gather = jax.jit(jax.shard_map(
        lambda x: jax.lax.all_gather(x, way.name, tiled=True),
        mesh=way.mesh, in_specs=spec, out_specs=spec, check_vma=False,
    ))  # fmt: skip
    gather(value).block_until_ready()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            done = gather(value)
        done.block_until_ready()
        times.append((time.perf_counter() - start) / _CALLS)
    return way.bandwidth(statistics.median(times))


def expected(way: Way) -> float | None:
    """The same by the profile of these GPUs under this process's launch setting; None if there is none."""
    devices = list(way.mesh.devices.flat)
    if devices[0].platform not in ("gpu", "cuda"):
        return None
    try:
        gpu, link = gpu_name(devices[0].device_kind), launch_settings.link_of(os.environ)
        profile = storage.find(gpu, link)
        setting = None if profile is None else launch_settings.nearest(profile.sections, os.environ)[0]
        if setting is None:
            return None
        of_node = nodes.gpus_per_node(devices)
        model = CostModel.find(gpu, link, setting, of_node)
    except DhelixError:  # a profile that cannot be used must not stop a job
        return None
    key = CollectiveKey("all-gather", way.bytes, *_shape(way, of_node), len(devices) // way.size, model.implementation)
    return way.bandwidth(model.estimator.collective(key).seconds)


def _shape(way: Way, of_node: int) -> tuple[int, int]:
    """GPUs of a node that are in one group, and nodes of a group. `of_node` is 0 if all devices share a node."""
    places = np.arange(way.mesh.size).reshape(way.mesh.devices.shape)
    group = np.moveaxis(places, way.mesh.axis_names.index(way.name), 0).reshape(way.size, -1)[:, 0]
    count = len({place // of_node for place in group}) if of_node else 1
    return way.size // count, count
