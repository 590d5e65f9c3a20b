"""Reads from the machine which hardware and software a profile is measured on. Unknown fields are empty."""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import importlib.metadata
import os
import shutil
import subprocess

import jax

from dhelix.profiles.profile import Provenance

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_CUDA_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")


def provenance() -> Provenance:
    """Returns the provenance of measurements on the GPUs that JAX sees."""
    devices = jax.devices()
    serials, driver = _nvidia_smi()
    return Provenance(
        gpu=devices[0].device_kind,
        gpus=len(devices),
        date=datetime.date.today().isoformat(),
        driver=driver,
        cuda=_version(_CUDA_PACKAGES),
        nccl=nccl_version(),
        jax=jax.__version__,
        machine=hashlib.sha256(serials.encode()).hexdigest()[:8] if serials else "",
    )


def nccl_version() -> str:
    """The version of the NCCL that this process has loaded, or else of the installed one; "" if it is unknown.

    They differ if another library was loaded first, as by LD_PRELOAD.
    """
    return _loaded_nccl() or _version(_NCCL_PACKAGES)


def _loaded_nccl() -> str:
    """The version of the loaded library; "" if there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return ""
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)):
        return ""
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def _nvidia_smi() -> tuple[str, str]:
    """Returns the UUIDs of all GPUs as one text, and the version of the driver. Unknown values are empty."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", ""
    command = [program, "--query-gpu=uuid,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [] if found.returncode else found.stdout.splitlines()  # nvidia-smi prints errors to stdout, too
    rows = [line.split(", ") for line in lines if line.count(", ") == 1]
    return " ".join(sorted(row[0] for row in rows)), rows[0][1] if rows else ""
