"""Rows of `seq` + 1 tokens: the stream of documents, cut into pieces of equal length.

    stream     a a a a b b c c c c c c              documents a, b, c; seq 4
    rows       a a a a b     b b c c c     c c c c -
    segments   1 1 1 1 2     1 1 2 2 2     1 1 1 1 0

A row starts with the last token of the row before it. So every token but the first of its document is predicted once in
an epoch. The last row may be padded; padding has segment 0. A token attends to its own document alone, and padding is
not predicted (`models.common.training.Training`).

Without segments, rows are one text: a token attends to all documents before it in its row, and the last row continues
with the start of the stream.
"""

from __future__ import annotations

import dataclasses
from typing import SupportsIndex

import numpy as np

from dhelix.launch.train.data.documents import DataError, Documents


@dataclasses.dataclass(frozen=True)
class Rows:
    """All rows of an epoch by number, as Grain's `RandomAccessDataSource`.

    Attributes:
      seq: tokens of a row that are predicted.
      masked: whether rows have segments.
      vocabulary: number of tokens of the model.
    """

    documents: Documents
    seq: int
    masked: bool
    vocabulary: int

    def __len__(self) -> int:
        return max(1, -(-(self.documents.size - 1) // self.seq))

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        """`{"tokens": int32 [seq + 1]}`, and `"segments"` of the same type and shape if `masked`.

        Raises:
          DataError: the model does not know a token.
        """
        start = int(index) * self.seq
        stop = min(start + self.seq + 1, self.documents.size)
        tokens, numbers = self.documents.read(start, stop)
        missing = self.seq + 1 - len(tokens)
        if len(tokens) and int(tokens.max()) >= self.vocabulary:
            place = int(np.argmax(tokens >= self.vocabulary))
            raise DataError(
                f"token {start + place} of {self.documents.name} is {int(tokens[place])}, but the model has "
                f"{self.vocabulary} tokens; give --vocab {int(tokens.max()) + 1}, or tokens of another tokenizer"
            )
        if not self.masked:
            more = self.documents.read(0, missing)[0] if missing else tokens[:0]
            return {"tokens": np.concatenate([tokens, more]).astype(np.int32)}
        segments = np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0) + 1
        padding = (0, missing)
        return {
            "tokens": np.pad(tokens.astype(np.int32), padding),
            "segments": np.pad(segments.astype(np.int32), padding),
        }
