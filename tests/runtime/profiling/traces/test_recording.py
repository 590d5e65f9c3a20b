"""Which files are a trace, and which of them belong together."""

import os
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces import json_trace, recording
from dhelix.tests.runtime.profiling import recorded_traces
from dhelix.tests.runtime.profiling.recorded_traces import kernel

MODULE = """
HloModule jit_step, is_scheduled=true, num_partitions=2

ENTRY main {
  ROOT x = f32[8] parameter(0)
}
"""


def write(file: Path, gpus: int = 1, age: float = 0.0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    of = {gpu: [kernel(1, 0, 5, "dot.1"), kernel(1, 5, 6, None, None)] for gpu in range(gpus)}
    file.write_bytes(recorded_traces.serialized(of))
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def test_content_decides_what_a_trace_is(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace")
    (module := tmp_path / "module.xplane.pb").write_bytes(HloModule.from_text(MODULE).to_bytes())
    (text := tmp_path / "notes.json").write_text('{"events": []}')
    (chrome := tmp_path / "chrome").write_text('{"traceEvents": []}')
    (empty := tmp_path / "empty").touch()
    found = {path.name: recording.is_trace(path) for path in (trace, module, text, chrome, empty, tmp_path / "none")}
    assert found == {name: name in ("trace", "chrome") for name in found}


def test_a_folder_of_dumps_is_no_trace(tmp_path: Path) -> None:
    write(tmp_path / "plugins" / "a.xplane.pb")
    assert recording.is_trace(tmp_path)
    (tmp_path / "module_0001.jit_step.sm_9.0_gpu_after_optimizations.txt").write_text(MODULE)
    assert not recording.is_trace(tmp_path)


def test_the_newest_recording_of_all_hosts(tmp_path: Path) -> None:
    write(tmp_path / "2026_01_01" / "node-0.xplane.pb", age=100)
    for host in ("node-1", "node-0.cluster"):
        write(tmp_path / "2026_01_02" / f"{host}.xplane.pb", gpus=2)
    write(tmp_path / "2026_01_02" / "node-1.trace.json.gz")  # not read: there is an .xplane.pb
    found = recording.load(tmp_path)
    assert found.hosts == ("node-0.cluster", "node-1")
    assert [(gpu.number, gpu.host, gpu.name) for gpu in found.gpus] == [
        (0, "node-0.cluster", "/device:GPU:0"),
        (1, "node-0.cluster", "/device:GPU:1"),
        (2, "node-1", "/device:GPU:0"),
        (3, "node-1", "/device:GPU:1"),
    ]


def test_what_runs_before_and_after_the_program_is_left_out(tmp_path: Path) -> None:
    found = recording.load(write(tmp_path / "a.xplane.pb"))
    assert [k.instruction for k in found.gpus[0].kernels] == ["dot.1"]


def test_a_json_trace_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_trace, "MOST_EVENTS", 1)
    told = '{"hlo_op": "dot.1", "hlo_module": "jit_step"}'
    events = [
        '{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0 (pid 1)"}}',
        '{"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "Stream #2(Compute)"}}',
        f'{{"ph": "X", "pid": 1, "tid": 2, "ts": 5, "dur": 2, "name": "gemm", "args": {told}}}',
    ]
    (file := tmp_path / "a.trace.json").write_text(f'{{"traceEvents": [{", ".join(events)}]}}')
    found = recording.load(file)
    assert any("give the .xplane.pb file" in note for note in found.notes)
    assert [(k.start, k.end) for k in found.gpus[0].kernels] == [(0.005, 0.007)]


@pytest.mark.parametrize("text", ['{"traceEvents": 5}', '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [', "{}"])
def test_json_that_is_no_trace(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.trace.json").write_text(text)
    with pytest.raises(DhelixError, match="not a profiler trace|holds no GPU"):
        recording.load(file) if json_trace.looks_like(text.encode()) else json_trace.load(file)


def test_a_folder_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match=r"holds no \*.xplane.pb file; record one"):
        recording.load(tmp_path)
