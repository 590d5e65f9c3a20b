"""Files of tokens, which are memory-mapped.

    folder/tokens.npy     token ids, uint8, uint16 or uint32 [size]
    folder/stops.npy      int64 [documents], where each document ends in tokens.npy
    folder/about.json     {"tokenizer": ..., "vocabulary": 32000}; written last, so a folder with it is complete

`load` also takes one array alone: a `.npy` of integers, or a `.bin` of uint16 as nanoGPT writes it. It is one document,
because nothing says where documents end.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from dhelix.launch.train.data.documents import DataError, Documents

_ABOUT = "about.json"


def is_one(path: Path) -> bool:
    """Whether `path` is a file of tokens, or a folder of such files."""
    return (path / _ABOUT).is_file() if path.is_dir() else path.suffix in (".npy", ".bin") and path.is_file()


def load(path: Path, name: str = "") -> Documents:
    """Maps the tokens of a file or folder into memory.

    Args:
      name: where the documents come from; "": the path.

    Raises:
      DataError: the file is damaged, or its values are no token ids.
    """
    name = name or str(path)
    try:
        if path.is_dir():
            about = json.loads((path / _ABOUT).read_text())
            tokens, stops = (np.load(path / file, mmap_mode="r") for file in ("tokens.npy", "stops.npy"))
            vocabulary, tokenizer = int(about["vocabulary"]), str(about["tokenizer"])
        else:
            tokens = np.memmap(path, np.uint16, "r") if path.suffix == ".bin" else np.load(path, mmap_mode="r")
            stops, vocabulary, tokenizer = np.array([tokens.size]), 0, path.name
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no tokens that can be read ({error}); make it again") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise DataError(
            f"{path} is an array {tokens.dtype}{list(tokens.shape)}; token ids are integers in one dimension"
        )
    if stops.ndim != 1 or not len(stops) or stops[-1] != len(tokens) or np.any(np.diff(stops, prepend=0) <= 0):
        raise DataError(f"{path} does not say where its documents end, or is empty; make it again")
    if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
        raise DataError(f"{path} holds the negative token {int(tokens.min())}; token ids count from 0")
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
    return Documents(name, tokens, starts, np.asarray(stops, np.int64), vocabulary, tokenizer)


def save(folder: Path, documents: Documents) -> None:
    """Writes documents that lie one after the other in their array. Raises OSError if it is not possible.

    The folder appears when it is complete. If another process writes the same folder, one of both stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    half = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir()
        np.save(half / "tokens.npy", documents.tokens)
        np.save(half / "stops.npy", documents.stops)
        about = {"tokenizer": documents.tokenizer, "vocabulary": documents.vocabulary}
        (half / _ABOUT).write_text(json.dumps(about) + "\n")
        if not folder.exists():
            half.rename(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)
