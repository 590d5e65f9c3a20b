"""Predictions of pipelines: step times composed of the times of parts of compiled programs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhelix.benchmarks.pipeline import predictions as pipeline_predictions
from dhelix.benchmarks.pipeline import run as pipeline
from dhelix.benchmarks.pipeline.predictions import BIDIRECTIONAL, ZERO_BUBBLE, Predictions, Times
from dhelix.benchmarks.pipeline.tables import read
from dhelix.benchmarks.strands.variants import SETTINGS

LAYERS, STAGES, MICROBATCHES = 16, 2, 16
TIMES = Times(
    forward=1e-3, backward=2e-3, both=2.5e-3, products=1e-3, head=0.0, embedding=0.0, send=0.0, beside=10e-3,
    communicates=False,
)  # fmt: skip
W_STEP_MS = 400.0


def predicted(monkeypatch: pytest.MonkeyPatch, *names: str, **times: Any) -> dict[str, float]:
    """Predicted milliseconds of programs that all have the part times `TIMES`, with `times` in place of some."""
    parts = Times(**{**vars(TIMES), **times})
    monkeypatch.setattr(pipeline_predictions, "times_of", lambda module, costs: parts)
    monkeypatch.setattr(pipeline_predictions, "settled", lambda module, costs: costs)
    played = SimpleNamespace(seconds=W_STEP_MS / 1e3)
    monkeypatch.setattr(pipeline_predictions, "simulate_module", lambda *arguments: played)
    programs: Any = dict.fromkeys(names)
    return Predictions(SETTINGS["default"], programs, LAYERS, STAGES, MICROBATCHES).all()


def test_1f1b_takes_its_layers_and_its_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(monkeypatch, "1F1B")
    assert found["1F1B"] == pytest.approx((MICROBATCHES + STAGES - 1) * 8 * 3 + 10)


def test_a_stages_own_ends_are_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("1F1B", "1F1B, shared ends", "interleaved, shared ends")
    alone = predicted(monkeypatch, *names)
    found = predicted(monkeypatch, *names, head=1e-3, embedding=0.5e-3)
    more = {name: found[name] - alone[name] for name in names}
    assert more["interleaved, shared ends"] == pytest.approx(1.5 * MICROBATCHES)
    assert more["1F1B"] == pytest.approx(1.0 * MICROBATCHES, rel=0.2)
    assert more["1F1B, shared ends"] > 8 * (2 - 1) * MICROBATCHES  # they couple a forward and a backward of 8 layers


def test_messages_are_waited_for_unless_they_leave_beside_layers_that_do_not_communicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = predicted(monkeypatch, "interleaved")["interleaved"]
    beside, waited = (
        predicted(monkeypatch, "interleaved", send=1e-3, communicates=each)["interleaved"] for each in (False, True)
    )
    assert base < beside < base + 10 < waited - 40


def test_what_co_executes_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(monkeypatch, "DualPipeV", "interleaved", "1F1B")
    assert found["DualPipeV"] < found["interleaved"] < found["1F1B"]


def test_schedules_without_a_program_need_one_that_knows_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(monkeypatch, "1F1B", "W, dp")
    assert found["W, dp"] == W_STEP_MS
    # The work, the last stage's wait for one forward chunk, and the work outside the loops.
    assert found[ZERO_BUBBLE] == pytest.approx(MICROBATCHES * 8 * 3 + 4 + 10)
    assert found[BIDIRECTIONAL] < W_STEP_MS
    assert set(predicted(monkeypatch, "1F1B")) == {"1F1B", ZERO_BUBBLE}
    assert set(predicted(monkeypatch, "no pipeline")) == {"no pipeline"}


@pytest.mark.slow
@pytest.mark.deviceless
def test_programs_on_paper_are_predicted(tmp_path: Path) -> None:
    from dhelix.benchmarks.pipeline.worker import PipelineWorker

    sizes = "--preset llama-demo --layers 8 --seq 128 --vocab 64 --microbatches 4 --on_paper --threads 1".split()
    options = pipeline.parser().parse_args([*sizes, "--variants", "W, xla; 1F1B; no pipeline"])
    pipeline.complete(options)
    options.setting, options.seconds, options.out, options.file = "default", 1e6, tmp_path, tmp_path / "r.json"
    worker = PipelineWorker(options)
    assert not list(worker.parts())
    worker.save()
    run = read(tmp_path / "r.json")
    assert not run.dropped and not any(r.failed for r in run.results)
    assert [r.variant for r in run.results] == ["W, xla", "1F1B", "no pipeline", ZERO_BUBBLE, BIDIRECTIONAL]
    assert all(r.predicted_ms for r in run.results)
    parts = run.on["predicted from, default"]
    assert parts["1F1B"]["both"] is None and parts["1F1B"]["head"] > 0
    assert parts["W, xla"]["both"] < parts["W, xla"]["forward"] + parts["W, xla"]["backward"] + 0.1
