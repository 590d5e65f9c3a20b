"""Reports next to the compilation cache: other programs write to that folder, too, and their files cause no failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import pytest

from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.framework.report import NOT_RUN, UNCHANGED, Note, PassReport, Report, StageReport
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import registration
from dhelix.runtime.compiler.registration import Session


@dataclass(frozen=True)
class Look:
    name = "look"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        raise AssertionError("the program came out of the cache")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    (tmp_path / "dhelix").mkdir()
    yield tmp_path / "dhelix"
    jax.config.update("jax_compilation_cache_dir", before)
    registration.clear()


def session() -> Session:
    return Session(PassManager([Look()], step="train_step"), b"a program", "jit_step", platforms=())


def good(marker: str) -> Report:
    entry = PassReport(1, "look", Stage.POST_SCHEDULER.value, UNCHANGED, 0.5, 3, 3, "0" * 16, (Note("looked"),))
    return Report("jit_step", marker, (StageReport(Stage.POST_SCHEDULER.value, "jit_step", (entry,), 0.5),))


def test_what_was_stored_is_the_report(folder: Path) -> None:
    found = session()
    (folder / f"{found.marker}.json").write_text(good(found.marker).to_json())
    assert found.report()["look"].notes == (Note("looked"),) and found.report().stages[0].stored


MARKER = "fedcba9876543210"
TEXT = good(MARKER).to_json()
DAMAGED = {
    "no UTF-8": b"\xff\xfe{}",
    "nothing": b"",
    "cut short": TEXT[:-40].encode(),
    "no object": b"[1, 2]",
    "deep nesting": b"[" * 100_000,
    "deep nesting inside": TEXT.replace('"facts": {}', '"facts": ' + "[" * 5000 + "]" * 5000).encode(),
    "an unknown stage": TEXT.replace('"post-scheduler"', '"mid-scheduler"').encode(),
    "a number as a name": TEXT.replace('"look"', "7").encode(),
    "a name as a number": TEXT.replace('"number": 1', '"number": "one"').encode(),
    "a field that is missing": TEXT.replace('"number": 1,', "").encode(),
    "stages that are no list": TEXT.replace('"stages": [', '"stages": 3, "others": [').encode(),
    "passes that are null": TEXT.replace('"passes": [', '"passes": null, "others": [').encode(),
    "facts that are a list": TEXT.replace('"facts": {}', '"facts": []').encode(),
    "another step's": replace(good(MARKER), fingerprint="0" * 16).to_json().encode(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_damaged_counts_as_missing(damage: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = session()
    assert TEXT.encode() != DAMAGED[damage]
    (folder / f"{found.marker}.json").write_bytes(DAMAGED[damage].replace(MARKER.encode(), found.marker.encode()))
    for _ in range(2):
        assert found.report()["look"].outcome == NOT_RUN
    (line,) = [r.getMessage() for r in caplog.records]
    assert "cannot use the stored report" in line and f"{found.marker}.json: " in line and "\n" not in line


def test_every_field_of_a_report_is_checked() -> None:
    """A new field without a check makes every report unreadable, so this test notices it."""
    assert Report.from_json(TEXT) == good(MARKER) and asdict(Report.from_json(TEXT)) == asdict(good(MARKER))
