"""The training text: the files and their order. A batch depends only on its step and the seed."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.launch.train import data
from dhelix.models import make_mesh


def corpus(size: int = 1000) -> data.Corpus:
    return data.Corpus("numbers", np.arange(size, dtype=np.uint8))


@pytest.mark.slow
def test_the_standard_library_is_the_default() -> None:
    text = data.load()
    assert len(text.tokens) > 1_000_000
    assert b"site-packages" not in bytes(text.tokens[:100])
    assert data.load().fingerprint == text.fingerprint


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("b/x", "2"), ("c", "3"), ("a", "1"), (".hidden", "4"), ("empty", "")):
        (tmp_path / name).write_text(content)
    assert bytes(data.load(tmp_path).tokens) == b"123"


def test_a_batch_depends_on_step_and_seed_alone() -> None:
    batch = corpus().batch(step=3, rows=8, seq=16)
    assert batch.shape == (8, 17) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, corpus().batch(3, 8, 16))
    assert (batch != corpus().batch(4, 8, 16)).any()
    assert (batch != corpus().batch(3, 8, 16, seed=1)).any()
    # A row is a contiguous part of the text.
    np.testing.assert_array_equal(np.diff(batch.astype(np.uint8), axis=1), 1)


def test_a_host_reads_the_rows_of_its_devices() -> None:
    sharding = NamedSharding(make_mesh(dp=2, tp=4), PartitionSpec("dp"))
    tokens = corpus().sharded_batch(5, 8, 16, sharding)["tokens"]
    np.testing.assert_array_equal(tokens, corpus().batch(5, 8, 16))
    for shard in tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, corpus().batch(5, 8, 16, part=shard.index[0]))
    assert isinstance(tokens, jax.Array)


def test_the_whole_text_is_used() -> None:
    starts = corpus(20).offsets(step=0, rows=1000, seq=16)
    assert set(starts) == {0, 1, 2, 3}


def test_bad_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="no file or folder"):
        data.load(tmp_path / "missing")
    with pytest.raises(data.DataError, match="holds no text"):
        data.load(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(data.DataError, match="holds no text"):
        data.load(tmp_path / "empty")
    with pytest.raises(data.DataError, match="holds 16 bytes, but a row of --seq 16 needs 17"):
        corpus(16).batch(0, 8, 16)
    if os.geteuid():
        (tmp_path / "secret").write_text("text")
        (tmp_path / "secret").chmod(0)
        with pytest.raises(data.DataError, match="cannot read"):
            data.load(tmp_path)
