"""Autotuning results as files: merging them, and the file that a compilation reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.compiler import autotune_results


def _dump(*choices: tuple[str, str]) -> str:
    """A dump as XLA writes it: fingerprints of instructions, and the backends chosen for them."""
    return "".join(
        f"""entries {{
  key {{
    target {{
      device: "d0"
      hlo_fingerprint: "{fingerprint}"
    }}
  }}
  value {{
    optimal_config {{
      backend: {backend}
    }}
  }}
}}
"""
        for fingerprint, backend in choices
    )


@pytest.fixture(autouse=True)
def folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    autotune_results.file.cache_clear()
    yield tmp_path
    autotune_results.file.cache_clear()


def test_merged_results_are_sorted_one_a_line_and_later_ones_count() -> None:
    merged = autotune_results.merge({"a": _dump(("2", "TRITON"), ("1", "TRITON")), "b": _dump(("2", "CUBLASLT"))})
    assert merged == (
        'entries { key { target { device: "d0" hlo_fingerprint: "1" } }'
        " value { optimal_config { backend: TRITON } } }\n"
        'entries { key { target { device: "d0" hlo_fingerprint: "2" } }'
        " value { optimal_config { backend: CUBLASLT } } }\n"
    )
    assert autotune_results.merge({"once": merged}) == merged, "merging reads what it writes"
    assert autotune_results.merge({"b": merged, "empty": ""}) == merged


@pytest.mark.parametrize(
    "text", ["version: 3 results { }", '{"json": 1}', "entries {\n  value {\n  }\n}\n", _dump(("1", "TRITON"))[:-5]]
)
def test_what_is_no_dump_is_named(text: str) -> None:
    with pytest.raises(DhelixError, match=r"mine.pbtxt.*leave out this file"):
        autotune_results.merge({"mine.pbtxt": text})


def test_compiles_read_what_is_shipped_and_what_the_user_measured(folder_of_the_user: Path) -> None:
    def entries() -> set[str]:
        autotune_results.file.cache_clear()
        read = autotune_results.file()
        assert read is not None
        return set(read.read_text().splitlines())

    shipped = entries()
    for card in ("h100", "h200"):
        own = (autotune_results.SHIPPED / f"{card}{autotune_results.SUFFIX}").read_text().splitlines()
        assert own and shipped.issuperset(own), card
    (folder_of_the_user / "h200-nvlink.autotune.pbtxt").write_text(_dump(("0", "TRITON")))
    assert len(entries() - shipped) == 1 and entries() > shipped


def test_shipped_files_are_as_they_would_be_merged() -> None:
    for path in autotune_results.SHIPPED.glob(f"*{autotune_results.SUFFIX}"):
        assert path.read_text() == autotune_results.merged([path]), path.name


def test_a_file_that_xla_cannot_read_is_named(folder_of_the_user: Path) -> None:
    (mine := folder_of_the_user / f"mine{autotune_results.SUFFIX}").write_text("")
    with pytest.raises(DhelixError, match=f"{mine}: delete this file"), autotune_results.blaming():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Failed to parse autotune results string.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="other"), autotune_results.blaming():
        raise jax.errors.JaxRuntimeError("other")


def test_the_tool_merges_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(_dump(("1", "TRITON")))
    out = str(tmp_path / "out")
    for sources in ([str(tmp_path / "in")], [out, str(tmp_path / "in")]):
        autotune_results.main([out, *sources])
        assert "1 entries" in capsys.readouterr().out
    for arguments, message in (([out], "usage"), ([out, str(tmp_path / "none")], "none: cannot be read")):
        with pytest.raises(SystemExit, match=message):
            autotune_results.main(arguments)
