"""The benchmark of pipelines: the compared variants, tables, and one call on CPU devices."""

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dhelix.benchmarks.pipeline import run as pipeline
from dhelix.benchmarks.pipeline.tables import groups, read, tables
from dhelix.benchmarks.pipeline.variants import ESSENTIAL, VARIANTS, Variant, options_of, training_of
from dhelix.benchmarks.strands.results import Result, Run
from dhelix.benchmarks.strands.variants import OURS, SETTINGS, XLA, chosen
from dhelix.errors import DhelixError
from dhelix.models import Training, preset
from dhelix.passes.framework.manager import PassManager, Stage

ROOT = Path(pipeline.__file__).parents[2]


def result(setting: str, variant: str, ms: float, **facts: object) -> Result:
    found = Result(setting, variant, [ms + 1, ms, ms - 1], [2.0, 1.0], peak_gib=30.0)
    return dataclasses.replace(found, **facts)  # type: ignore[arg-type]


def run(*results: Result, machine: str = "a", **workload: object) -> Run:
    on = {"jax": "0.11.2", "machine": machine, "gpus": "4 x H200", "date": "2026-11-21"}
    sizes = {"preset": "llama-8b", "layers": 16, "seq": 8192, "microbatches": 16, "vocab": 32000, "stages": 2, "tp": 2}
    return Run(on, {**sizes, **workload}, 131072, 4e15, 4, 989e12, list(results))


MEASURED = (
    result("no_p2p", "W, dp", 3000, predicted_ms=2970.0),
    result("no_p2p_connections1", "W, dp", 2900),
    result("no_p2p", "1F1B", 3400),
    result("no_p2p_connections1", "1F1B", 3300),
    result("no_p2p", "DualPipeV, dp", 3100),
    result("no_p2p", "no pipeline", 5800),
    Result("no_p2p", "zero-bubble V", predicted_ms=3200.0),
)


def test_kinds_of_variants() -> None:
    assert {VARIANTS[name].kind for name in ("1F1B", "interleaved", "DualPipeV", "no pipeline, GSPMD")} == {XLA}
    assert {VARIANTS[name].kind for name in ("W, xla", "DualPipeV, dp", "no pipeline, strands, dp")} == {OURS}
    assert set(chosen(ESSENTIAL, VARIANTS, "variant")) <= set(VARIANTS)


def test_baselines_of_pipelines_run_a_stages_own_work() -> None:
    own = [v for v in VARIANTS.values() if v.pipelined and v.kind == XLA and "shared" not in v.name]
    assert {v.schedule for v in own} == {"1f1b", "interleaved", "dualpipev"}
    assert not any(v.shared_ends for v in own)


@pytest.mark.parametrize("setting", ["default", "copy_engine1", "no_p2p_connections1"])
def test_every_variant_has_options_for_every_setting(setting: str) -> None:
    for variant in VARIANTS.values():
        training = _training(variant)
        options = options_of(variant, training, SETTINGS[setting])
        PassManager(options["passes"])
        assert bool(options["passes"]) == (variant.kind == OURS)
        assert ("pipeline" in options) == variant.pipelined
        lowered = any(one.stage is Stage.LOWERED for one in options["passes"])
        assert lowered == (variant.kind == OURS and not variant.pipelined)


def _training(variant: Variant) -> Training:
    return training_of(variant, preset("llama-demo", 8), 2, 2, 4, jax.devices()[:4])


def test_speed_up_is_over_the_best_pipeline_baseline_of_the_link() -> None:
    text = tables([run(*MEASURED)])
    assert "Best pipeline baseline: 1F1B (no_p2p_connections1), 3300.0 ms" in text
    assert "Strands: W, dp (no_p2p_connections1), 2900.0 ms, 1.138 times as fast (must be 1.05, should be 1.12)" in text
    assert "Best without a pipeline: no pipeline (no_p2p), 5800.0 ms, 2.000" in text
    assert "| no_p2p | W, dp | 3000.0 (2999.0-3001.0) | 1.100 | 2970.0 (-1.0%) | 30.00 | 0 |" in text
    assert "| no_p2p_connections1 | **W, dp** |" in text
    assert "| no_p2p | zero-bubble V |  |  | 3200.0 |  |  |" in text


def test_predictions_alone_are_compared_with_each_other() -> None:
    some = [dataclasses.replace(r, steps_ms=[], losses=[], predicted_ms=r.median_ms) for r in MEASURED[:4]]
    text = tables([run(*some)])
    assert "predicted**" in text
    assert "2900.0 ms, 1.138 times as fast" in text
    assert "Losses" not in text


def test_losses_that_differ_are_named() -> None:
    assert "within bf16's rounding" in tables([run(*MEASURED)])
    wrong = result("no_p2p", "interleaved", 3300, losses=[2.0, 1.1])
    text = tables([run(*MEASURED, wrong)])
    assert "differ by 1e-01 at most (interleaved (no_p2p)), more than bf16 rounds: interleaved (no_p2p)." in text


def test_only_one_workload_on_one_machine_over_one_link_is_compared() -> None:
    other = result("default", "W, dp", 2000)
    found = groups([run(*MEASURED), run(other), run(other, machine="b"), run(other, stages=4)])
    assert [(g.link, len(g.results)) for g in found] == [("no-p2p", 7), ("nvlink", 1), ("nvlink", 1), ("nvlink", 1)]


def test_what_failed_is_said() -> None:
    failed = Result("no_p2p", "W, list", failed="did not compile: X")
    assert "- no_p2p / W, list: did not compile: X" in tables([run(*MEASURED, failed)])


def test_results_survive_a_file_and_other_files_are_refused(tmp_path: Path) -> None:
    some = run(*MEASURED)
    some.write(tmp_path / "a.json")
    assert read(tmp_path / "a.json") == some
    (tmp_path / "b.json").write_text('{"results": []}')
    with pytest.raises(DhelixError, match=r"holds no results of benchmarks/pipeline/run\.py"):
        read(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "3"], "3 stages do not divide 4 GPUs"),
        (["--variants", ";"], "at least one variant"),
        (["--variants", "2F2B"], "no variant '2F2B'"),
        (["--settings", "two_nodes"], "one process"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    arguments: argparse.Namespace = pipeline.parser().parse_args(options)
    with pytest.raises(DhelixError, match=message):
        pipeline.complete(arguments)


@pytest.mark.slow
def test_a_call_on_cpu_devices(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    sizes = "--preset llama-demo --layers 4 --seq 32 --vocab 64 --microbatches 3 --rounds 2 --steps 1".split()
    rest = ["--variants", "W, dp;no pipeline", "--name", "tiny", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "pipeline" / "run.py"), *sizes, *rest]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "| default | **W, dp** |" in output
    assert "within bf16's rounding" in output
    found = read(tmp_path / "tiny.json")
    assert [len(r.steps_ms) for r in found.results] == [2, 2]
    assert found.workload["tp"] == found.workload["stages"] == 2
