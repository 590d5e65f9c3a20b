"""Files next to the compilation cache: damaged files count as missing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from dhelix.runtime.compiler import cache_notes


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "dhelix"
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_is_written_is_read(cache: Path) -> None:
    cache_notes.write("a.json", "text")
    cache_notes.write("a.pb", b"\x00\xff")
    assert (cache_notes.read("a.json"), cache_notes.read_bytes("a.pb")) == ("text", b"\x00\xff")
    assert (cache_notes.read("b.json"), cache_notes.read_bytes("b.pb")) == (None, None)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"\x01", lambda b: b"", lambda b: b[:20]])
def test_bytes_that_are_damaged_count_as_missing(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    cache_notes.write("a.pb", b"\x00\xff")
    (cache / "a.pb").write_bytes(damage((cache / "a.pb").read_bytes()))
    assert cache_notes.read_bytes("a.pb") is None
