"""A report survives JSON and is readable in a terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.passes.framework import report
from dhelix.passes.framework.gain import Gain, StepParts
from dhelix.passes.framework.report import Note, PassReport, Report, StageReport

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


PARTS = StepParts(0.1, 0.02, 0.0, 0.01, 0.06, 0.01, 1e15, 8 << 30, 0.5, 0.0, "roofline of H200")
GAIN = Gain(PARTS, dataclasses.replace(PARTS, exposed=0.02))


def rendered(value: Report, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=160)
    value.print(console, verbose)
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
    stage = dataclasses.replace(REPORT.stages[1], parts=PARTS)
    with_gain = dataclasses.replace(REPORT, stages=(stage,), gain=GAIN, compile_seconds=2.5)
    assert Report.from_json(with_gain.to_json()) == with_gain
    with pytest.raises(DhelixError, match="not a dhelix report"):
        Report.from_json(with_gain.to_json().replace('"before"', '"earlier"'))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stages": [{}]}', REPORT.to_json()[:-40]])
def test_what_is_no_report_gets_one_error(text: str) -> None:
    with pytest.raises(DhelixError, match="not a dhelix report"):
        Report.from_json(text)


def test_passes_by_name_and_in_order() -> None:
    assert [p.name for p in REPORT] == ["strand-duplication", "list-schedule", "other"]
    assert REPORT["strand-duplication"].instruction_difference == 450
    assert REPORT.changed and not REPORT["list-schedule"].changed
    with pytest.raises(DhelixError, match="it has strand-duplication, list-schedule, other"):
        REPORT["nothing"]


def test_the_headline_says_what_was_gained_against_what_and_how_sure_that_is() -> None:
    first, times, why, left, memory, sure, *more = rendered(dataclasses.replace(REPORT, gain=GAIN)).splitlines()
    assert first == "jit_step: changed by strand-duplication"
    assert "predicted step time 200.0 ms -> 160.0 ms (1.25 x as fast)" in times and "DHELIX=off" in times
    assert why.strip() == "changes: exposed communication -40.0 ms" and "peak memory" in memory
    assert "roofline of H200" in sure and "50% of the operators' time is guessed" in sure
    assert left.strip().startswith("where the time goes: kernels 100.0 ms, ") and "`dhelix profile`" in more[0]


def test_the_headline_says_what_to_set_where_another_launch_setting_is_mostly_faster() -> None:
    measured = dataclasses.replace(GAIN.after, link="no-p2p", setting="default", guessed=0.0)
    said = rendered(dataclasses.replace(REPORT, gain=dataclasses.replace(GAIN, after=measured)))
    assert (
        "to try: launch setting CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_MIN_NCHANNELS=16" in said and "profile`" not in said
    )
    fastest = dataclasses.replace(measured, setting="small-buffers")
    assert "to try" not in rendered(dataclasses.replace(REPORT, gain=dataclasses.replace(GAIN, after=fastest)))


def test_the_headline_advises_a_constraint_where_the_strands_communicate_more() -> None:
    before, after = (dataclasses.replace(one, sent=sent) for one, sent in ((GAIN.before, 0.1), (GAIN.after, 0.2)))
    said = rendered(dataclasses.replace(REPORT, gain=Gain(before, after), left_alone="two strands are not faster"))
    assert "to try: `jax.lax.with_sharding_constraint`" in said and "100.0 ms -> 200.0 ms" in said
    assert "with_sharding_constraint" not in rendered(dataclasses.replace(REPORT, gain=GAIN))


def test_the_headline_says_why_nothing_was_gained() -> None:
    alone = dataclasses.replace(REPORT, left_alone="it runs on one device", gain=None)
    assert rendered(alone).startswith("jit_step runs unchanged: it runs on one device\n")
    refused = Report("jit_step", "", (StageReport("post-scheduler", "jit_step", (DROPPED, SCHEDULE)),))
    assert rendered(refused).startswith("jit_step runs unchanged: no [red] lane\n")
    assert "gain not predicted" in rendered(REPORT)


def test_table_says_what_each_pass_did_and_verbosely_all_facts() -> None:
    table = "strand-duplication ", "list-schedule ", "other "
    duplication, schedule, other = (
        next(line for line in rendered(REPORT).splitlines() if line.startswith(name)) for name in table
    )
    assert "changed" in duplication and "merged layer loops" in duplication and "trip_count" not in duplication
    assert "refused" in schedule and "no [red] lane" in schedule  # brackets are not taken for markup
    assert "disabled" in other
    verbose = [line for line in rendered(REPORT, verbose=True).splitlines() if line.startswith(table)]
    for cell in ("lowered", "12.3", "1000 -> 1450", "changed", "merged layer loops at while.7", "trip_count=8"):
        assert cell in verbose[0]
    assert "refused" in verbose[1] and "->" not in verbose[2]
