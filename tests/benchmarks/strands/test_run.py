"""The benchmark of strands: computed quantities, tables, settings and variants, and one call on CPU devices."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.strands import processes as strand_processes
from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands import worker as strand_worker
from dhelix.benchmarks.strands.results import Result, Run, causes, groups, read
from dhelix.benchmarks.strands.tables import tables
from dhelix.benchmarks.strands.variants import BOUND, OURS, SETTINGS, VARIANTS, XLA, chosen, passes_of
from dhelix.errors import DhelixError
from dhelix.models import preset
from dhelix.passes.framework.manager import PassManager
from dhelix.runtime.compiler import autotune_results
from dhelix.tests.machine import PATIENCE, slowness

ROOT = Path(strands.__file__).parents[2]


def result(setting: str, variant: str, ms: float, compute: float = 0.0, **facts: object) -> Result:
    found = Result(setting, variant, [ms + 1, ms, ms - 1], [2.0, 1.0], peak_gib=10.0)
    if compute:
        found.span_ms, found.compute_ms, found.communication_ms, found.hidden_ms = ms, compute, 400.0, 300.0
    return dataclasses.replace(found, **facts)  # type: ignore[arg-type]


def run(*results: Result, machine: str = "a", **workload: object) -> Run:
    on = {"jax": "0.11.2", "machine": machine, "gpus": "4 x H200", "date": "2026-11-21"}
    return Run(on, {"preset": "llama-8b", "seq": 8192, **workload}, 131072, 6e15, 4, 989e12, list(results))


MEASURED = (
    result("default", "plain", 1080, compute=920, predicted_ms=1026.0),
    result("default", "plain, O1", 1400),
    result("connections1", "plain", 1070, compute=900),
    result("default", "plain, no communication", 890, compute=880),
    result("default", "strands", 1020, compute=970),
    result("default", "strands, dp", 1010, losses=[2.0, 1.01]),
    result("default", "strands, dp, no slice fusion", 1005),
    result("connections1", "strands, dp", 1000),
    result("copy_engine1", "strands, dp", 990),
    result("copy_engine1", "strands, dp, decomposed", 980),
    result("default", "strands, no communication", 870, compute=870),
)


def test_net_hidden_is_counted_from_xlas_best_to_the_fastest_without_communication() -> None:
    (group,) = groups([run(*MEASURED)])
    assert group.xla is group.find("connections1", "plain")
    assert group.communication_cost == 200
    strands_step = group.find("default", "strands")
    assert strands_step is not None
    assert group.net_hidden(strands_step) == pytest.approx(0.25)
    assert group.slow_down(strands_step) == pytest.approx(0.5)
    assert group.launch_interval(strands_step) == pytest.approx(0.25)
    assert strands_step.under_compute == 0.75
    assert group.speed_up(strands_step) == pytest.approx(1070 / 1020)
    assert group.mfu(strands_step) == pytest.approx(6e15 / (1.02 * 4 * 989e12))
    assert group.tokens_per_second(strands_step) == pytest.approx(131072 / 1.02)


def test_losses_are_compared_with_the_plain_program() -> None:
    (group,) = groups([run(*MEASURED)])
    other, bound = group.find("default", "strands, dp"), group.find("default", "plain, no communication")
    assert other is not None and bound is not None
    assert group.loss_difference(other) == pytest.approx(0.01)
    assert group.loss_difference(bound) is None  # the losses are wrong by design


def test_results_of_many_steps_are_judged() -> None:
    """No step was timed, so this is the only table."""

    def checked(variant: str, factor: float, **facts: Any) -> Result:
        losses = [factor * 10 / step for step in range(1, 21)]
        return result("default", variant, 1, steps_ms=[], losses=losses, grad_norms=losses, **facts)

    made = run(
        checked("plain", 1.0), checked("strands", 1.0 + 1e-4), checked("strands, dp", 1.01),
        checked("strands, list", 1.0, failed="did not run"), checked("plain, no communication", 3.0),
    )  # fmt: skip
    made.results[3].losses.clear()
    rows = [line for line in tables([made]).splitlines() if line.startswith("| default")]
    assert rows == [
        "| default | plain | 20 | 10.0000 to 0.5000 | 0e+00 | 0e+00 | yes |",
        "| default | strands | 20 | 10.0010 to 0.5000 | 1e-04 | 1e-04 | yes |",
        "| default | strands, dp | 20 | 10.1000 to 0.5050 | 1e-02 | 1e-02 | **no** |",
    ]
    made.results[1].losses[7] = float("nan")
    assert "| inf | inf | **no** |" in tables([made])


def test_causes_add_up_to_the_whole_gain() -> None:
    (group,) = groups([run(*MEASURED)])
    found = {cause.name: cause.saved_ms for cause in causes(group)}
    assert found == pytest.approx({
        "copies saved": 20, "overlap, XLA's order": 40, "order": 10, "XLA's options": 5, "launch settings": 5,
        "copy engines": 10, "collectives decomposed": 10,
    })  # fmt: skip
    best = group.best(OURS)
    assert best is not None and sum(found.values()) == pytest.approx(1080 - best.median_ms)


def test_what_was_not_run_is_no_cause() -> None:
    (group,) = groups([run(result("default", "plain", 10), result("copy_engine", "strands, dp", 8))])
    assert [(c.name, c.saved_ms) for c in causes(group)] == [("strands, order, copy engines", 2)]
    assert groups([run(result("default", "strands", 10))])[0].xla is None


def test_programs_without_graphs_stand_for_those_with() -> None:
    (group,) = groups([run(*(
        dataclasses.replace(r, variant=f"{r.variant}, no graphs")
        for r in MEASURED if r.setting == "default"
    ))])  # fmt: skip
    assert [(c.name, c.saved_ms) for c in causes(group)] == [
        ("copies saved", 20), ("overlap, XLA's order", 40), ("order", 10), ("XLA's options", 5)
    ]  # fmt: skip
    best = group.best(OURS)
    assert best is not None and group.plain(best) is group.find("default", "plain")
    assert group.loss_difference(best) == 0
    assert f"{best.peak_gib:.2f} (1.000)" in tables([group.run])


def test_causes_begin_where_strands_in_xlas_order_were_run() -> None:
    engines = [("plain", 99), ("strands", 90), ("strands, dp", 88), ("strands, dp, decomposed", 89)]
    default = [result("default", "plain", 100), result("default", "strands, dp", 95)]
    (group,) = groups([run(*default, *(result("copy_engine1", name, ms) for name, ms in engines))])
    assert [(c.name, c.saved_ms) for c in causes(group)] == [("strands", 9), ("order", 2)]


def test_the_traced_step_is_split_by_itself() -> None:
    (group,) = groups([run(*(dataclasses.replace(r, steps_ms=[1.1 * ms for ms in r.steps_ms]) for r in MEASURED))])
    step = group.find("default", "strands")
    assert step is not None
    assert group.traced_cost == 200
    assert (group.traced_hidden(step), group.slow_down(step), group.launch_interval(step)) == (0.25, 0.5, 0.25)
    (untraced,) = groups([run(*(dataclasses.replace(r, span_ms=None) for r in MEASURED))])
    assert untraced.traced_hidden(untraced.results[0]) is None


def test_only_one_workload_on_one_machine_over_one_link_is_compared() -> None:
    plain = result("default", "plain", 10)
    found = groups([
        run(plain),
        run(result("connections1", "plain", 9)),
        run(plain, machine="b"),
        run(plain, seq=4096),
        run(result("no_p2p", "plain", 20)),
    ])  # fmt: skip
    assert [len(group.results) for group in found] == [2, 1, 1, 1]
    assert [group.link for group in found] == ["nvlink", "nvlink", "nvlink", "no-p2p"]


def test_tables_hold_the_figures_and_what_was_not_run() -> None:
    failed = dataclasses.replace(result("default", "plain, PGLE", 0), steps_ms=[], failed="did not compile: X")
    some = run(*MEASURED, failed)
    some.dropped.append("setting user_buffers: 3 s were left")
    text = tables([some])
    assert "| default | strands | 1020.0 (1019.0-1021.0) | 1.049 | 25.0% |" in text
    assert "1026.0 (-5.0%)" in text
    assert "| copy_engine1 | **strands, dp, decomposed** |" in text
    assert "XLA's best: plain (connections1), 1070.0 ms" in text
    assert "net hidden 45.0%" in text
    assert "- setting user_buffers: 3 s were left\n- default / plain, PGLE: did not compile: X" in text


def test_programs_on_paper_have_predictions_alone() -> None:
    known = [("plain", 100.0), ("strands, dp", 80.0)]
    text = tables([run(*(Result("default", name, predicted_ms=ms) for name, ms in known))])
    assert "| default | strands, dp | 80.0 | 1.250 |" in text
    assert "net hidden" not in text


def test_results_survive_a_file(tmp_path: Path) -> None:
    some = run(*MEASURED)
    some.write(tmp_path / "a.json")
    assert read(tmp_path / "a.json") == some


@pytest.mark.parametrize("text", ["{", "{}", '{"results": [{"step": 1}]}', "[]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(DhelixError, match="holds no results of benchmarks/strands/run.py"):
        read(file)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_variant_has_passes_for_every_setting(setting) -> None:
    for variant in VARIANTS.values():
        PassManager(passes_of(variant, setting))
        assert variant.kind != XLA or variant.decomposed or not passes_of(variant, setting)


def test_kinds_of_variants() -> None:
    assert {VARIANTS[name].kind for name in ("plain", "plain, PGLE", "plain, no slice fusion")} == {XLA}
    assert {VARIANTS[name].kind for name in ("strands", "plain, list")} == {OURS}
    assert {v.kind for v in VARIANTS.values() if not v.communication} == {BOUND}


def test_fewer_gpus_have_the_shards_of_more() -> None:
    whole = preset("llama-8b", 8, vocab=32_000)
    half = strand_worker.narrowed(whole, tp=2, shards=4)
    assert (half.heads, half.kv_heads, half.ffn, half.vocab) == (16, 4, 7168, 16_000)
    assert (half.hidden, half.head_dim, half.layers) == (whole.hidden, whole.head_dim, 8)
    with pytest.raises(DhelixError, match="heads 32.*no multiple of 3 shards; give --shards"):
        strand_worker.narrowed(whole, tp=2, shards=3)


def test_names_are_checked() -> None:
    assert chosen(" default, connections1 ", SETTINGS, "setting") == ["default", "connections1"]
    assert chosen("plain; strands, dp;", VARIANTS, "variant") == ["plain", "strands, dp"]
    with pytest.raises(DhelixError, match="no variant 'x'"):
        chosen("plain;x", VARIANTS, "variant")


def test_a_process_is_started_as_its_setting_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    found = strand_processes.environment(SETTINGS["copy_engine1"], tmp_path)
    assert (found["NCCL_CTA_POLICY"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("2", "1")
    assert found["XLA_FLAGS"].split() == [
        "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true", "--mine"
    ] or "autotune" in found["XLA_FLAGS"]  # fmt: skip
    even = strand_processes.environment(SETTINGS["copy_engine1_even"], tmp_path)
    added = set(even["XLA_FLAGS"].split()) - set(found["XLA_FLAGS"].split())
    assert added == {"--xla_gpu_enable_highest_priority_async_stream=false"}
    arguments = strands.parser().parse_args([])
    places = strand_processes.places(arguments, SETTINGS["two_nodes"])
    assert [(place["process"], place["devices"]) for place, _ in places] == [(0, (0, 1)), (1, (2, 3))]
    assert len({environment["NCCL_HOSTID"] for _, environment in places}) == 2


def test_choices_of_the_autotuner_go_from_process_to_process(tmp_path: Path) -> None:
    shipped = autotune_results.file()
    assert shipped is not None
    strand_processes.keep_choices(tmp_path)  # the autotuner chose nothing
    assert not list(tmp_path.iterdir())
    (tmp_path / "autotune.part.pbtxt").write_text(shipped.read_text().splitlines()[0] + "\n")
    strand_processes.keep_choices(tmp_path)
    kept = (tmp_path / "autotune.pbtxt").read_text()
    assert kept == autotune_results.merged([shipped])
    (tmp_path / "autotune.part.pbtxt").write_text("entries { key { dev")
    strand_processes.keep_choices(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["autotune.pbtxt"]
    assert (tmp_path / "autotune.pbtxt").read_text() == kept


def test_errors_of_passes_are_told_in_one_line() -> None:
    traceback = 'Traceback (most recent call last):\n  File "x", line 3\n    raise E("no")\nx.PassRefusal: loop: no\n'
    assert strand_worker.first_line(RuntimeError(f"INTERNAL: {traceback}\nAt:\n  x(3): f")) == "x.PassRefusal: loop: no"
    assert strand_worker.first_line(ValueError("a\nb")) == "ValueError: a"


def started(code: str) -> subprocess.Popen[bytes]:
    return strand_processes.start([sys.executable, "-c", code], dict(os.environ))


def test_a_process_that_fails_ends_the_others() -> None:
    began = time.monotonic()
    later = began + PATIENCE
    sleeper, failing = "import time; time.sleep(60)", "raise SystemExit(3)"
    assert strand_processes.wait([started(failing), started(sleeper)], later) == (False, "a process ended with code 3")
    assert strand_processes.wait([started(sleeper)], began) == (False, "out of time")
    assert strand_processes.wait([started("")], later) == (False, "")
    assert time.monotonic() - began < 50 * slowness()


def test_a_process_waits_between_its_parts(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"for part in (1, 2): print('part', part); print('{strand_processes.PART_DONE}', flush=True); input()"
    process = started(code)
    for part in (1, 2):
        assert strand_processes.wait([process], time.monotonic() + PATIENCE) == (True, "")
        assert capfd.readouterr().out == f"part {part}\n"
        assert process.poll() is None and process.stdin is not None
        process.stdin.write(b"\n")
    assert strand_processes.wait([process], time.monotonic() + PATIENCE) == (False, "")


@pytest.mark.slow
@pytest.mark.deviceless
def test_programs_on_paper_are_predicted(tmp_path: Path) -> None:
    options = strands.parser().parse_args(
        "--preset llama-demo --layers 2 --seq 128 --vocab 64 --microbatches 3 --on_paper --threads 2".split()
    )
    options.variants = ["plain", "plain, PGLE", "strands, dp"]
    options.setting, options.seconds, options.out, options.file = "default", 1e6, tmp_path, tmp_path / "r.json"
    worker = strand_worker.Worker(options)
    assert not list(worker.parts())
    worker.save()
    found = read(tmp_path / "r.json").results
    assert [r.failed for r in found] == [""] * 3
    assert all(r.predicted_ms and r.peak_gib for r in found)
    assert (tmp_path / "default.pgle.pbtxt").read_text().startswith("costs {")


@pytest.mark.slow
def test_a_call_on_cpu_devices(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    sizes = "--preset llama-demo --layers 2 --seq 32 --vocab 64 --microbatches 3 --rounds 2 --steps 1".split()
    what = ["--dp", "2", "--tp", "2", "--variants", "plain;strands", "--settings", "default,connections1"]
    rest = [*what, "--name", "tiny", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "strands" / "run.py"), *sizes, *rest]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert all(f"| {setting} | plain |" in output for setting in ("default", "connections1"))
    assert "within bf16" not in output and "M 3, TP 2, DP 2, " in output
    found = read(tmp_path / "tiny.json")
    assert [(r.setting, len(r.steps_ms)) for r in found.results] == [
        ("default", 2), ("default", 2), ("connections1", 2), ("connections1", 2)
    ]  # fmt: skip
    assert found.results[0].losses == found.results[1].losses == found.results[3].losses
    assert found.results[1].passes["strand-duplication"] == "changed"
