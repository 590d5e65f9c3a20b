"""Tokenizers: the bytes of a text, or a file of Hugging Face's library `tokenizers`.

    tokenizer = load("tokenizer.json")
    tokenizer.vocabulary, tokenizer.end         32000, 2
    tokenizer.encode(["Alas, poor", ...])       arrays of ids, without special tokens
    tokenizer.decode([518, 11])                 "Alas,"

An end token stands behind each document. Of bytes it is 0, which no text has. A tokenizer's file seldom says which of
its special tokens ends a text, so it is the first known one, or the one of `--end_token`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dhelix.launch.train.data.documents import DataError

_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]")
_PIECE = 2**20  # characters that are encoded at once: the library needs about 100 bytes for each of them


class Tokenizer(Protocol):
    """Turns texts into token ids and back.

    Attributes:
      name: for messages and fingerprints: equal names mean equal ids.
      vocabulary: number of token ids.
      end: the id behind each document; None if the tokenizer has no such token.
      end_token: its name in the tokenizer's file; None if there is no such token or file.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def end_token(self) -> str | None: ...

    def encode(self, texts: Sequence[bytes]) -> Iterable[np.ndarray]:
        """The ids of each text. Raises UnicodeDecodeError if a text is not UTF-8 and has to be."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, for people to read."""
        ...


@dataclass(frozen=True)
class Bytes:
    """One token for each byte, and 0 at the end of a document."""

    name: str = "bytes"
    vocabulary: int = 256
    end: int | None = 0
    end_token: str | None = None

    def encode(self, texts: Sequence[bytes]) -> Iterable[np.ndarray]:
        return (np.frombuffer(text, np.uint8) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 < i < 256).decode(errors="replace")


@dataclass(frozen=True)
class FromFile:
    """A tokenizer of the library `tokenizers`."""

    name: str
    vocabulary: int
    end: int | None
    library: Any

    @property
    def end_token(self) -> str | None:
        return None if self.end is None else self.library.id_to_token(self.end)

    def encode(self, texts: Sequence[bytes]) -> Iterable[np.ndarray]:
        pieces = [list(_pieces(text.decode())) for text in texts]
        encoded = iter(self.library.encode_batch_fast([p for of in pieces for p in of], add_special_tokens=False))
        kind = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        for of_text in pieces:
            ids = [np.asarray(next(encoded).ids, kind) for _ in of_text]
            yield np.concatenate(ids) if ids else np.empty(0, kind)

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(list(ids))


def load(path: str | os.PathLike[str] | None, end: str | None = None) -> Tokenizer:
    """The tokenizer of a file, or of the folder that it is in; bytes if `path` is None or "bytes".

    Args:
      end: the token that ends documents; None: the first known one.

    Raises:
      DataError: the file is missing or no tokenizer, or has no such token.
    """
    if path is None or path == "bytes":
        if end is not None:
            raise DataError("--end_token needs --tokenizer; documents of bytes end with the byte 0")
        return Bytes()
    import tokenizers

    file = file_of(path)
    if not file.is_file():
        raise DataError(f"there is no tokenizer {file}; give --tokenizer a tokenizer.json, or its folder")
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(f"{file} is no file of the library tokenizers ({error}); give a tokenizer.json") from None
    library.no_truncation()
    library.no_padding()
    found = next((token for token in ((end,) if end else _ENDS) if library.token_to_id(token) is not None), None)
    if end is not None and found is None:
        raise DataError(f"{file} has no token {end!r}; give --end_token one of its tokens")
    vocabulary = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    return FromFile(f"{file.name}-{digest}", vocabulary, None if found is None else library.token_to_id(found), library)


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file of a tokenizer, which may be named by its folder."""
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def _pieces(text: str) -> Iterable[str]:
    """The text in pieces that end at line breaks, because the library holds a whole piece in memory."""
    start = 0
    while start < len(text):
        stop = start + _PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = max(stop, start + 1)
