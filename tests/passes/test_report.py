"""A report survives JSON and reads well in a terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.passes import report
from dhelix.passes.report import Note, PassReport, Report, StageReport

DUPLICATION = PassReport(
    1,
    "strand-duplication",
    "lowered",
    report.CHANGED,
    0.0123,
    1000,
    1450,
    "0123456789abcdef",
    (Note("merged layer loops", "while.7", {"trip_count": 8, "loops": ["while.3", "while.7"]}),),
)
SCHEDULE = PassReport(2, "list-schedule", "post-scheduler", report.REFUSED, notes=(Note("no [red] lane"),))
DROPPED = PassReport(3, "other", "post-scheduler", report.DISABLED)
REPORT = Report(
    "jit_step__dhelix_fedcba9876543210",
    "fedcba9876543210",
    (
        StageReport("lowered", "jit_step", (DUPLICATION,), 0.02),
        StageReport("post-scheduler", "jit_step", (SCHEDULE, DROPPED), 0.01, stored=True),
    ),
)


def rendered(value: Report) -> str:
    console = Console(file=io.StringIO(), width=160)
    value.print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_prints_as_its_table() -> None:
    text = str(REPORT)
    assert text.splitlines() == [line.rstrip() for line in rendered(REPORT).rstrip().splitlines()]
    assert "strand-duplication" in text and "Report(" not in text and "\x1b" not in text


def test_json_round_trip() -> None:
    assert Report.from_json(REPORT.to_json()) == REPORT
    with_order = dataclasses.replace(REPORT, collective_fingerprint="00ff00ff00ff00ff")
    assert Report.from_json(with_order.to_json()) == with_order


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stages": [{}]}', REPORT.to_json()[:-40]])
def test_what_is_no_report_gets_one_error(text: str) -> None:
    with pytest.raises(DhelixError, match="no dhelix report"):
        Report.from_json(text)


def test_passes_by_name_and_in_order() -> None:
    assert [p.name for p in REPORT] == ["strand-duplication", "list-schedule", "other"]
    assert REPORT["strand-duplication"].instruction_difference == 450
    assert REPORT.changed and not REPORT["list-schedule"].changed
    with pytest.raises(DhelixError, match="it has strand-duplication, list-schedule, other"):
        REPORT["nothing"]


def test_table_says_what_each_pass_did() -> None:
    lines = rendered(REPORT).splitlines()
    duplication = next(line for line in lines if "strand-duplication" in line)
    for cell in (
        "1",
        "lowered",
        "12.3",
        "1000 -> 1450",
        "changed",
        "merged layer loops at while.7",
        "trip_count=8",
    ):
        assert cell in duplication
    schedule = next(line for line in lines if "list-schedule" in line)
    assert "refused (stored)" in schedule
    assert "no [red] lane" in schedule  # not taken for markup
    assert "->" not in next(line for line in lines if "disabled" in line)
