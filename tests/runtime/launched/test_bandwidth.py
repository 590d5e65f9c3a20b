"""All-gathers over the axes of a mesh: what is measured, and where the profile has its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.launched import bandwidth


def gpus(number: int, of_process: int) -> list[Any]:
    """Devices that look like GPUs, in processes of `of_process` devices."""
    return [
        SimpleNamespace(id=n, process_index=n // of_process, platform="gpu", device_kind="NVIDIA H200")
        for n in range(number)
    ]


def way(devices: list[Any], axes: dict[str, int], name: str) -> bandwidth.Way:
    """An axis of a mesh; a stand-in, because JAX makes no mesh of these devices."""
    grid = np.array(devices, dtype=object).reshape(tuple(axes.values()))
    mesh: Any = SimpleNamespace(devices=grid, axis_names=tuple(axes), shape=axes, size=len(devices))
    return bandwidth.Way(name, mesh)


def test_ways_are_all_devices_and_the_axes_of_several() -> None:
    devices = jax.devices("cpu")[:8]
    found = bandwidth.ways(devices, {"dp": 2, "pp": 1, "tp": 4})
    assert [(one.name, one.size) for one in found] == [("all devices", 8), ("dp", 2), ("tp", 4)]
    with pytest.raises(DhelixError, match="dp 3 x tp 2 has 6 devices, but the job has 8"):
        bandwidth.ways(devices, {"dp": 3, "tp": 2})


def test_an_axis_is_measured_while_all_groups_communicate() -> None:
    for one in bandwidth.ways(jax.devices("cpu")[:4], {"dp": 2, "tp": 2}):
        assert bandwidth.measured(one) > 0
        assert bandwidth.expected(one) is None  # CPUs have no profile


def test_the_profile_says_what_to_expect_of_gpus_of_one_host() -> None:
    inner = bandwidth.expected(way(gpus(4, 4), {"all devices": 4}, "all devices"))
    assert inner is not None and 50e9 < inner < 1000e9


def test_an_axis_across_hosts_is_slower_than_one_in_a_host() -> None:
    devices = gpus(8, 4)
    inner, outer = (bandwidth.expected(way(devices, {"dp": 2, "tp": 4}, name)) for name in ("tp", "dp"))
    assert inner is not None and outer is not None and outer < inner
