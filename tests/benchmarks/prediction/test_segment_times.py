"""Predicted segments compared with a recorded step.

The step has Llama-8B shapes, 8 layers and 16 micro-batches. It ran on 4 H200s, with all-gathers on copy engines.
"""

import json
from pathlib import Path

import pytest

from dhelix.benchmarks.prediction import segment_times
from dhelix.benchmarks.prediction.segment_times import Kind, Segment, Step

_DATA = Path(__file__).parents[2] / "testdata" / "segment_times"
_FILES = str(_DATA / "strands_dp.hlo.pb.gz"), str(_DATA / "strands_dp.json.gz")
STEP = "copy_engine1", "strands, dp", *_FILES


@pytest.fixture(scope="module")
def step() -> Step:
    return Step.read(*STEP)


@pytest.fixture(scope="module")
def found(step: Step) -> list[Segment]:
    return segment_times.segments_of(step)


@pytest.fixture(scope="module")
def kinds(step: Step) -> dict[str, Kind]:
    return {kind.kind: kind for kind in segment_times.kinds_of(step)}


def test_segments_of_a_recorded_step_took_what_is_predicted(found: list[Segment]) -> None:
    assert [s.number for s in found] == list(range(1, 9))
    assert {s.runs for s in found} == {120}
    assert sum(s.measured_us for s in found) == pytest.approx(6573, rel=0.001)
    assert all(abs(s.error) < 0.09 for s in found)
    assert segment_times.summary(found)["median_error"] < 0.04


def test_operators_and_waits_add_up_to_the_segments(found: list[Segment], kinds: dict[str, Kind]) -> None:
    compute = [k for name, k in kinds.items() if name not in ("all-gather", "reduce-scatter")]
    assert sum(k.measured_us for k in compute) == pytest.approx(sum(s.measured_us for s in found))
    assert sum(k.predicted_us for k in compute) == pytest.approx(sum(s.predicted_us for s in found), rel=0.001)


def test_collectives_without_a_name_in_the_trace_have_times(kinds: dict[str, Kind]) -> None:
    gathers, scatters = kinds["all-gather"], kinds["reduce-scatter"]
    assert gathers.operators == scatters.operators == 4
    assert gathers.measured_us / 4 == pytest.approx(153, abs=2)  # on copy engines
    assert scatters.measured_us / 4 == pytest.approx(303, abs=5)


def test_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["segment_times.py", "--out", str(tmp_path), "--step", *STEP])
    segment_times.main()
    record = json.loads((tmp_path / "segment_times_h200x4.json").read_text())
    assert record["segments"] == len(record["rows"]) == 8
    assert "alpha all-gather 1" in capsys.readouterr().out
