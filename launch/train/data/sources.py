"""Reads documents: text files, folders of them, JSON Lines, and files of tokens.

    load()                                     the sources of Python's standard library, as bytes
    load("corpus/", tokenizer)                 each file is a document, in the order of their paths
    load("corpus.jsonl", tokenizer)            each line is a document: {"text": ...}
    load("tokens/"), load("ids.npy")           tokens that were made before, memory-mapped (`token_files.py`)

Text that a tokenizer has to encode is encoded once: the tokens are kept as token files in a folder of the user's cache,
named after the tokenizer and the sizes and times of the text's files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dhelix.launch.train.data import token_files
from dhelix.launch.train.data.documents import DataError, Documents, one_after_the_other
from dhelix.launch.train.data.tokenizers import Bytes, Tokenizer

CACHE = Path("~/.cache/dhelix/tokens")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_LINES = (".jsonl", ".jsonl.gz", ".ndjson")
_LOOKED_AT = 2**16  # bytes at the start of a file in which a text has no 0
_AT_ONCE = 2**24  # bytes of documents that are encoded together


def load(
    path: str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Documents:
    """Loads documents as tokens.

    Args:
      path: a file or folder; None: the sources of Python's standard library. Hidden files of a folder are skipped.
      tokenizer: what makes tokens of text; None: bytes.
      field: the field of JSON Lines that holds the text.
      cache: folder for tokens; None: the user's cache.
      say: called with a line of text about long work.

    Raises:
      DataError: the data does not exist, cannot be read, is binary, or is empty.
    """
    tokenizer = tokenizer or Bytes()
    if path is not None and not Path(path).exists():
        raise DataError(f"there is no file or folder {path}; give --data one that exists")
    if path is not None and token_files.is_one(Path(path)):
        return _of_tokenizer(token_files.load(Path(path)), tokenizer)
    name, files = _files_of(path)
    if not files:
        raise DataError(f"{name} holds no text; give --data a file, or a folder with files in it")
    if isinstance(tokenizer, Bytes):
        found = _bytes(name, files, tokenizer, field)
    else:
        found = _encoded(name, files, tokenizer, field, Path(cache or CACHE).expanduser(), say)
    if not found.size:
        raise DataError(f"{name} holds no text; give --data a file, or a folder with files in it")
    return found


def _of_tokenizer(found: Documents, tokenizer: Tokenizer) -> Documents:
    """Tokens that were made before. Raises DataError if another tokenizer than the given one made them."""
    if found.vocabulary and not isinstance(tokenizer, Bytes) and found.tokenizer != tokenizer.name:
        raise DataError(
            f"the tokens in {found.name} were made by {found.tokenizer}, not by {tokenizer.name}; give that "
            "--tokenizer, or none"
        )
    return found


def _files_of(path: str | os.PathLike[str] | None) -> tuple[str, list[Path]]:
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _in_order(library) if file.suffix == ".py"]
        return "the standard library's sources", [
            file for file in files if not _NOT_LIBRARY & set(file.relative_to(library).parts)
        ]
    root = Path(path)
    return str(path), _in_order(root) if root.is_dir() else [root]


def _in_order(folder: Path) -> list[Path]:
    """Regular files below `folder` that are not hidden. They are sorted by relative path, alike on every host."""
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _texts(file: Path, field: str) -> Iterator[bytes]:
    """The documents of a file. Raises DataError if it cannot be read or is no text."""
    try:
        if file.name.endswith(_LINES):
            yield from _lines(file, field)
            return
        text = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror or error})") from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"{file} is cut off or damaged ({error}); copy the file again") from None
    if b"\0" in text[:_LOOKED_AT]:
        packed = "; unpack it first" if file.suffix == ".gz" else ""
        raise DataError(
            f"{file} is binary{packed}; give --data text, JSON Lines (.jsonl, .jsonl.gz) or files of tokens (.npy, "
            ".bin), or leave it out of the folder"
        )
    yield text


def _lines(file: Path, field: str) -> Iterator[bytes]:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except ValueError as error:
                raise DataError(f"{file}, line {number}: this is no JSON ({error}); write one object a line") from None
            except (KeyError, TypeError):
                raise DataError(
                    f"{file}, line {number} has no field {field!r}; name the text with --text_field"
                ) from None
            if not isinstance(text, str):
                raise DataError(f"{file}, line {number}: {field!r} is no text; name the text with --text_field")
            yield text.encode()


def _bytes(name: str, files: list[Path], tokenizer: Bytes, field: str) -> Documents:
    if len(files) == 1 and not files[0].name.endswith(_LINES):
        (text,) = _texts(files[0], field)  # one text of one document needs no end
        return one_after_the_other(name, list(tokenizer.encode([text])), tokenizer.vocabulary, tokenizer.name)
    texts = (text + b"\0" for file in files for text in _texts(file, field) if text)
    return one_after_the_other(name, list(tokenizer.encode(list(texts))), tokenizer.vocabulary, tokenizer.name)


def _encoded(
    name: str, files: list[Path], tokenizer: Tokenizer, field: str, cache: Path, say: Callable[[str], None]
) -> Documents:
    """The tokens of the files from the cache; else encodes them and keeps them there."""
    folder = cache / _digest(files, tokenizer, field)
    if token_files.is_one(folder):
        return token_files.load(folder, name)
    size = sum(file.stat().st_size for file in files)
    say(f"encoding {size / 1e6:,.1f} MB of {name} with {tokenizer.name}, once")
    made = one_after_the_other(name, list(_encode(files, tokenizer, field)), tokenizer.vocabulary, tokenizer.name)
    try:
        token_files.save(folder, made)
    except OSError as error:
        say(f"the tokens cannot be kept in {folder} ({error.strerror or error}), so each run encodes the text again")
    return made


def _digest(files: list[Path], tokenizer: Tokenizer, field: str) -> str:
    said = [tokenizer.name, tokenizer.end, field]
    for file in files:
        stat = file.stat()
        said.append([str(file.absolute()), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _encode(files: list[Path], tokenizer: Tokenizer, field: str) -> Iterator[np.ndarray]:
    """The tokens of each document, with the end token behind them. Many documents at once keep all cores busy."""
    waiting, size = list[tuple[Path, bytes]](), 0
    for file in files:
        for text in _texts(file, field):
            waiting.append((file, text))
            size += len(text)
            if size >= _AT_ONCE:
                yield from _encode_some(waiting, tokenizer)
                waiting, size = [], 0
    yield from _encode_some(waiting, tokenizer)


def _encode_some(documents: list[tuple[Path, bytes]], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for file, text in documents:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 text (byte {error.start}); convert it, leave it out, or train on bytes without "
                "--tokenizer"
            ) from None
    for tokens in tokenizer.encode([text for _, text in documents]):
        if len(tokens):
            yield tokens if tokenizer.end is None else np.append(tokens, tokens.dtype.type(tokenizer.end))
