"""Where documents come from: text, folders, JSON Lines, tokenizers and files of tokens; and what is refused."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from dhelix.launch.train.data import sources, token_files, tokenizers
from dhelix.launch.train.data.documents import DataError

TEXTS = ["the cat sat on the mat", "the dog", "a cat"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> tokenizers.Tokenizer:
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator(
        TEXTS, library.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tokenizers.load(tmp_path / "model")


@pytest.mark.slow
def test_the_standard_library_is_the_default() -> None:
    documents = sources.load()
    assert documents.size > 1_000_000 and len(documents) > 100
    assert sources.load().fingerprint == documents.fingerprint


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("b/x", "2"), ("c", "3"), ("a", "1"), (".hidden", "4"), ("empty", "")):
        (tmp_path / name).write_text(content)
    documents = sources.load(tmp_path)
    assert bytes(documents.tokens) == b"1\0002\0003\0" and len(documents) == 3


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": text, "body": "x"}) for text in TEXTS) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    assert len(sources.load(tmp_path / "a.jsonl")) == 3
    assert len(sources.load(tmp_path)) == 6
    assert bytes(sources.load(tmp_path / "a.jsonl", field="body").tokens) == b"x\0x\0x\0"


def test_a_tokenizer_encodes_once(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    said: list[str] = []
    arguments = tmp_path / "text", tokenizer, "text", tmp_path / "cache", said.append
    documents = sources.load(*arguments)
    assert len(documents) == 3 and documents.vocabulary == tokenizer.vocabulary
    first = documents.read(0, int(documents.ends[0]))[0]
    assert first[-1] == tokenizer.end == 0 and tokenizer.decode(first[:-1].tolist()) == TEXTS[0]
    again = sources.load(*arguments)
    assert len(said) == 1 and isinstance(again.tokens, np.memmap) and again.fingerprint == documents.fingerprint
    (tmp_path / "text" / "0.txt").write_text("another text")
    assert sources.load(*arguments).fingerprint != documents.fingerprint and len(said) == 2


def test_long_texts_are_encoded_in_pieces(tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat\nsat on\n" * 20
    (whole,) = tokenizer.encode([text.encode()])
    monkeypatch.setattr(tokenizers, "_PIECE", 40)
    (pieces,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(pieces.tolist()) == tokenizer.decode(whole.tolist()) == text


def test_files_of_tokens_are_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.int32))
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    assert sources.load(tmp_path / "ids.npy").size == 10 and sources.load(tmp_path / "ids.bin").size == 7
    token_files.save(tmp_path / "tokens", sources.load(tmp_path / "ids.bin"))
    again = sources.load(tmp_path / "tokens")
    assert isinstance(again.tokens, np.memmap) and list(again.tokens) == list(range(7))


def test_bad_data_is_refused(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        sources.load(tmp_path / "missing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        sources.load(tmp_path / "nothing")
    for name, content, field, says in (
        ("empty", b"", "text", "holds no text"),
        ("picture", b"PNG\0\1", "text", "is binary"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "text", "line 2: this is no JSON"),
        ("b.jsonl", b'{"text": "x"}\n', "body", "line 1 has no field 'body'"),
        ("c.jsonl", b'{"text": 3}\n', "text", "line 1: 'text' is no text"),
        ("d.npy", b"no array", "text", "holds no tokens that can be read"),
        ("nothing.npy", b"", "text", "holds no tokens that can be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=says):
            sources.load(tmp_path / name, field=field)
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n')[:-9])
    with pytest.raises(DataError, match="g.jsonl.gz is cut off or damaged"):
        sources.load(tmp_path / "g.jsonl.gz")
    np.save(tmp_path / "e.npy", np.array([[1.0]]))
    with pytest.raises(DataError, match="token ids are integers in one dimension"):
        sources.load(tmp_path / "e.npy")
    np.save(tmp_path / "f.npy", np.array([1, -2]))
    with pytest.raises(DataError, match="the negative token -2"):
        sources.load(tmp_path / "f.npy")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 3\)"):
        sources.load(tmp_path / "latin", tokenizer, cache=tmp_path)
    if os.geteuid():
        (tmp_path / "secret").write_text("text")
        (tmp_path / "secret").chmod(0)
        with pytest.raises(DataError, match="cannot read"):
            sources.load(tmp_path / "secret")


def test_bad_tokenizers_are_refused(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    with pytest.raises(DataError, match="there is no tokenizer"):
        tokenizers.load(tmp_path)
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(DataError, match="is no file of the library tokenizers"):
        tokenizers.load(tmp_path / "no.json")
    with pytest.raises(DataError, match="has no token '</s>'"):
        tokenizers.load(tmp_path / "model", "</s>")
    made = one = sources.load(tmp_path / "model" / "tokenizer.json", tokenizer, cache=tmp_path / "cache")
    token_files.save(tmp_path / "tokens", made)
    assert sources.load(tmp_path / "tokens", tokenizer).size == one.size
    other = tokenizers.FromFile("other.json-1234", 300, None, None)
    with pytest.raises(DataError, match=r"were made by tokenizer.json-\w+, not by other.json-1234"):
        sources.load(tmp_path / "tokens", other)
