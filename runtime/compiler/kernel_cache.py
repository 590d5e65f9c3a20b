"""Lets a process that compiles many programs generate the code of each kernel once.

    compiled = deviceless.compile(lowered, **kernel_cache.options(lowered))

Most of the time of a compilation for a GPU goes into the code of kernels, and programs of one model share most kernels.
XLA writes the kernels of a compilation into a file, and takes those of later compilations from it. Schedule and memory
of a program do not depend on where its kernels come from.

Each thread has a file of its own in a temporary folder of the process, because XLA's writes are not safe if two
compilations share a file.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from pathlib import Path

import jax

from dhelix.passes import jax_compat

_FLAG = "xla_gpu_kernel_cache_file"
_MOST_BYTES = 48 << 20  # XLA reads the file in each compilation, so a larger file begins anew


def options(lowered: jax.stages.Lowered) -> dict[str, str]:
    """The XLA options with which `lowered` is compiled with the kernels of earlier compilations of this thread.

    Each kind of GPU has a file of its own.
    """
    kind = "".join(letter for letter in jax_compat.devices(lowered)[0].device_kind if letter.isalnum())
    file = Path(_folder().name) / f"{kind}-{threading.get_ident()}.kernels"
    if file.exists() and file.stat().st_size > _MOST_BYTES:
        file.unlink()
    return {_FLAG: str(file)}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that exists until the process ends."""
    return tempfile.TemporaryDirectory(prefix="dhelix-kernels-")
