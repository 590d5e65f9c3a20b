"""Documents as token ids in one array, and the stream that they make one after the other.

    tokens   [ 17  4  0 | 9  0 | 3  3  8  0 ]       three documents, each with the token 0 at its end
    starts   [ 0          3      5 ]                stops  [ 3  5  9 ]
    stream   17 4 0 9 0 3 3 8 0                     positions 0 to 8

The array is usually memory-mapped, so a document is read only when a row needs it. A part of the documents, such as
those for evaluation, shares the array.
"""

from __future__ import annotations

import dataclasses
import zlib
from functools import cached_property

import numpy as np

from dhelix.errors import DhelixError

_END = 2**20  # number of tokens that a fingerprint reads at each end of the array
_FEWEST = 20  # fewer documents are too few to choose some of them for evaluation


class DataError(DhelixError):
    """The data to train on is missing, unreadable, empty, or does not fit the model."""


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Documents that are parts of one array of tokens.

    Attributes:
      name: where they come from, for messages.
      tokens: token ids, an unsigned integer array `[size]`, perhaps memory-mapped.
      starts, stops: int64 `[documents]`, where each document starts and stops in `tokens`.
      vocabulary: number of token ids that there may be; 0 if it is not known.
      tokenizer: what made the tokens, in a word or two: "bytes", or the tokenizer's name and a hash.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    vocabulary: int
    tokenizer: str

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each document ends in the stream, int64 `[documents]`."""
        return np.cumsum(self.stops - self.starts)

    @property
    def size(self) -> int:
        """Number of tokens of the stream."""
        return int(self.ends[-1]) if len(self) else 0

    @cached_property
    def fingerprint(self) -> str:
        """The sizes and a hash of both ends of the tokens. A resumed run uses it to check that the data is the same."""
        ends = zlib.crc32(self.tokens[-_END:].tobytes(), zlib.crc32(self.tokens[:_END].tobytes()))
        return f"{self.tokenizer}-{len(self)}-{self.size}-{ends:08x}"

    def change_from(self, fingerprint: str) -> str:
        """What differs from the data with this fingerprint: "data was 9 documents with ... tokens and is now ..."."""
        (tokenizer, *before, ends), (own, *now, own_ends) = (
            text.rsplit("-", 3) for text in (fingerprint, self.fingerprint)
        )
        was, is_now = (
            f"{int(documents):,} document{'s' * (documents != '1')} with {int(size):,} tokens"
            for documents, size in (before, now)
        )
        if tokenizer != own:
            was, is_now = f"{was} of {tokenizer}", f"{is_now} of {own}"
        elif before == now:
            is_now = "other text of the same size"
        elif ends == own_ends:
            is_now += " (--eval_every and --eval_fraction keep some for evaluation)"
        return f"data was {was} and is now {is_now}"

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the stream from `start` to `stop`, and the number of the document of each, counted from 0."""
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        begun = self.ends[first] - (self.stops[first] - self.starts[first])
        pieces, numbers = list[np.ndarray](), list[np.ndarray]()
        for document in range(int(first), int(last) + 1):
            begin = int(self.starts[document]) + max(0, start - int(begun))
            end = min(int(self.stops[document]), int(self.starts[document]) + stop - int(begun))
            pieces.append(self.tokens[begin:end])
            numbers.append(np.full(end - begin, document))
            begun = self.ends[document]
        return np.concatenate(pieces), np.concatenate(numbers)

    def check(self, seq: int, vocabulary: int, flag: str = "data", purpose: str = "") -> None:
        """Checks that the documents fill a row of `seq` + 1 tokens, and that the model knows their tokens.

        Args:
          flag: the flag that names the documents.
          purpose: what they are for, as messages say it.

        Raises:
          DataError: they do not, or it does not.
        """
        largest = int(self.tokens.max()) if len(self.tokens) and not self.vocabulary else 0
        if largest >= vocabulary:
            raise DataError(
                f"{self.name} holds token {largest}, but the model has {vocabulary} tokens; give --vocab "
                f"{_padded(largest + 1)}, or other --{flag} (with --init_from, only that)"
            )
        check_vocabulary(self.tokenizer, self.vocabulary, vocabulary)
        if self.size < seq + 1:
            raise DataError(
                f"{self.name} holds {self.size} tokens{purpose}, but a row of --seq {seq} needs {seq + 1}; give more "
                f"text with --{flag} or a smaller --seq"
            )

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """The documents to train on, and about `fraction` of all for evaluation.

        Every n-th document is for evaluation. Of fewer than 20 documents, it is the last part of the stream.
        """
        chosen = np.zeros(len(self), bool)
        every = max(2, round(1 / fraction))
        chosen[every - 1 :: every] = True
        if len(self) >= _FEWEST and chosen.any():
            return self._only(~chosen), self._only(chosen)
        border = self.size - max(1, int(self.size * fraction))
        return self._part(0, border), self._part(border, self.size)

    def _only(self, chosen: np.ndarray) -> Documents:
        return dataclasses.replace(self, starts=self.starts[chosen], stops=self.stops[chosen])

    def _part(self, start: int, stop: int) -> Documents:
        """The part of the stream from `start` to `stop`. Documents at its ends may be cut."""
        begun = self.ends - (self.stops - self.starts)
        starts = self.starts + np.maximum(0, start - begun)
        stops = self.stops - np.maximum(0, self.ends - stop)
        kept = starts < stops
        return dataclasses.replace(self, starts=starts[kept], stops=stops[kept])


def check_vocabulary(tokenizer: str, needed: int, vocabulary: int) -> None:
    """Raises DataError if a tokenizer has more tokens than the model."""
    if needed > vocabulary:
        raise DataError(
            f"the model has {vocabulary} tokens, but the tokenizer ({tokenizer}) has {needed}; give --vocab "
            f"{_padded(needed)}, or another --tokenizer (with --init_from, only that)"
        )


def _padded(tokens: int) -> int:
    return -(-tokens // 128) * 128


def one_after_the_other(name: str, parts: list[np.ndarray], vocabulary: int, tokenizer: str) -> Documents:
    """Documents from an array of tokens for each of them. Empty documents are left out."""
    kept = [part for part in parts if len(part)]
    stops = np.cumsum([len(part) for part in kept], dtype=np.int64)
    tokens = kept[0] if len(kept) == 1 else np.concatenate(kept or [np.empty(0, np.uint8)])
    starts = np.concatenate([np.zeros(1, np.int64), stops])[: len(kept)]
    return Documents(name, tokens, starts, stops, vocabulary, tokenizer)
