"""Reads and writes small files in the folder of JAX's compilation cache.

The files hold facts about a step, for runs that load the step from the cache. Other processes write to the same folder
concurrently and may leave incomplete files. So callers treat a damaged file as a missing one. Only local cache folders
are supported.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import jax
from absl import logging

from dhelix.errors import DhelixError

_LARGEST = 64 << 20  # bytes


def path_of(name: str) -> Path | None:
    """The path of the file with this name; None if there is no local compilation cache."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / "dhelix" / name if folder and "://" not in str(folder) else None


def write(name: str, content: str | bytes) -> None:
    """Writes the file atomically, or does nothing if that is impossible. Bytes get a checksum, but text does not."""
    path = path_of(name)
    if path is None:
        return
    data = content.encode() if isinstance(content, str) else hashlib.sha256(content).digest() + content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError as error:
        logging.vlog(1, "cannot store %s: %s", path, error)


def read(name: str) -> str | None:
    """The text of the file; None if it does not exist.

    Raises OSError or UnicodeDecodeError if the file cannot be read, and DhelixError if it is too large.
    """
    data = _read(name)
    return None if data is None else data.decode()


def read_bytes(name: str) -> bytes | None:
    """The bytes of the file; None if it is missing or has a wrong checksum.

    Raises OSError if the file cannot be read, and DhelixError if it is too large.
    """
    data = _read(name)
    if data is None or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    return data[32:]


def _read(name: str) -> bytes | None:
    path = path_of(name)
    if path is None or not path.is_file():
        return None
    if path.stat().st_size > _LARGEST:
        raise DhelixError(f"it has more than {_LARGEST >> 20} MiB")
    return path.read_bytes()
