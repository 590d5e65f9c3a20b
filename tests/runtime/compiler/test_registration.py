"""The hook runs passes only for marked modules, and is registered late and once. Reports survive cache hits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.extend import xla

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.framework import fingerprint, report
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import lowering, registration
from dhelix.runtime.compiler.registration import Session
from dhelix.runtime.processes.this_machine import free_port
from dhelix.tests.machine import PATIENCE

CALLS: list[str] = []


@dataclass(frozen=True)
class Look:
    """A harmless pass."""

    name: ClassVar[str] = "look"
    stage: Stage = Stage.POST_SCHEDULER
    option: int = 1
    refuse: str = ""

    def run(self, module: HloModule, context: PassContext) -> bool:
        CALLS.append(fingerprint.unmark(module.name))
        context.note("looked", instructions=len(module.entry.instructions))
        if self.refuse:
            raise PassRefusal(self.refuse, module.entry.root)
        return False


def step(x: jax.Array) -> jax.Array:
    return jnp.sin(x) @ x


def compile_step(passes: Any, size: int = 4, strict: bool = False, platforms: tuple[str, ...] = ("cpu",)) -> Session:
    """Compiles one program through its own session."""
    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((size, size), jnp.float32))
    module = lowering.hlo_bytes(lowered)
    manager = PassManager(passes, strict=strict)
    session = Session(manager, module, fingerprint.module_name(module), platforms=platforms)
    changed = session.run_lowered()
    with session.compiling():
        lowering.with_hlo(lowered, changed or module, session.module_name).compile()
    return session


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DHELIX", raising=False)
    registration.clear()
    CALLS.clear()
    yield
    registration.clear()


def in_process(script: str, *arguments: str, **environment: str) -> str:
    """The last line that another process prints."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()[-1]


def test_passes_run_in_the_compiler_and_report() -> None:
    session = compile_step([Look()])
    assert CALLS == ["jit_step"]
    entry = session.report()["look"]
    assert entry.outcome == report.UNCHANGED and entry.instructions_before > 0
    assert entry.notes[0].message == "looked"
    assert not session.report().stages[0].stored
    assert session.module_name == f"jit_step__dhelix_{session.marker}"


def test_lowered_passes_need_no_hook() -> None:
    session = compile_step([Look(Stage.LOWERED)])
    assert CALLS == ["jit_step"]
    assert session.report()["look"].stage == "lowered"
    assert not registration._registered


def test_the_hook_is_registered_once_for_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    real = xla.register_hlo_module_transformation

    def count(callback: Any, *, name: str, **keywords: Any) -> None:
        names.append(name)
        real(callback, name=name, **keywords)

    monkeypatch.setattr(xla, "register_hlo_module_transformation", count)
    compile_step([Look()])
    compile_step([Look()], size=8)
    compile_step([Look(option=2)])
    assert names == ["dhelix-post-scheduler"]
    assert len(CALLS) == 3


def test_helper_jits_reach_no_pass() -> None:
    compile_step([Look()])
    CALLS.clear()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert CALLS == []


def test_each_program_has_its_own_passes() -> None:
    first, second = compile_step([Look()]), compile_step([Look(refuse="not this one")])
    assert first.marker != second.marker
    assert first.report()["look"].outcome == report.UNCHANGED
    assert second.report()["look"].outcome == report.REFUSED


def test_clear_takes_the_hook_back() -> None:
    compile_step([Look()])
    registration.clear()
    gone = xla.clear_hlo_module_transformation(
        "dhelix-post-scheduler", stage=xla.PipelineStage.POST_SCHEDULER, platforms="cpu"
    )
    assert not gone
    CALLS.clear()
    compile_step([Look(option=3)])
    assert CALLS == ["jit_step"]  # registered again, and only once


def test_pre_scheduler_never_runs_on_cpu() -> None:
    session = compile_step([Look(Stage.PRE_SCHEDULER)])
    assert CALLS == [] and not registration._registered
    assert session.report()["look"].outcome == report.NOT_RUN


def test_a_missing_platform_is_passed_over() -> None:
    session = compile_step([Look()], platforms=("no_such_platform",))
    assert CALLS == []
    assert session.report()["look"].outcome == report.NOT_RUN


def test_strict_raises_the_error_of_the_pass() -> None:
    with pytest.raises(PassRefusal, match="pass look: beyond me") as caught:
        compile_step([Look(refuse="beyond me")], strict=True)
    assert caught.value.instruction
    assert compile_step([Look(refuse="beyond me")]).report()["look"].outcome == report.REFUSED


def test_nothing_leaves_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("in the manager itself")

    monkeypatch.setattr(Session, "_store", broken)
    compile_step([Look()])
    assert CALLS == ["jit_step"]


def test_times_are_left_out_only_inside_the_context() -> None:
    asked = []

    def played(module: bytes) -> Any:
        asked.append(module)
        raise DhelixError("no times")

    def compile_played(size: int) -> None:
        lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((size, size), jnp.float32))
        module = lowering.hlo_bytes(lowered)
        name = fingerprint.module_name(module)
        passes: Any = [Look(option=size)]
        session = Session(PassManager(passes), module, name, platforms=("cpu",), played=played)
        lowering.with_hlo(lowered, module, session.module_name).compile()

    with registration.unpredicted():
        compile_played(5)
    assert CALLS and not asked
    compile_played(6)
    assert len(asked) == 1


def test_dhelix_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registration.enabled()
    monkeypatch.setenv("DHELIX", "off")
    assert not registration.enabled()
    compile_step([Look()])
    assert CALLS == []
    monkeypatch.setenv("DHELIX", "of")
    with pytest.raises(DhelixError, match="DHELIX='of' is unknown; set it to on or off"):
        registration.enabled()


def test_distributed_initialize_still_works_after_import_and_decoration() -> None:
    script = """
import jax
from dhelix.runtime.compiler import lowering, registration
from dhelix.runtime.processes import agreement
from tests.runtime.compiler.test_registration import Look, compile_step
from dhelix.passes.framework.manager import PassManager
PassManager([Look()])
jax.distributed.initialize("127.0.0.1:{port}", 1, 0)
print(compile_step([Look()]).report()["look"].outcome)
"""
    assert in_process(script.replace("{port}", str(free_port()))) == report.UNCHANGED


WARM_CACHE = """
import json, sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from tests.runtime.compiler.test_registration import CALLS, Look, compile_step
found = []
for option, size in json.loads(sys.argv[2]):
    CALLS.clear()
    session = compile_step([Look(option=option)], size)
    report = session.report()
    entry = report["look"]
    found.append([len(CALLS), report.stages[-1].stored, entry.outcome, [str(n) for n in entry.notes]])
print(json.dumps(found))
"""


def warm(folder: Path, *plans: tuple[int, int]) -> list[Any]:
    return json.loads(in_process(WARM_CACHE, str(folder), json.dumps(plans)))


def test_reports_survive_a_hit_in_the_compilation_cache(tmp_path: Path) -> None:
    first = warm(tmp_path, (1, 4), (1, 8))
    assert [(calls, stored) for calls, stored, *_ in first] == [(1, False), (1, False)]
    assert len(list((tmp_path / "dhelix").iterdir())) == 2

    again = warm(tmp_path, (1, 4), (1, 8), (2, 4))
    assert [(calls, stored) for calls, stored, *_ in again] == [(0, True), (0, True), (1, False)]
    assert [entry[2:] for entry in again[:2]] == [entry[2:] for entry in first]  # each program has its own report

    for path in (tmp_path / "dhelix").iterdir():
        path.write_text(path.read_text()[:-50])
    assert warm(tmp_path, (1, 4))[0][:3] == [0, False, report.NOT_RUN]
