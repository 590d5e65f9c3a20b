"""The manager runs the right passes, and a pass that fails leaves the module unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import pytest

from dhelix.errors import DhelixError, PassRefusal, UnknownPassError
from dhelix.passes.framework import manager as manager_module
from dhelix.passes.framework import report
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.hlo import HloModule

TEXT = """HloModule jit_step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

ENTRY main {
  p = f32[4]{0} parameter(0)
  n = f32[4]{0} negate(p)
  c = f32[4]{0} cosine(p)
  ROOT a = f32[4]{0} add(n, c)
}
"""
SCHEDULED = TEXT.replace("jit_step,", "jit_step, is_scheduled=true,")


@dataclass(frozen=True)
class Edit:
    """A pass made from a function."""

    edit: Callable[[HloModule, PassContext], bool]
    name: str = "edit"
    stage: Stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        return self.edit(module, context)


def find(module: HloModule, name: str):
    return next(i for i in module.entry.instructions if i.name == name)


def negate_to(opcode: str) -> Callable[[HloModule, PassContext], bool]:
    def edit(module: HloModule, context: PassContext) -> bool:
        find(module, "n").opcode = opcode
        context.note("replaced negate", find(module, "n"), opcode=opcode)
        return True

    return edit


def nothing(module: HloModule, context: PassContext) -> bool:
    return False


def refuse(module: HloModule, context: PassContext) -> bool:
    negate_to("sine")(module, context)
    raise PassRefusal("a cosine is beyond this pass", find(module, "c"))


def crash(module: HloModule, context: PassContext) -> bool:
    negate_to("sine")(module, context)
    raise IndexError("list index out of range")


def take_name(module: HloModule, context: PassContext) -> bool:
    find(module, "n").proto.name = "c"
    return True


def return_another_shape(module: HloModule, context: PassContext) -> bool:
    module.entry.root.shape.dimensions[0] = 5
    return True


def run_backwards(module: HloModule, context: PassContext) -> bool:
    module.schedule[module.entry].reverse()
    return True


def drop_schedule(module: HloModule, context: PassContext) -> bool:
    module.schedule.clear()
    return True


@functools.cache  # parsing gives a new module id every time
def source(text: str = TEXT) -> bytes:
    return HloModule.from_text(text).to_bytes()


@pytest.fixture(autouse=True)
def warnings():
    """The mock of `logging.warning`."""
    with mock.patch.object(manager_module.logging, "warning") as warning:
        yield warning


def test_runs_the_passes_of_the_stage_in_order_and_numbers_the_whole_list() -> None:
    seen: list[str] = []

    def spy(name: str, stage: Stage) -> Edit:
        return Edit(lambda module, context: bool(seen.append(name)), name, stage)

    passes = [spy("b", Stage.LOWERED), spy("x", Stage.POST_SCHEDULER), spy("a", Stage.LOWERED)]
    changed, stage = PassManager(passes).run(Stage.LOWERED, source())
    assert changed is None
    assert seen == ["b", "a"]
    assert [(p.number, p.name, p.outcome) for p in stage.passes] == [
        (1, "b", "unchanged"),
        (3, "a", "unchanged"),
    ]
    assert stage.module == "jit_step"


def test_a_change_is_returned_counted_and_reported() -> None:
    def drop_cosine(module: HloModule, context: PassContext) -> bool:
        module.entry.root.operands[1] = find(module, "n")
        module.entry.instructions.remove(find(module, "c"))
        return True

    manager = PassManager([Edit(negate_to("sine"), "one"), Edit(drop_cosine, "two")])
    changed, stage = manager.run(Stage.LOWERED, source())
    assert changed is not None
    assert [i.opcode for i in HloModule.from_bytes(changed).entry.instructions] == [
        "parameter",
        "sine",
        "add",
    ]
    one, two = stage.passes
    assert one.changed and one.instruction_difference == 0
    assert [str(note) for note in one.notes] == ["replaced negate at n (opcode=sine)"]
    assert (two.instructions_before, two.instructions_after) == (4, 3)
    assert one.fingerprint != two.fingerprint
    assert manager.run(Stage.LOWERED, source())[0] == changed


def test_a_pass_that_changes_nothing_but_says_so_counts_as_unchanged() -> None:
    changed, stage = PassManager([Edit(lambda module, context: True)]).run(Stage.LOWERED, source())
    assert changed is None and not stage.changed


def test_a_pass_is_dropped_by_name() -> None:
    manager = PassManager([Edit(negate_to("sine"))], disabled=["edit"])
    changed, stage = manager.run(Stage.LOWERED, source())
    assert changed is None
    assert [p.outcome for p in stage.passes] == [report.DISABLED]
    assert not manager.runs_at(Stage.LOWERED)


def test_dropping_an_unknown_pass_lists_the_names() -> None:
    with pytest.raises(UnknownPassError, match="no pass 'edti' to disable; the passes are edit, other"):
        PassManager([Edit(nothing), Edit(nothing, "other")], disabled=["edti"])


def test_names_are_unique() -> None:
    with pytest.raises(DhelixError, match="two passes are called 'edit'"):
        PassManager([Edit(nothing), Edit(nothing)])


CULPRITS = [
    (refuse, TEXT, report.REFUSED, "a cosine is beyond this pass at c"),
    (crash, TEXT, report.FAILED, "IndexError: list index out of range"),
    (take_name, TEXT, report.FAILED, "the name is taken"),
    (return_another_shape, TEXT, report.FAILED, "changed the shapes"),
    (run_backwards, SCHEDULED, report.FAILED, "schedule of main"),
    (drop_schedule, SCHEDULED, report.FAILED, "lost its schedule"),
]


@pytest.mark.parametrize(("edit", "text", "outcome", "reason"), CULPRITS)
def test_a_pass_that_goes_wrong_leaves_no_trace(edit, text, outcome, reason, warnings) -> None:
    before = source(text)
    changed, stage = PassManager([Edit(edit)]).run(Stage.LOWERED, before)
    assert changed is None
    assert stage.passes[0].outcome == outcome
    assert reason in str(stage.passes[0].notes[-1])
    assert stage.passes[0].instruction_difference == 0
    with_next, stage = PassManager([Edit(edit), Edit(negate_to("abs"), "next")]).run(Stage.LOWERED, before)
    alone, _ = PassManager([Edit(negate_to("abs"), "next")]).run(Stage.LOWERED, before)
    assert with_next == alone is not None
    assert warnings.call_count == 1
    said = warnings.call_args.args[0] % warnings.call_args.args[1:]
    assert said.startswith("dhelix: jit_step: pass edit changes nothing: ")


@pytest.mark.parametrize(("edit", "text", "outcome", "reason"), CULPRITS)
def test_strict_raises_instead(edit, text, outcome, reason, warnings) -> None:
    kind = PassRefusal if outcome == report.REFUSED else DhelixError
    with pytest.raises(kind, match="pass edit") as caught:
        PassManager([Edit(edit)], strict=True).run(Stage.LOWERED, source(text))
    assert reason.removesuffix(" at c") in str(caught.value)
    assert warnings.call_count == 0


def test_strict_notices_a_pass_that_hides_its_change() -> None:
    def hide(module: HloModule, context: PassContext) -> bool:
        return not negate_to("sine")(module, context)

    with pytest.raises(DhelixError, match="changed the module but reported no change"):
        PassManager([Edit(hide)], strict=True).run(Stage.LOWERED, source())


def test_an_earlier_change_outlives_a_later_failure() -> None:
    manager = PassManager([Edit(negate_to("abs"), "good"), Edit(crash, "bad")])
    changed, stage = manager.run(Stage.LOWERED, source())
    assert changed == PassManager([Edit(negate_to("abs"), "good")]).run(Stage.LOWERED, source())[0]
    assert [p.outcome for p in stage.passes] == [report.CHANGED, report.FAILED]


def test_what_is_no_module_is_left_alone() -> None:
    garbage = b"\x0a\x04name\xff\xff"
    changed, stage = PassManager([Edit(nothing)]).run(Stage.LOWERED, garbage, "jit_step")
    assert changed is None and stage.passes[0].outcome == report.FAILED
    with pytest.raises(DhelixError, match="not a serialized HloModuleProto"):
        PassManager([Edit(nothing)], strict=True).run(Stage.LOWERED, garbage)


def test_only_process_0_speaks(monkeypatch: pytest.MonkeyPatch, warnings) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    PassManager([Edit(refuse)]).run(Stage.LOWERED, source())
    assert warnings.call_count == 0


def test_dumps_before_and_after_in_xlas_naming(tmp_path: Path) -> None:
    passes = [Edit(nothing, "idle"), Edit(negate_to("sine")), Edit(crash, "crash")]
    PassManager(passes, dump_to=tmp_path / "dump").run(Stage.LOWERED, source(), "jit_step/x")
    number = f"{HloModule.from_bytes(source()).proto.id:04d}"
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    stems = ["01.idle.before", "02.edit.after", "02.edit.before", "03.crash.before"]
    assert names == [f"module_{number}.jit_step_x.{s}.hlo.{kind}" for s in stems for kind in ("pb", "txt")]
    for kind in ("pb", "txt"):
        before, after = (
            HloModule.from_file(tmp_path / "dump" / f"module_{number}.jit_step_x.02.edit.{when}.hlo.{kind}")
            for when in ("before", "after")
        )
        assert find(before, "n").opcode == "negate" and find(after, "n").opcode == "sine"


def test_dumps_where_xla_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PassManager([Edit(nothing)], dump_to="xla")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    manager.run(Stage.LOWERED, source())
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/nowhere --xla_dump_to={tmp_path} --xla_x=1")
    manager.run(Stage.LOWERED, source())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dump_that_cannot_be_written_breaks_nothing(tmp_path: Path, warnings) -> None:
    (tmp_path / "file").write_text("")
    manager = PassManager([Edit(negate_to("sine"))], dump_to=tmp_path / "file")
    changed, stage = manager.run(Stage.LOWERED, source())
    assert changed is not None and stage.changed
    assert warnings.call_count == 1
