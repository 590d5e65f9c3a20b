"""The benchmark of inference: programs, results, tables, and one call on 4 CPU devices."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.benchmarks.inference import programs as inference_programs
from dhelix.benchmarks.inference import run as inference
from dhelix.benchmarks.inference.programs import Case, config_for, lowered, make_inputs, make_weights
from dhelix.benchmarks.inference.results import BOUND, TILE_WISE, XLA, CaseResult, Run, read, tables
from dhelix.errors import DhelixError
from dhelix.models import preset
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.profiles.profile import Provenance
from dhelix.runtime.compiler import deviceless
from dhelix.tests.quick import slow_but

ON = Provenance("NVIDIA H200", 2, "2026-01-31", nccl="2.28.9", jax="0.11.2", machine="9f3a")
WORKLOAD = {"preset": "llama-3.1-70b", "layers": 8, "tp": 2, "dtype": "bfloat16"}
TINY = ("--preset", "llama-demo", "--layers", "2", "--tp", "4", "--rounds", "2", "--calls", "2", "--threads", "2")


def arguments(out: Path, *flags: str) -> Any:
    return inference.parser().parse_args([*TINY, "--out", str(out), *flags])


def measured(out: Path, *flags: str) -> Run:
    given = arguments(out, *flags)
    config: Any = preset(given.preset, given.layers, vocab=8)
    return inference.measure(config, given.tp, given)


def case_result(**ms: float) -> CaseResult:
    rounds = {key.replace("hybrid_", "hybrid:").replace("_", " "): [value - 0.1, value, value + 0.1]
              for key, value in ms.items()}  # fmt: skip
    return CaseResult(50, rounds, differs={"ring": 0.01}, failed={"mosaic": "DhelixError: no kernel"})


def test_figures_are_of_medians() -> None:
    result = case_result(xla=10.0, no_communication=8.0, ring=9.0, hybrid_2=11.0)
    assert result.best == "ring"
    assert result.saved("ring") == pytest.approx(0.1) and result.saved("mosaic") is None
    assert result.net_hidden("ring") == pytest.approx(0.5) and result.net_hidden("hybrid:2") == pytest.approx(-0.5)
    assert result.net_hidden(BOUND) is None
    assert case_result(xla=10.0, no_communication=10.5, ring=9.0).net_hidden("ring") is None


def test_tables_have_the_papers_numbers_beside(tmp_path: Path) -> None:
    result = case_result(xla=10.0, no_communication=8.0, ring=9.0)
    result.mhz["ring"] = [1755.0, 1740.0, 1710.0]
    run = Run(ON, "nvlink", WORKLOAD, 0.05, {"prefill, 1 x 1024": result}, ["decode, 16 x 4096"])
    run.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == run
    text = tables([run])
    assert "**llama-3.1-70b shapes, 8 layers, TP 2, bfloat16; NVIDIA H200, nvlink; medians of 3 rounds**" in text
    assert "| prefill, 1 x 1024 | 20.0 % | ring | 10.0 % | 50.0 % |" in text
    assert "| DistFuse, 4 x A100-40GB | 8.43 to 25.05 % |  | 5.2 to 11.1 % | 44.3 % |" in text
    assert "| prefill, 1 x 1024 | ring | 9.000 | 0.100 | 10.0 % | 50.0 % | 0.0100 | 1740 |  |" in text
    assert "at most 0.0100 of the largest number; allowed are 0.0500" in text
    assert "- mosaic (prefill, 1 x 1024): DhelixError: no kernel\n- decode, 16 x 4096: no time left" in text
    (tmp_path / "other.json").write_text('{"cases": []}')
    with pytest.raises(DhelixError, match="holds no results of benchmarks/inference/run.py; leave it out"):
        read(tmp_path / "other.json")


def test_a_whole_model_is_timed_per_prompt_and_per_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_programs, "compiler_options", lambda mesh: {"xla_backend_optimization_level": 0})
    sizes = ("--prefill", "--decode", "8", "--cached", "32", "--layers", "1")
    run = measured(tmp_path / "r.json", "--whole", *sizes, "--forms", "hybrid:2")
    assert read(tmp_path / "r.json") == run and run.workload["whole"]
    (result,) = run.cases.values()
    assert set(result.ms) == {XLA, BOUND, "hybrid:2"} and not result.failed
    assert result.differs["hybrid:2"] < run.tolerance
    run.cases = {"decode, 8 x 32": case_result(xla=10.0, no_communication=8.0, ring=9.0)}
    text = tables([run])
    assert "**llama-demo shapes, whole model with 1 layers, TP 4, float32; " in text
    assert "| decode, 8 x 32 | 20.0 % | ring | 10.0 % | 50.0 % |" in text
    assert "| sequences x tokens | variant | ms per prompt or token | spread |" in text


@pytest.mark.parametrize("kind", slow_but(["decode"], ["prefill", "decode"]))
def test_a_whole_model_chooses_the_token_that_one_device_does(kind: Any) -> None:
    case = Case(kind, 4, 16, whole=True)
    results = []
    for devices in (1, 4):
        mesh = inference.make_mesh(1, devices)
        config = config_for(dataclasses.replace(LLAMA_PRESETS["llama-demo"], layers=1, vocab=64), mesh)
        operands = make_weights(config, mesh, whole=True), *make_inputs(config, mesh, case)
        (logits, chosen), _ = inference_programs.program(config, mesh, case, XLA)(*operands)
        assert logits.shape == (4, config.vocab) and 0.5 < np.std(logits) < 2.0
        np.testing.assert_array_equal(chosen, np.argmax(logits, axis=-1))
        results.append(logits)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant, reduced, gathered", [(XLA, 2, 2), ("monolithic", 2, 2), (BOUND, 0, 0)])
def test_a_whole_model_gathers_at_both_ends(variant: str, reduced: int, gathered: int) -> None:
    mesh = inference.make_mesh(1, 4)
    config = config_for(dataclasses.replace(LLAMA_PRESETS["llama-demo"], layers=2), mesh)
    text = lowered(config, mesh, Case("decode", 8, 32, whole=True), variant).as_text()
    assert text.count("stablehlo.all_reduce") == reduced  # the layer is lowered once
    assert text.count("stablehlo.all_gather") == gathered


def test_a_whole_model_has_all_layers_of_its_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(inference, "measure", lambda config, tp, given: seen.append(config.layers))
    monkeypatch.setattr(inference, "tables", lambda runs: "")
    for flags in ([], ["--whole"], ["--whole", "--layers", "2"]):
        monkeypatch.setattr(sys, "argv", ["inference.py", "--preset", "llama-8b", *flags])
        inference.main()
    assert seen == [8, 32, 2]


@pytest.mark.slow
def test_it_runs_on_cpu_devices_and_refuses_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inference_programs.parallel_of
    monkeypatch.setattr(
        inference_programs, "parallel_of", lambda variant: plain(BOUND if variant == "ring" else variant)
    )
    fast = {"xla_backend_optimization_level": 0}  # compiles fast
    monkeypatch.setattr(inference_programs, "compiler_options", lambda mesh: fast)
    sizes = ("--prefill", "16", "--decode", "8", "--cached", "32")
    run = measured(tmp_path / "r.json", *sizes, "--forms", "hybrid:2", "ring", "mosaic", TILE_WISE)
    assert read(tmp_path / "r.json") == run
    assert list(run.cases) == ["prefill, 1 x 16", "decode, 8 x 32"]
    for result in run.cases.values():
        assert set(result.ms) == {XLA, BOUND, "hybrid:2"}
        assert all(len(ms) == 2 and min(ms) > 0 for ms in result.ms.values()) and result.calls == 2
        assert result.differs["hybrid:2"] < run.tolerance < 1e-4
        assert result.differs["ring"] > 0.1 and "wrong by" in result.failed["ring"]
        assert "needs NVIDIA Hopper GPUs" in result.failed["mosaic"] and "bfloat16" in result.failed[TILE_WISE]


def test_a_budget_drops_what_no_longer_fits(tmp_path: Path) -> None:
    run = measured(tmp_path / "r.json", "--prefill", "16", "--decode", "8", "--budget_s", "1e-9")
    assert run.cases == {} and run.dropped == ["prefill, 1 x 16", "decode, 8 x 4096"]
    assert "- decode, 8 x 4096: no time left" in tables([read(tmp_path / "r.json")])


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    "case", [Case("prefill", 1, 1024), Case("decode", 64, 4096), Case("decode", 64, 4096, whole=True)], ids=str
)
def test_on_gpus_neither_weights_nor_caches_are_copied(case: Case) -> None:
    mesh = deviceless.mesh({"dp": 1, "tp": 4})
    config = config_for(dataclasses.replace(LLAMA_PRESETS["llama-3.1-70b"], layers=1, vocab=8), mesh)
    assert config.attention == "cudnn"
    weights = 2 * (config.hidden * (2 * 64 + 2 * 8) * 128 + 3 * config.hidden * config.ffn) // 4
    for variant in (XLA, BOUND, "hybrid:2", "ring", TILE_WISE):
        step = deviceless.compile(lowered(config, mesh, case, variant), **inference_programs.compiler_options(mesh))
        text, memory = step.as_text() or "", step.memory_analysis()
        assert (" all-reduce" in text) == (variant in (XLA, "hybrid:2"))
        assert variant == "ring" or (" all-gather" in text) == (case.whole and variant != BOUND)
        assert not re.search(r"= bf16\S* copy\(", text)
        assert memory is not None and memory.temp_size_in_bytes < weights // 2
        if case.kind == "decode":
            cache = 2 * 2 * 64 * 8 // 4 * case.capacity * 128
            assert memory.alias_size_in_bytes == cache


def test_mistakes_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (["--preset", "llama-9b"], ["--preset", "gpt-demo"], ["--tp", "99"], ["--layers", "0"]):
        monkeypatch.setattr(sys, "argv", ["inference.py", *TINY, *flags])
        with pytest.raises(SystemExit) as raised:
            inference.main()
        assert isinstance(raised.value.code, str) and "\n" not in raised.value.code


def test_calls_of_a_turn_and_what_may_differ() -> None:
    assert (
        inference.calls(0.03, 100.0) == 4 and inference.calls(1.0, 100.0) == 2 and inference.calls(1e-5, 100.0) == 100
    )
    config = dataclasses.replace(LLAMA_PRESETS["llama-8b"], layers=8)
    assert inference.tolerance(config, 2) == pytest.approx(3 * 2**-8 * 4)
    assert jax.devices()[0].platform == "cpu" and config_for(config, inference.make_mesh(1, 2)).attention == "xla"
