"""Small files beside JAX's compilation cache, so that a step out of the cache knows what was found out about it.

Others write to that folder, too, at the same time and not always whole: what is damaged counts as missing. (Local
folders only.)
"""

import os
import tempfile
from pathlib import Path

import jax
from absl import logging

from dhelix.errors import DhelixError

_LARGEST = 64 << 20  # bytes


def path_of(name: str) -> Path | None:
    """Where a file of that name lies; None where there is no cache."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / "dhelix" / name if folder and "://" not in str(folder) else None


def write(name: str, text: str) -> None:
    """Whole or not at all; where it cannot be written, it is not."""
    path = path_of(name)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        logging.vlog(1, "cannot store %s: %s", path, error)


def read(name: str) -> str | None:
    """None where there is no such file. Raises OSError, UnicodeDecodeError or DhelixError where it cannot be read."""
    path = path_of(name)
    if path is None or not path.is_file():
        return None
    if path.stat().st_size > _LARGEST:
        raise DhelixError(f"it has more than {_LARGEST >> 20} MiB")
    return path.read_text()
