"""What the machine of this process has: GPUs, and free ports. This module does not import jax.

kind, count = gpus_here()                      # ("NVIDIA H200", 8)
coordinator = f"127.0.0.1:{free_port()}"
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path


def gpus_here() -> tuple[str, int]:
    """The kind of this machine's GPUs (empty if nvidia-smi does not say), and the number of visible GPUs.

    The answer comes from the driver. JAX is not asked, because it would reserve the GPUs for this process.
    """
    kinds = _nvidia_smi()
    count = len(kinds) or sum(1 for p in Path("/dev").glob("nvidia[0-9]*"))
    named = visible_gpus(os.environ)
    return kinds[0] if kinds else "", count if named is None else min(count, named)


def visible_gpus(environment: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES names; None if it is not set."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _nvidia_smi() -> list[str]:
    """Names of the GPUs, according to nvidia-smi; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
