"""Programs from traces: from a real trace on CPU devices, and from files that hold none."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces import traced_modules
from dhelix.tests.runtime.profiling import recorded_traces as traces

TEXT = "HloModule jit_step, is_scheduled=true\nENTRY e { ROOT p = f32[] parameter(0) }"


def test_a_recorded_program_is_as_it_was_compiled(tmp_path: Path) -> None:
    def traced_step(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x).sum()

    x = jnp.ones((32, 32))
    compiled = jax.jit(traced_step).lower(x).compile()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(compiled(x))
    (module,) = [module for module in traced_modules.load(tmp_path) if module.name == "jit_traced_step"]
    assert [i.name for i in module.schedule[module.entry]] == [
        line.split(" = ")[0].split()[-1].lstrip("%") for line in _entry_lines(compiled.as_text())
    ]


def _entry_lines(text: str | None) -> list[str]:
    assert text is not None
    lines = text[text.index("ENTRY ") :].splitlines()[1:]
    return [line for line in lines[: lines.index("}")] if " = " in line]


def test_programs_without_a_schedule_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.xplane.pb"
    unscheduled = TEXT.replace(", is_scheduled=true", "")
    file.write_bytes(traces.serialized({}, map(HloModule.from_text, (TEXT, unscheduled))))
    (module,) = traced_modules.load(file)
    assert module.name == "jit_step" and module.is_scheduled


def test_what_holds_no_program_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.xplane.pb"
    file.write_bytes(traces.serialized({0: [traces.kernel(1, 0, 1, "dot")]}))
    with pytest.raises(DhelixError, match="holds no compiled program"):
        traced_modules.load(file)
    file.write_bytes(b"\xff no trace")
    with pytest.raises(DhelixError, match="is not a profiler trace"):
        traced_modules.load(file)
    with pytest.raises(DhelixError, match="no trace at"):
        traced_modules.load(tmp_path / "missing.xplane.pb")
