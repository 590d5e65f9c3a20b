"""`dhelix profile` on a small step, with recorded measurements and without any."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli
from dhelix.launch.profile import recorded as profile_recorded
from dhelix.launch.profile import step as profile_step
from dhelix.launch.profile import workers
from dhelix.profiles import hardware
from dhelix.profiles.estimates.interpolation import roofline_seconds
from dhelix.profiles.files import storage, xla_tables
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import PairTiming, Profile, Provenance, Section, Timing
from dhelix.runtime.profiling.session import Session, Step, pair_key

BIG = "bf16[8192,8192]{1,0}"
GEMM = json.dumps({
    "gemm_backend_config": {
        "alpha_real": 1,
        "beta": 0,
        "dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"]},
        "epilogue": "DEFAULT",
    }
})  # fmt: skip
TEXT = f"""HloModule jit_step, is_scheduled=true

gather {{
  part = bf16[2048,8192]{{1,0}} parameter(0)
  ROOT all-gather.1 = {BIG} all-gather(part), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}

twice {{
  a = {BIG} parameter(0)
  ROOT b = {BIG} add(a, a)
}}

ENTRY main {{
  x = {BIG} parameter(0)
  w = {BIG} parameter(1)
  mine = bf16[2048,8192]{{1,0}} parameter(2)
  all-gather-start.1 = ((bf16[2048,8192]{{1,0}}), {BIG}) async-start(mine), calls=gather
  gemm = ({BIG}, s8[4096]) custom-call(x, w), custom_call_target="__cublas$lt$matmul", backend_config={GEMM}
  product = {BIG} get-tuple-element(gemm), index=0
  fusion.1 = {BIG} fusion(product), kind=kLoop, calls=twice
  all-gather-done.1 = {BIG} async-done(all-gather-start.1)
  callback = {BIG} custom-call(fusion.1), custom_call_target="xla_ffi_python_gpu_callback", \
custom_call_has_side_effect=true
  ROOT out = ({BIG}, {BIG}) tuple(callback, all-gather-done.1)
}}
"""
WHERE = Provenance("NVIDIA H200", 4, "2026-01-31", nccl="2.28.9", jax="0.11.2")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "step.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def record(dump: Path, tmp_path: Path) -> Path:
    """A profile with made-up times for the whole step. A pair takes its longer time plus a part of the shorter."""
    step = Step(profile_step.of_dump(dump).module)
    profile = Profile("H200", "nvlink", (WHERE,))
    for setting in ("default", "connections1"):
        wanted = Session(profile, setting, None, hardware.H200, 4).missing(step)
        times = {item.first.key: 1.1 * roofline_seconds(item.first.key, hardware.H200) for item in wanted.alone}
        timings = {key: Timing(seconds, 0.01 * seconds, 10) for key, seconds in times.items()}
        pairs = {}
        for key in map(pair_key, wanted.pairs):
            one, two = times[key.first], times[key.second]
            share = 0.1 if isinstance(key.first, CollectiveKey) else 0.2
            seconds = max(one, two) + share * min(one, two)
            pairs[key] = PairTiming(seconds, seconds, seconds, one, two)
        operators = {k: t for k, t in timings.items() if isinstance(k, OperatorKey)}
        collectives = {k: t for k, t in timings.items() if isinstance(k, CollectiveKey)}
        profile = profile.with_section(Section(setting, operators, collectives, pairs, 1e-6))
    path = tmp_path / "record.json"
    storage.save(profile, path)
    return path


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").mkdir()
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path / "profiles"))
    monkeypatch.setattr(storage, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(workers, "gpus_here", lambda: ("", 0))


def dhelix_profile(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["profile", *map(str, arguments)])
    return stopped.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Calls the command with --json and returns the printed object."""

    def call(*arguments: object) -> dict[str, Any]:
        assert dhelix_profile(*arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_a_record_takes_the_place_of_gpus(dump: Path, record: Path, tmp_path: Path, measured: Callable) -> None:
    out = tmp_path / "out.json"
    result = measured(dump, "--recorded", record, "--out", out, "--settings=default,connections1")
    assert result["hardware"] == "H200" and result["gpus"] == 4 and result["file"] == str(out)
    for section in result["settings"].values():
        # Everything except the callback is measured.
        assert section["coverage"]["measured"] > 0.9 and section["coverage"]["interpolated"] == 0.0
        assert section["missing"] == {"alone": [], "pairs": []}
        assert [(e["calls"], e["source"]) for e in section["operators"][:2]] == [(1, "measured")] * 2
        (gather,) = section["collectives"]
        assert gather["key"].startswith("all-gather 134217728B 4x1")
        assert gather["bus_bytes_per_second"] == pytest.approx(0.75 * 2**27 / gather["seconds"])
    profile = storage.load(out)
    assert set(profile.sections) == {"default", "connections1"}
    assert profile.measured_on == (WHERE,)


def test_pairs_say_what_launch_order_does(dump: Path, record: Path, tmp_path: Path, measured: Callable) -> None:
    result = measured(dump, "--recorded", record, "--out", tmp_path / "out.json")
    pairs = result["settings"]["default"]["pairs"]
    gather = [pair for pair in pairs if pair["other"].startswith("all-gather")]
    mixed = [pair for pair in gather if pair["one"] != pair["other"]]
    assert len(mixed) == 2  # the product and the fusion
    for pair in mixed:
        assert pair["one_first"]["oef"] == pytest.approx(0.8, abs=1e-3)
        assert pair["other_first"]["oef"] == pytest.approx(0.9, abs=1e-3)
        assert pair["one_first"]["steady"] and pair["other_first"]["steady"]
    product = next(pair for pair in mixed if pair["one"].startswith("gemm"))
    assert product["one_first"]["slow_down_one"] < product["one_first"]["slow_down_other"]


def test_what_cannot_run_alone_is_said_and_the_rest_goes_on(
    dump: Path, record: Path, tmp_path: Path, measured: Callable
) -> None:
    result = measured(dump, "--recorded", record, "--out", tmp_path / "out.json")
    failures = result["settings"]["default"]["failures"]
    assert list(failures.items())[-1] == ("callback", "it has side effects")


def test_a_second_run_measures_nothing(
    dump: Path, record: Path, tmp_path: Path, measured: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    first = measured(dump, "--recorded", record, "--out", out)
    written = out.read_bytes()
    monkeypatch.setattr(profile_recorded.Recorded, "measure", lambda *_: pytest.fail("measured again"))
    assert measured(dump, "--recorded", record, "--out", out) == first
    assert out.read_bytes() == written


def test_force_measures_again(
    dump: Path, record: Path, tmp_path: Path, measured: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    measured(dump, "--recorded", record, "--out", out)
    original, items = profile_recorded.Recorded.measure, []

    def count(self: Any, batch: Any, repeats: int) -> Any:
        items.extend(batch)
        return original(self, batch, repeats)

    monkeypatch.setattr(profile_recorded.Recorded, "measure", count)
    measured(dump, "--recorded", record, "--out", out, "--force")
    assert len(items) > 3


def test_an_interrupted_run_leaves_a_valid_file_and_goes_on(
    dump: Path, record: Path, tmp_path: Path, measured: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    with pytest.MonkeyPatch.context() as patched:
        original = profile_recorded.Recorded.measure

        def until_pairs(self: Any, batch: Any, repeats: int) -> Any:
            if any(item.second for item in batch):
                raise KeyboardInterrupt
            return original(self, batch, repeats)

        patched.setattr(profile_recorded.Recorded, "measure", until_pairs)
        assert dhelix_profile(dump, "--recorded", record, "--out", out) == 130
    shown = capsys.readouterr()
    assert f"Interrupted; {out} holds what was measured, and the same command continues from there." in shown.out
    assert "Traceback" not in shown.err
    section = storage.load(out).section("default")
    assert section.operators and not section.pairs
    result = measured(dump, "--recorded", record, "--out", out)
    assert result["settings"]["default"]["missing"] == {"alone": [], "pairs": []}
    assert storage.load(out).section("default").pairs


def test_tables(dump: Path, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_profile(dump, "--recorded", record, "--out", tmp_path / "out.json") == 0
    text = capsys.readouterr().out
    for words in (
        "4 x H200, NVLink",
        "% measured, 0.0% interpolated, ",
        "GEMM nn 8192x8192x8192",
        "all-gather 128 MiB, 4 GPUs",
        "GB/s",
        "Pairs that overlap best",
        "of 2 pairs of compute and communication, 0 overlap better with compute launched first, 2 with the collective",
        "it has side effects",
    ):
        assert words in text, words


def test_without_gpus_it_says_what_it_would_measure(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_profile(dump, "--settings=default,connections1", "--hardware=H100") == 0
    text = capsys.readouterr().out
    assert "Without a GPU nothing is measured. On 4 x H100 this command would measure:" in text
    line = "2 operators and 1 collectives alone, 9 pairs; 1 cannot run alone"
    assert f"under default: {line}" in text and f"under connections1: {line}" in text
    assert "0.0% measured, 0.0% interpolated, 100.0% guessed" in text


def test_without_gpus_what_is_known_is_not_wanted(
    dump: Path, record: Path, tmp_path: Path, measured: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles" / storage.file_name("H200", "nvlink")
    out.write_bytes(record.read_bytes())
    assert dhelix_profile(dump, "--nopairs") == 0
    assert "0 operators and 0 collectives alone, 0 pairs" in capsys.readouterr().out
    result = measured(dump)
    assert result["settings"]["default"]["coverage"]["measured"] > 0.9
    assert result["file"] == str(out)


def test_pictures_and_xlas_files(dump: Path, record: Path, tmp_path: Path, measured: Callable) -> None:
    files = ["--heat_map", tmp_path / "p.png", "--pgle", tmp_path / "t.pbtxt", "--perf_table", tmp_path / "c.pbtxt"]
    measured(dump, "--recorded", record, "--out", tmp_path / "out.json", "--settings=default,connections1", *files)
    for setting in ("default", "connections1"):
        assert (tmp_path / f"p-{setting}.png").read_bytes().startswith(b"\x89PNG")
    costs = xla_tables.parse_cost_text((tmp_path / "t.pbtxt").read_text(), "t")
    assert {"gemm", "fusion.1", "all-gather-start.1"} <= set(costs)
    (table,) = xla_tables.parse_collective_table((tmp_path / "c.pbtxt").read_text(), "c").items()
    section = storage.load(record).section("default")
    assert table[1] == pytest.approx(section.collectives[table[0]].seconds, rel=1e-3)


def test_another_jax_is_warned_of(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profiles" / storage.file_name("H200", "nvlink")
    storage.save(Profile("H200", "nvlink", (Provenance("NVIDIA H200", 4, jax="0.3.1"),)), out)
    assert dhelix_profile(dump) == 0
    assert "warning: profile H200 nvlink was measured with jax 0.3.1" in capsys.readouterr().out


def test_two_files_are_compared_without_a_step(
    record: Path, tmp_path: Path, measured: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    storage.save(slower(storage.load(record), 1.04), other)
    result = measured("--compare", record, "--out", other)
    assert result["file"] == str(other) and result["compared_with"] == str(record)
    found = {(a["setting"], a["what"]): a for a in result["agreement"]}
    assert set(found) == set(itertools.product(("default", "connections1"), ("operators", "collectives", "pairs")))
    for agreement in found.values():
        assert agreement["compared"] > 0
        assert agreement["median"] == pytest.approx(0.04, rel=1e-2) == agreement["p90"]
    assert dhelix_profile("--compare", record, "--out", other) == 0
    text = capsys.readouterr().out
    for words in (f"Agreement of {other} with {record}", "Largest differences", "4.0%", "+4.0%"):
        assert words in text, words


def test_a_step_is_compared_after_it_is_measured(
    dump: Path, record: Path, tmp_path: Path, measured: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [dump, "--recorded", record, "--out", tmp_path / "out.json", "--compare", record]
    result = measured(*arguments)
    assert {a["setting"] for a in result["agreement"]} == {"default"}
    assert all(a["median"] == pytest.approx(0.0, abs=1e-9) for a in result["agreement"])
    assert dhelix_profile(*arguments) == 0
    assert "Operators of the step" in (text := capsys.readouterr().out) and "Agreement of" in text


def test_profiles_of_different_hardware_are_compared_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, gpu in (("one.json", "H200"), ("two.json", "H100")):
        storage.save(Profile(gpu, "nvlink"), tmp_path / name)
    assert dhelix_profile("--compare", tmp_path / "one.json", "--out", tmp_path / "two.json") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "warning: the compared profiles are for different hardware: H100 with link nvlink, and H200" in text
    assert "no entry in common" in text


def slower(profile: Profile, factor: float) -> Profile:
    def section(of: Section) -> Section:
        alone = [
            {k: replace(t, seconds=t.seconds * factor) for k, t in part.items()}
            for part in (of.operators, of.collectives)
        ]
        pairs = {k: replace(t, seconds=t.seconds * factor) for k, t in of.pairs.items()}
        return replace(of, operators=alone[0], collectives=alone[1], pairs=pairs)

    return replace(profile, sections={name: section(of) for name, of in profile.sections.items()})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 1, ', "ends too early"),
        ("[1, 2]", "profile"),
        (storage.dumps(Profile("A40", "nvlink")), "holds a profile of A40 with link nvlink"),
    ],
)
def test_a_file_that_is_no_profile_of_this_is_left_as_it_is(
    dump: Path, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    out = tmp_path / "out.json"
    out.write_text(content)
    assert dhelix_profile(dump, "--recorded", record, "--out", out) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and message in shown.err and str(out) in shown.err
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a step (--preset NAME, or a dump)"),
        (["DUMP", "DUMP"], "give only one step"),
        (["DUMP", "--preset=llama-demo"], "give only one step"),
        (["DUMP", "--settings=fast"], "--settings fast is unknown; choose from default, connections1"),
        (["DUMP", "--link=two-nodes", "--bases=llama-8b"], "measured within a node"),
        (["DUMP", "--recorded=r.json"], "--recorded needs --out"),
        (["DUMP", "--recorded=r.json", "--out=o.json", "--collectives"], "leave out --collectives"),
        (["--collectives", "--heat_map=p.png"], "--heat_map needs a step"),
        (["DUMP", "--recorded=missing.json", "--out=o.json"], "missing.json"),
        (["--compare=missing.json", "--out=o.json"], "missing.json: no such file"),
        (["DUMP", "--compare=missing.json"], "missing.json: no such file"),
        (["missing.txt"], "no such file or folder"),
        (["DUMP", "--heat_map=p.png"], "there is nothing to draw"),
        (["DUMP", "--perf_table=c.pbtxt"], "run with --collectives"),
        (["DUMP", "--pgle=none/t.pbtxt"], "cannot write"),
        (["--preset=llama-demo", "--mesh=tp=3"], ""),
    ],
)
def test_wrong_arguments(
    dump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dhelix_profile(*(str(dump) if a == "DUMP" else a for a in arguments)) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and shown.err.startswith("dhelix profile: ")
    assert message in shown.err


def test_a_dump_for_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module_1.jit_step.cpu_after_optimizations.txt"
    path.write_text(TEXT)
    assert dhelix_profile(path) == 1
    assert "compiled for CPU" in capsys.readouterr().err


def test_no_trace_of_it_in_the_environment(dump: Path, record: Path, tmp_path: Path, measured: Callable) -> None:
    before = {k: v for k, v in os.environ.items() if k != "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"}
    measured(dump, "--recorded", record, "--out", tmp_path / "out.json", "--settings=connections1")
    assert {k: v for k, v in os.environ.items() if k != "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"} == before


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_preset_is_compiled_without_gpus(measured: Callable) -> None:
    result = measured("--preset=llama-demo", "--mesh=dp=1,tp=4", "--microbatches=2", "--collectives")
    assert result["step"].startswith("llama-demo") and result["gpus"] == 4
    section = result["settings"]["default"]
    assert section["coverage"]["guessed"] == pytest.approx(1.0)
    assert any(key.startswith("gemm") for key in section["missing"]["alone"])
