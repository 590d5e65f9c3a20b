"""Small files beside JAX's compilation cache, so that a step out of the cache knows what was found out about it.

Others write to that folder, too, at the same time and not always whole: what is damaged counts as missing. (Local
folders only.)
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
    """Where a file of that name lies; None where there is no cache."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / "dhelix" / name if folder and "://" not in str(folder) else None


def write(name: str, content: str | bytes) -> None:
    """Whole or not at all; where it cannot be written, it is not. Text is for people, too; bytes get a checksum."""
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
    """None where there is no such file. Raises OSError, UnicodeDecodeError or DhelixError where it cannot be read."""
    data = _read(name)
    return None if data is None else data.decode()


def read_bytes(name: str) -> bytes | None:
    """None where there is no such file, or one that is not what was written. Raises OSError or DhelixError."""
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
