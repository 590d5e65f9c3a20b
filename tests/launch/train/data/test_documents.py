"""Documents, their stream, and rows of it: every token is predicted once, and no document sees another."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.launch.train.data.documents import DataError, Documents, one_after_the_other
from dhelix.launch.train.data.rows import Rows


def numbered(*lengths: int) -> Documents:
    """Documents whose tokens are 1, 2, 3, ... over all of them."""
    ends = np.cumsum((0, *lengths))
    return one_after_the_other(
        "numbers", [np.arange(a, b) + 1 for a, b in zip(ends, ends[1:], strict=False)], 0, "none"
    )


def test_rows_and_segments() -> None:
    rows = Rows(numbered(4, 2, 6), seq=4, masked=True, vocabulary=100)
    assert [list(rows[n]["tokens"]) for n in range(3)] == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, 12, 0]]
    assert [list(rows[n]["segments"]) for n in range(3)] == [[1, 1, 1, 1, 2], [1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]
    assert len(rows) == 3 and rows[0]["tokens"].dtype == rows[0]["segments"].dtype == np.int32


def test_without_segments_the_last_row_continues_with_the_start() -> None:
    rows = Rows(numbered(4, 2, 6), seq=4, masked=False, vocabulary=100)
    assert list(rows[2]) == ["tokens"] and list(rows[2]["tokens"]) == [9, 10, 11, 12, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 7))
def test_every_token_but_the_first_of_its_document_is_predicted_once(lengths: list[int], seq: int) -> None:
    documents = numbered(*lengths)
    if documents.size < 2:
        return
    rows = Rows(documents, seq, masked=True, vocabulary=1000)
    predicted = list[int]()
    for row in (rows[n] for n in range(len(rows))):
        counts = (row["segments"][:-1] == row["segments"][1:]) & (row["segments"][1:] > 0)
        predicted += row["tokens"][1:][counts].tolist()
    firsts = {int(documents.tokens[start]) for start in documents.starts}
    assert predicted == [token for token in range(1, documents.size + 1) if token not in firsts]


def test_a_part_of_the_documents_is_kept_for_evaluation() -> None:
    train, held = numbered(*[3] * 40).split(0.1)
    assert len(train) == 36 and len(held) == 4
    seen = [set(one.read(0, one.size)[0].tolist()) for one in (train, held)]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(1, 121))


def test_of_few_documents_the_end_is_kept_for_evaluation() -> None:
    train, held = numbered(100).split(0.1)
    assert train.read(0, train.size)[0][-1] == 90 and list(held.read(0, 10)[0]) == list(range(91, 101))


def test_data_that_differs_is_told_in_words() -> None:
    train, held = numbered(*[3] * 40).split(0.1)
    whole = numbered(*[3] * 40)
    kept = r"\(--eval_every and --eval_fraction keep some for evaluation\)"
    found = whole.change_from(train.fingerprint)
    assert re.fullmatch(f"data was 36 documents with 108 tokens and is now 40 documents with 120 tokens {kept}", found)
    other = dataclasses.replace(held, tokens=held.tokens + 1)
    assert other.change_from(held.fingerprint).endswith("and is now other text of the same size")


def test_documents_that_do_not_fit_the_model_are_refused() -> None:
    documents = one_after_the_other("notes", [np.arange(16, dtype=np.uint8)], 256, "bytes")
    with pytest.raises(DataError, match="holds 16 tokens, but a row of --seq 16 needs 17"):
        documents.check(16, 256)
    with pytest.raises(DataError, match="16 tokens for evaluation, .* more text with --eval_data or a smaller --seq"):
        documents.check(16, 256, "eval_data", " for evaluation")
    with pytest.raises(DataError, match=r"has 100 tokens, but the tokenizer \(bytes\) has 256; give --vocab 256"):
        documents.check(8, 100)
    with pytest.raises(DataError, match="numbers holds token 12, but the model has 12 tokens; give --vocab 128, or"):
        numbered(12).check(8, 12)
    with pytest.raises(DataError, match="token 10 of notes is 10, but the model has 10 tokens; give --vocab 16"):
        Rows(documents, seq=15, masked=False, vocabulary=10)[0]
