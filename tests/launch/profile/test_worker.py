"""The process that measures, with stand-ins for the GPUs and their measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from dhelix.errors import DhelixError
from dhelix.launch.profile import worker as profile_worker
from dhelix.launch.profile.worker import Request
from dhelix.passes.evaluation.replay.program import Item
from dhelix.passes.hlo import HloModule
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Provenance, Section, Timing
from dhelix.runtime.profiling import collective_tables
from dhelix.runtime.profiling.collective_tables import TableProgram
from dhelix.runtime.profiling.measure import Outcome, Sample
from dhelix.runtime.profiling.session import Step
from dhelix.tests.runtime.profiling import small_step

HERE = Provenance("NVIDIA H200", 4, "2026-01-31", nccl="2.28.9", jax=jax.__version__)


@dataclass(frozen=True)
class Gpu:
    id: int
    platform: str = "gpu"
    process_index: int = 0


class Machine:
    """Stands in for four H200s. Everything takes 100 us. Records what it was asked to measure."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.programs: list[TableProgram] = []
        self.patience = 10**6  # calls until the process is killed
        self.failing: list[CollectiveKey] = []

    def _call(self) -> None:
        self.patience -= 1
        if self.patience < 0:
            raise KeyboardInterrupt

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        self._call()
        self.items += items
        return [(Sample(1e-4, 1e-4, 1e-4 if item.second else 0.0),) * repeats for item in items]

    def run(self, program: TableProgram) -> tuple[dict[CollectiveKey, Timing], dict[str, str]]:
        self._call()
        self.programs.append(program)
        failing = [key for key in program.keys if key in self.failing]
        return {key: Timing(1e-4) for key in program.keys if key not in failing}, {str(k): "no" for k in failing}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(n) for n in range(4)])
    monkeypatch.setattr(profile_worker, "provenance", lambda: HERE)
    monkeypatch.setattr(profile_worker, "gpu_measurer", lambda setting: machine)
    monkeypatch.setattr(profile_worker.measure_tables, "run", machine.run)
    monkeypatch.setattr(collective_tables, "tables", partial(collective_tables.tables, sizes=(65536, 131072)))
    return machine


@pytest.fixture
def step_file(tmp_path: Path) -> str:
    path = tmp_path / "step.hlo.pb"
    path.write_bytes(small_step.module().to_bytes())
    return str(path)


@pytest.fixture
def work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Request], list[dict[str, Any]]]:
    """Runs a request as the process would. Returns the printed messages, one per line."""

    def work(request: Request) -> list[dict[str, Any]]:
        path = tmp_path / "request.json"
        path.write_text(request.to_json())
        capsys.readouterr()
        profile_worker.main(str(path))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return work


type Work = Callable[[Request], list[dict[str, Any]]]


def test_a_request_comes_back_as_it_was() -> None:
    node = {"coordinator": "127.0.0.1:1", "processes": 2, "process": 1, "local_device_ids": [2, 3]}
    preset = {"preset": "llama-8b", "layers": 4, "mesh": "dp=1,tp=4"}
    request = Request(
        "connections1", "out.json", "no-p2p", preset, None, ("llama-8b",), False, True, keep="k", node=node
    )
    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request("default", "out.json").to_json()) == Request("default", "out.json")


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(Request("default", str(tmp_path / "out.json"), collectives=True).to_json())
    with pytest.raises(SystemExit) as stopped:
        profile_worker.main(str(path))
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["error"].startswith("measuring needs GPUs, and JAX finds none; see `nvidia-smi`")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DhelixError("no\n  room"), "no room"),
        (jax.errors.JaxRuntimeError("INTERNAL: it broke\nhere"), "INTERNAL: it broke here"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes"), "out of memory"),
    ],
)
def test_errors_are_told_in_one_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(request: Request) -> None:
        raise error

    path = tmp_path / "request.json"
    path.write_text(Request("default", "out.json").to_json())
    monkeypatch.setattr(profile_worker, "run", run)
    with pytest.raises(SystemExit) as stopped:
        profile_worker.main(str(path))
    assert stopped.value.code == 1
    assert capsys.readouterr().out == json.dumps({"error": said}) + "\n"


def test_a_step_is_measured_and_progress_is_told(machine: Machine, work: Work, step_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = work(Request("default", str(out), module=step_file, keep=str(tmp_path)))
    assert told[-1] == {"finished": True}
    assert [message["what"] for message in told[:-1]] == [*2 * ["operators alone"], "pairs", "done"]
    assert told[-2]["done"] == told[-2]["total"] > told[0]["done"] == 0
    profile = storage.load(out)
    assert (profile.hardware, profile.link, profile.measured_on) == ("H200", "nvlink", (HERE,))
    section = profile.section("default")
    assert {*section.operators, *section.collectives} == {o.key for o in small_step.operators().values()}
    assert section.pairs and section.failures == {"sent": "it has side effects"}
    assert HloModule.from_file(tmp_path / "step.hlo.pb").name == "jit_step"


def test_what_is_in_the_file_is_not_measured_again(
    machine: Machine, work: Work, step_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    request = Request("default", str(out), module=step_file)
    work(request)
    machine.items.clear()
    before = out.read_bytes()
    assert [message.get("what") for message in work(request)] == ["done", None]
    assert machine.items == [] and out.read_bytes() == before
    work(Request("connections1", str(out), module=step_file, pairs=False))
    assert len(machine.items) == len(small_step.NAMES)
    assert set(storage.load(out).sections) == {"connections1", "default"}


@pytest.mark.parametrize(("calls", "known"), [(0, 0), (1, len(small_step.NAMES) - 1), (2, len(small_step.NAMES))])
def test_killed_at_any_moment_it_leaves_a_file_to_go_on_from(
    calls: int, known: int, machine: Machine, work: Work, step_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    request = Request("default", str(out), module=step_file)
    machine.patience = calls
    with pytest.raises(KeyboardInterrupt):
        work(request)
    section = storage.load(out).section("default")
    assert len(section.operators) + len(section.collectives) == known
    machine.patience = 10
    work(request)
    alone = [item for item in machine.items if item.second is None]
    assert len(alone) == 2 * len(small_step.NAMES)  # each once on its own, and once with its pairs


# --- A preset.


def test_a_step_is_traced_only_if_something_is_missing(
    machine: Machine, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[tuple[Any, ...]] = []

    def observe(
        step: Step, lowered: object, make: Callable[[], tuple[Any, ...]], gpus: int, implementation: str
    ) -> Step:
        traced.append(make())
        return step

    monkeypatch.setattr(profile_worker, "build", lambda preset, costs: (preset["lowered"], lambda: ("state", "batch")))
    monkeypatch.setattr(profile_worker, "compiled_step", lambda lowered: Step(small_step.module()))
    monkeypatch.setattr(profile_worker, "observe", observe)
    request = Request("default", str(tmp_path / "out.json"), preset={"lowered": "a step"})
    assert [m.get("what") for m in work(request)][:2] == ["compiles the step", "traces the step"]
    assert traced == [("state", "batch")]
    assert "traces the step" not in [m.get("what") for m in work(request)]
    assert len(traced) == 1


@pytest.mark.parametrize("plain", [False, True])
def test_what_passes_make_of_a_step_by_the_new_costs_is_measured_too(
    plain: bool, machine: Machine, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = iter((8192, 4096, 4096, 4096))
    monkeypatch.setattr(profile_worker, "build", lambda preset, costs: ("a step", lambda: ("state", "batch")))
    monkeypatch.setattr(profile_worker, "compiled_step", lambda lowered: Step(small_step.module(rows=next(rows))))
    monkeypatch.setattr(profile_worker, "observe", lambda step, *_: step)
    out = tmp_path / "out.json"
    work(Request("default", str(out), preset={"preset": "llama-8b", "plain": plain}, pairs=False))
    gathers = storage.load(out).section("default").collectives
    assert len({key.bytes for key in gathers if key.kind == "all-gather"}) == (1 if plain else 2)


def test_a_step_that_does_not_fit_is_measured_operator_by_operator(
    machine: Machine, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments() -> tuple[Any, ...]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the state is too large")

    monkeypatch.setattr(profile_worker, "build", lambda preset, costs: (jax.jit(abs).lower(1.0), arguments))
    monkeypatch.setattr(profile_worker, "compiled_step", lambda lowered: Step(small_step.module()))
    told = work(Request("default", str(tmp_path / "out.json"), preset={"preset": "llama-66b"}, pairs=False))
    assert any("the step itself does not run (out of memory)" in m.get("what", "") for m in told)
    assert told[-1] == {"finished": True}
    assert len(machine.items) == len(small_step.NAMES)


# --- Tables of collectives.


def test_tables_are_filled_program_by_program(machine: Machine, work: Work, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = work(Request("copy-engine", str(out), collectives=True))
    assert [m["what"] for m in told[:3]] == [f"collectives of {p.grouping}" for p in machine.programs]
    assert told[-2:] == [{"done": 36, "total": 36, "what": "done"}, {"finished": True}]
    section = storage.load(out).section("copy-engine")
    assert len(section.collectives) == 6 * 2 * 3  # kinds, sizes, groupings
    assert {key.implementation for key in section.collectives} == {"symmetric"}


def test_tables_go_on_where_they_stopped_and_try_no_failure_twice(machine: Machine, work: Work, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    request = Request("default", str(out), collectives=True)
    machine.failing = [CollectiveKey("all-gather", 65536, 2)]
    machine.patience = 1
    with pytest.raises(KeyboardInterrupt):
        work(request)
    assert len(storage.load(out).section("default").collectives) == 11
    machine.patience = 10
    work(request)
    assert [str(p.grouping) for p in machine.programs] == ["2x1 groups=1", "2x1 groups=2", "4x1 groups=1"]
    section = storage.load(out).section("default")
    assert len(section.collectives) == 35 and section.failures == {str(machine.failing[0]): "no"}
    work(request)
    assert len(machine.programs) == 3
    machine.failing.clear()
    work(Request("default", str(out), collectives=True, again=True))
    section = storage.load(out).section("default")
    assert len(machine.programs) == 6 and len(section.collectives) == 36 and not section.failures


def test_what_others_measured_stays(machine: Machine, work: Work, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    elsewhere = Provenance("NVIDIA H200", 8, "2025-12-01", jax="0.11.2")
    known = Section("default", collectives={CollectiveKey("all-gather", 65536, 2): Timing(7e-5)})
    storage.save(Profile("H200", "nvlink", (elsewhere,)).with_section(known), out)
    work(Request("default", str(out), collectives=True))
    profile = storage.load(out)
    assert profile.measured_on == (elsewhere, HERE)
    assert profile.section("default").collectives[CollectiveKey("all-gather", 65536, 2)] == Timing(7e-5)


def test_all_hosts_of_a_job_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = CollectiveKey("all-reduce", 65536, 2, 1, 1, "nccl")
    known = [
        Profile("H200", "nvlink", (Provenance(HERE.gpu, 2, machine=name),)).with_section(
            Section("default", {}, {key: Timing(seconds)}, {})
        )
        for name, seconds in (("first", 1e-4), ("second", 2e-4))
    ]
    monkeypatch.setattr(profile_worker.agreement, "gathered", lambda *_: [storage.dumps(one) for one in known])
    written = []
    for number, own in enumerate(known):
        request = Request("default", str(tmp_path / f"{number}.json"), node={"process": number})
        assert profile_worker._shared(request, own).section("default").collectives[key].seconds == 1e-4
        written.append((tmp_path / f"{number}.json").read_bytes())
    assert written[0] == written[1]
