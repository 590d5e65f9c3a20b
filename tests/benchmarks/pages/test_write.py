"""docs/results and the README's table agree with the result files."""

from pathlib import Path

import pytest

from dhelix.benchmarks.pages import write
from dhelix.errors import DhelixError


def test_committed_pages_are_up_to_date() -> None:
    assert write.differing(write.DOCS) == []


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert len(write.write(tmp_path)) == len(write.pages())
    assert write.write(tmp_path) == []


def test_a_changed_page_and_a_stray_one_are_named(tmp_path: Path) -> None:
    write.write(tmp_path)
    (tmp_path / "inference.md").write_text("12 ms")
    (tmp_path / "by_hand.md").write_text("13 ms")
    assert write.differing(tmp_path) == ["inference.md", "by_hand.md"]


def test_a_result_file_that_no_section_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in write.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "strands_b200x2.json").write_text("{}")
    monkeypatch.setattr(write, "RESULTS", tmp_path)
    with pytest.raises(DhelixError, match="shows strands_b200x2.json"):
        write.pages()


def test_a_pattern_without_a_file_is_refused() -> None:
    section = write.Section("Nothing", "", ["strands_b200x2_*"], "strands", "")
    with pytest.raises(DhelixError, match="matches strands_b200x2"):
        write.files(section)


def test_a_program_that_a_file_lacks_is_refused() -> None:
    row = write.Row("a step", "strands_h200x4_nvlink_m4", "strands, unheard of", "copy_engine1")
    with pytest.raises(DhelixError, match="has no measured strands, unheard of"):
        row.cells()
