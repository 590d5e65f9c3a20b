"""`dhelix inspect` of traces, from the command line."""

import json
from pathlib import Path

import pytest

from dhelix.launch import cli
from dhelix.tests.launch.inspect.traces import simulated_job


def dhelix_inspect(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["inspect", *map(str, arguments)])
    return int(exit_.value.code or 0)


def test_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = simulated_job.record(tmp_path / "trace", (0.0, 250.0))
    assert dhelix_inspect(folder, "--hardware=H200", "--png", tmp_path / "step.png") == 0
    out, err = capsys.readouterr()
    assert "jit_step, 4 steps on 2 GPUs" in out
    assert "A step takes 4.581 ms, measured." in out
    assert "GPU 1 of node-0 arrives last: others together wait 0.500 ms for it alone." in out
    for title in ("One step, mean of the GPUs", "GPUs, those that", "Collectives, most exposed first", "Nothing runs"):
        assert title in out
    assert "all-gather-start.1" in out
    assert (tmp_path / "step.png").stat().st_size > 10_000
    assert f"wrote {tmp_path / 'step.png'}" in err


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(simulated_job.record(tmp_path, (0.0, 250.0)), "--json") == 0
    found = json.loads(capsys.readouterr().out)["measurement"]
    assert found["steps"] == 4
    assert found["gpus"][1]["delays_ms"] == pytest.approx(0.5)
    assert found["predicted"]["step_ms"] > 0
    assert {one["kind"] for one in found["collectives"]} == {"all-gather", "all-reduce"}


def test_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = simulated_job.record(tmp_path / "before", (0.0, 900.0))
    after = simulated_job.record(tmp_path / "after", (0.0, 0.0))
    assert dhelix_inspect(before, "--compare", after) == 0
    out = capsys.readouterr().out
    assert "x the time of the first trace" in out
    assert "Collectives of both traces" in out
    assert "Collectives of trace 2" in out


def test_unequal_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, four = (simulated_job.record(tmp_path / str(n), (0.0,) * n) for n in (2, 4))
    assert dhelix_inspect(two, "--compare", four) == 0
    assert "Not a fair comparison: 2 and 4 GPUs were recorded." in capsys.readouterr().out


def test_all_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(simulated_job.record(tmp_path, (0.0, 250.0)), "--show=all") == 0
    out = capsys.readouterr().out
    for title in (
        "Critical path of a step of 5.000 ms on GPU 0",
        "Memory (from the program) at its peak",
        "Streams of GPU 0",
    ):
        assert title in out


def test_another_gpu_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the flag, GPU 0 is shown: its steps are as long as the others', or longer."""
    folder = simulated_job.record(tmp_path / "trace", (0.0, 0.0, 0.0, 250.0), hosts={"node-0": 0.0, "node-1": 0.0})
    tables = "--show=path", "--show=streams", "--show=pauses"
    assert dhelix_inspect(folder, *tables) == 0
    out = capsys.readouterr().out
    assert "Picture, critical path and streams are of GPU 0 of node-0: its steps are longest" in out
    assert dhelix_inspect(folder, *tables, "--gpu=3", "--html", tmp_path / "step.html") == 0
    out = capsys.readouterr().out
    assert "Picture, critical path and streams are of GPU 3 of node-1: --gpu chooses it." in out
    for title in ("Critical path of a step of 5.000 ms on GPU 3", "Streams of GPU 3", "Nothing runs on GPU 3"):
        assert title in out
    assert "GPU 3 of node-1: a step takes" in (tmp_path / "step.html").read_text()
    assert dhelix_inspect(folder, "--json", "--gpu=3") == 0
    assert json.loads(capsys.readouterr().out)["measurement"]["shown_gpu"] == 3


@pytest.mark.parametrize(
    ("late", "message"),
    [((0.0, 0.0), "has no GPU 2 that ran jit_step: its GPUs are 0 to 1"), ((0.0,), "its only GPU is 0")],
)
def test_a_gpu_that_the_trace_lacks(
    late: tuple[float, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dhelix_inspect(simulated_job.record(tmp_path, late), "--gpu=2") == 1
    assert message in capsys.readouterr().err


def test_a_table_that_traces_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(simulated_job.record(tmp_path, (0.0,)), "--show=copies") == 1
    assert "a trace has no table copies: give one of step, time" in capsys.readouterr().err


def _cpu_only(folder: Path) -> str:
    simulated_job.record(folder, ())
    return "holds no GPU; record the trace on GPUs"


def _another_program(folder: Path) -> str:
    simulated_job.record(folder, (0.0, 0.0))
    return "holds no kernel of the program 'other'; it has jit_step"


def _cut_short(folder: Path) -> str:
    file = simulated_job.record_json(folder / "a.trace.json.gz", (0.0, 0.0))
    file.write_bytes(file.read_bytes()[:-200])
    return "is not a profiler trace in JSON, or is cut short"


@pytest.mark.parametrize("make", [_cpu_only, _another_program, _cut_short])
def test_bad_traces(make: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = make(tmp_path)  # type: ignore[operator]
    assert dhelix_inspect(tmp_path, "--program=other" if make is _another_program else "--top=3") == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_trace_and_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.hlo").write_text(simulated_job.program(2).name)
    folder = simulated_job.record(tmp_path / "trace", (0.0, 0.0))
    assert dhelix_inspect(folder, "--compare", tmp_path / "step.hlo") == 1
    assert "give two traces, or two dumps" in capsys.readouterr().err
