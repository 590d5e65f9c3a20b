"""Text to train on, one token per byte: a file, a folder, or by default the sources of Python's standard library.

For given settings, a batch depends on the step's number alone. So a resumed run reads the same batches as a run without
an interruption. For the same reason, each host needs to read only the rows that its own devices hold.
"""

import dataclasses
import os
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dhelix.errors import DhelixError

VOCABULARY = 256
"""Number of tokens: one for each value of a byte."""

_END = 2**20  # number of bytes that a fingerprint reads at each end of the text
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class DataError(DhelixError):
    """The text to train on is missing, unreadable, empty or too short."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text. `tokens` are its bytes, uint8 `[size]`. `name` says where the text comes from."""

    name: str
    tokens: np.ndarray

    @property
    def fingerprint(self) -> str:
        """The size and a hash of both ends of the text. A resumed run uses it to check that the text is the same."""
        ends = zlib.crc32(self.tokens[-_END:].data, zlib.crc32(self.tokens[:_END].data))
        return f"{len(self.tokens)}-{ends:08x}"

    def check(self, seq: int) -> None:
        """Raises DataError if the text is too short for a row of `seq` + 1 tokens."""
        if len(self.tokens) < seq + 1:
            raise DataError(
                f"{self.name} holds {len(self.tokens)} bytes, but a row of --seq {seq} needs {seq + 1}; give more text "
                "with --data or a smaller --seq"
            )

    def offsets(self, step: int, rows: int, seq: int, seed: int = 0) -> np.ndarray:
        """Positions in the text at which the rows of batch `step` start: int64 `[rows]`, random and uniform."""
        self.check(seq)
        return np.random.default_rng([seed, step]).integers(0, len(self.tokens) - seq, rows)

    def batch(self, step: int, rows: int, seq: int, seed: int = 0, part: slice = slice(None)) -> np.ndarray:
        """The rows `part` of batch `step`: int32 `[rows, seq + 1]`. Targets are the inputs, shifted by one token."""
        starts = self.offsets(step, rows, seq, seed)[part]
        return self.tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32)

    def sharded_batch(
        self, step: int, rows: int, seq: int, sharding: NamedSharding, seed: int = 0
    ) -> dict[str, jax.Array]:
        """Batch `step` as `{"tokens": int32 [rows, seq + 1]}` with this sharding. A host reads only its own rows."""

        def local(index: Any) -> np.ndarray:
            return self.batch(step, rows, seq, seed, index[0])[:, index[1]]

        return {"tokens": jax.make_array_from_callback((rows, seq + 1), sharding, local)}


def load(path: str | os.PathLike[str] | None = None) -> Corpus:
    """Loads a file, or all files of a folder in the order of their paths.

    A single file is memory-mapped. In a folder, hidden files and folders are skipped.

    Args:
      path: the file or folder; None: the sources of Python's standard library.

    Raises:
      DataError: the text does not exist, cannot be read, or is empty.
    """
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _files(library) if file.suffix == ".py"]
        kept = [file for file in files if not _NOT_LIBRARY & set(file.relative_to(library).parts)]
        return _corpus("the standard library's sources", kept)
    root = Path(path)
    if not root.exists():
        raise DataError(f"there is no file or folder {path}; give --data one that exists")
    return _corpus(str(path), _files(root) if root.is_dir() else [root])


def _files(folder: Path) -> list[Path]:
    """Regular files below `folder` that are not hidden. They are sorted by relative path, alike on every host."""
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _corpus(name: str, files: list[Path]) -> Corpus:
    if len(files) == 1:
        tokens = _read(files[0], mapped=True)
    else:
        tokens = np.concatenate([np.empty(0, np.uint8), *(_read(file) for file in files)])
    if not len(tokens):
        raise DataError(f"{name} holds no text; give --data a file, or a folder with files in it")
    return Corpus(name, tokens)


def _read(file: Path, mapped: bool = False) -> np.ndarray:
    try:
        # An empty file cannot be mapped.
        if mapped and file.stat().st_size:
            return np.memmap(file, np.uint8, "r")
        return np.fromfile(file, np.uint8)
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror}); check its permissions") from None
