"""The GPUs that a program is for, as this process reaches them."""

from __future__ import annotations

import os

import jax

from dhelix.passes import jax_compat
from dhelix.profiles.hardware import Hardware, describe, gpu_name
from dhelix.runtime.processes import launch_settings
from dhelix.runtime.processes.nodes import gpus_per_node


def unlike(hardware: str, link: str, kind: str) -> str:
    """These GPUs and those of this process, where they differ; a process cannot say whether its node is two."""
    gpu, here = gpu_name(kind), launch_settings.link_of(os.environ)
    if hardware == gpu and link in (here, "two-nodes"):
        return ""
    return f"{hardware} with link {link}, not {gpu} with {here}"


def hardware_of(lowered: jax.stages.Lowered) -> Hardware:
    """The GPUs that a program is for, as this process reaches them."""
    kind = gpu_of(lowered)
    assert kind is not None
    per_node = gpus_per_node(jax_compat.devices(lowered))
    return describe(gpu_name(kind), launch_settings.link_of(os.environ), per_node)


def gpu_of(lowered: jax.stages.Lowered) -> str | None:
    """The kind of GPU that a program is for; None for other devices."""
    device = (jax_compat.devices(lowered) or jax.devices())[0]
    return device.device_kind if device.platform in ("gpu", "cuda") else None
