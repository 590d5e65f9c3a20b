"""The pass protocol, and the manager that runs each pass at its stage.

Contract. A pass gets a verified module and may edit it freely. The manager verifies the edited module before it uses
that module. A pass may refuse (PassRefusal) or raise another error. A pass may also make a module that does not verify,
or a module with another signature. In all these cases the manager restores the module, reports the reason and logs the
reason once. The user's job goes on. With `strict=True` the manager raises an error instead.

The compiler hook that calls the manager is in `dhelix.runtime.compiler.registration`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import logging

from dhelix.errors import DhelixError, PassRefusal, UnknownPassError
from dhelix.passes import jax_compat
from dhelix.passes.analysis.source import source_of
from dhelix.passes.framework import fingerprint, report
from dhelix.passes.framework.report import Note, PassReport, StageReport
from dhelix.passes.hlo import HloModule, HloVerifyError, Instruction, Shape, shapes, verify


class Stage(enum.Enum):
    """When a pass runs. Members are in the order in which the stages of a program run.

    LOWERED is before XLA compiles the program. PRE_SCHEDULER is after XLA's partitioner, and before XLA schedules the
    program. POST_SCHEDULER is after XLA's scheduler.
    """

    LOWERED = "lowered"
    PRE_SCHEDULER = "pre-scheduler"  # at this stage, two loops may share a body
    POST_SCHEDULER = "post-scheduler"


class PassContext:
    """What a pass gets besides the module: the setting `strict`, and a list that collects the notes of the pass."""

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.notes: list[Note] = []

    def note(self, message: str, instruction: object = None, **facts: Any) -> None:
        """Adds a note on what the pass did or left unchanged.

        Args:
          message: one line of text.
          instruction: the instruction that the note is about, or the name of that instruction.
          facts: further data, as JSON values by name. Values of other types become text.
        """
        name = None if instruction is None else str(getattr(instruction, "name", instruction))
        source = source_of(instruction) if isinstance(instruction, Instruction) else ""
        self.notes.append(Note(message, name, fingerprint.plain(facts, fallback=str), source))

    def left_alone(self, reasons: Mapping[str, int], places: Mapping[str, object] | None = None) -> None:
        """Adds one note for each reason why the pass left something unchanged, with the number of such cases.

        Args:
          reasons: maps each reason to the number of cases.
          places: maps each reason to the instruction (or its name) of the first case.
        """
        for reason, count in sorted(reasons.items()):
            self.note(f"left alone: {reason}", (places or {}).get(reason), count=count)


class Pass(Protocol):
    """A pass over a module. Each pass is a frozen dataclass of its options."""

    @property
    def name(self) -> str:
        """The name of the pass in kebab case; a class attribute."""
        ...

    @property
    def stage(self) -> Stage: ...

    def run(self, module: HloModule, context: PassContext) -> bool:
        """Edits `module` in place. Returns whether `module` changed. Raises PassRefusal to leave `module` unchanged."""
        ...


class PassManager:
    """A numbered list of passes and the settings to run them; immutable after construction."""

    def __init__(
        self,
        passes: Sequence[Pass],
        disabled: Collection[str] = (),
        strict: bool = False,
        dump_to: str | Path | None = None,
        step: str = "",
    ):
        """Checks the names of `passes` and `disabled`.

        Args:
          passes: the passes, in the order in which they run within their stage. No two passes have the same name.
          disabled: names of passes to drop.
          strict: whether the manager raises an error if a pass refuses or fails. If set, the manager also raises an
            error if a pass reports no change but changed the module.
          dump_to: folder to which the module is written before and after each pass that runs. "xla" means the folder of
            XLA's flag `--xla_dump_to`.
          step: name of the step that the modules belong to. If given, each reason is logged once for the step instead
            of once for each module.

        Raises:
          UnknownPassError: no pass has one of the names in `disabled`.
          DhelixError: two passes have the same name.
        """
        self.passes = tuple(passes)
        self.disabled = frozenset((disabled,) if isinstance(disabled, str) else disabled)
        self.strict = strict
        self.dump_to = dump_to
        self.step = step
        names = [p.name for p in passes]
        for name in sorted(self.disabled - set(names)):
            raise UnknownPassError(f"no pass {name!r} to disable; the passes are {', '.join(names) or '(none)'}")
        for name in names:
            if names.count(name) > 1:
                raise DhelixError(f"two passes are called {name!r}; names must differ so that one can be disabled")

    @property
    def enabled(self) -> tuple[Pass, ...]:
        return tuple(p for p in self.passes if p.name not in self.disabled)

    def runs_at(self, stage: Stage) -> bool:
        return any(p.stage is stage for p in self.enabled)

    def fingerprint(self, module: bytes | None = None, profile: object = None) -> str:
        """The fingerprint of the inputs: enabled passes with their options, `module`, `profile` and versions."""
        return fingerprint.input_fingerprint(self.enabled, module, profile)

    def not_run(self, stage: Stage, module_name: str, reason: str) -> StageReport:
        """The report of a stage whose passes did not run, with `reason` as the note of each enabled pass."""
        entries = tuple(
            PassReport(n, p.name, stage.value, report.DISABLED)
            if p.name in self.disabled
            else PassReport(n, p.name, stage.value, report.NOT_RUN, notes=(Note(reason),))
            for n, p in self._numbered(stage)
        )
        return StageReport(stage.value, module_name, entries)

    def run(self, stage: Stage, module: bytes, module_name: str | None = None) -> tuple[bytes | None, StageReport]:
        """Runs the passes of `stage` over a serialized HloModuleProto.

        Args:
          stage: the stage whose passes run.
          module: serialized HloModuleProto.
          module_name: name for dumps and the report; by default the module's own name.

        Returns:
          The new serialized module, and the report of the stage. The module is None if nothing changed.

        Raises:
          DhelixError: only with `strict`: a pass refused or failed, or the module is malformed.
        """
        start = time.perf_counter()
        name = module_name or fingerprint.module_name(module)
        if not self.runs_at(stage):
            return None, self.not_run(stage, name, "")
        entries: list[PassReport] = []
        current, view = module, None
        for number, one in self._numbered(stage):
            if one.name in self.disabled:
                entries.append(PassReport(number, one.name, stage.value, report.DISABLED))
                continue
            attempt = _Attempt(self, number, one, name)
            entry, after, view = attempt.run(current, view)
            entries.append(entry)
            current = after
        seconds = time.perf_counter() - start
        result = StageReport(stage.value, name, tuple(entries), seconds)
        return (None if current == module else current), result

    def _numbered(self, stage: Stage) -> list[tuple[int, Pass]]:
        return [(n, p) for n, p in enumerate(self.passes, 1) if p.stage is stage]


class _Attempt:
    """Runs one pass over one module and reports the result. If the pass fails, the module stays as it was."""

    def __init__(self, manager: PassManager, number: int, one: Pass, module_name: str):
        self.manager = manager
        self.number = number
        self.one = one
        self.module_name = module_name
        self.context = PassContext(manager.strict)
        self.seconds = 0.0
        self._may_share = one.stage is Stage.PRE_SCHEDULER  # XLA lets two loops share one body at this stage

    def run(self, before: bytes, view: HloModule | None) -> tuple[PassReport, bytes, HloModule | None]:
        """Returns the report, the serialized module after the pass, and the parsed form (`view`) of that module.

        The parsed form is None if the pass refused or failed, because the pass may have corrupted it.
        """
        count = 0
        try:
            if view is None:
                view = HloModule.from_bytes(before)
                verify(view, self._may_share)
            count = view.instruction_count
            after = self._apply(before, view)
        except Exception as error:
            if self.manager.strict:
                raise _as_dhelix_error(error, self.one.name) from error
            return self._left_alone(error, before, count), before, None
        outcome = report.UNCHANGED if after == before else report.CHANGED
        return self._report(outcome, count, view.instruction_count, after), after, view

    def _apply(self, before: bytes, view: HloModule) -> bytes:
        signature, scheduled = _signature(view), view.is_scheduled
        self._dump("before", before, view)
        start = time.perf_counter()
        try:
            changed = self.one.run(view, self.context)
        finally:
            self.seconds = time.perf_counter() - start
        if not changed:
            if self.manager.strict and view.to_bytes() != before:
                raise DhelixError(f"pass {self.one.name} changed the module but reported no change")
            return before
        after = view.to_bytes()  # before verify, because to_bytes sorts the instructions
        verify(view, self._may_share)
        if not _same_signature(signature, _signature(view)):
            raise HloVerifyError("the pass changed the shapes that the entry computation takes or returns")
        if view.is_scheduled != scheduled:
            raise HloVerifyError("the module lost its schedule" if scheduled else "the module gained a schedule")
        self._dump("after", after, view)
        return after

    def _left_alone(self, error: Exception, before: bytes, count: int) -> PassReport:
        if isinstance(error, PassRefusal):
            outcome, reason, instruction, facts = report.REFUSED, error.reason, error.place, error.facts
        elif isinstance(error, DhelixError):
            outcome, reason, instruction, facts = report.FAILED, str(error), None, {}
        else:
            outcome, reason, instruction, facts = report.FAILED, f"{type(error).__name__}: {error}", None, {}
            logging.vlog(1, "%s", "".join(traceback.format_exception(error)))
        self.context.notes = []  # the pass's changes are undone, so its notes are void
        self.context.note(reason, instruction, **facts)
        note = self.context.notes[-1]
        said = ", ".join(filter(None, (note.instruction, note.source)))
        where = f" (at {said})" if said else ""
        name = fingerprint.unmark(self.module_name)
        key = (self.manager.step or name, self.one.name, reason)
        say_once(f"{name}: pass {self.one.name} changes nothing: {reason}{where}", key)
        return self._report(outcome, count, count, before)

    def _report(self, outcome: str, count_before: int, count_after: int, after: bytes) -> PassReport:
        return PassReport(
            self.number,
            self.one.name,
            self.one.stage.value,
            outcome,
            self.seconds,
            count_before,
            count_after,
            fingerprint.of_bytes(after),
            tuple(self.context.notes),
        )

    def _dump(self, when: str, module: bytes, view: HloModule) -> None:
        """Dumps the module to `module_NNNN.<module>.<pass number>.<pass>.<when>.hlo.pb`, and as text to `.hlo.txt`."""
        folder = _dump_folder(self.manager.dump_to)
        if folder is None:
            return
        name = re.sub(r"[^\w.-]", "_", self.module_name)
        stem = f"module_{view.proto.id:04d}.{name}.{self.number:02d}.{self.one.name}.{when}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{stem}.hlo.pb").write_bytes(module)
            (folder / f"{stem}.hlo.txt").write_text(jax_compat.hlo_text(module))
        except OSError as error:
            say_once(f"cannot dump to {folder}: {error}", ("dump", str(folder)))


_said: set[tuple[str, ...]] = set()
_listener: ContextVar[list[str] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects the lines of `say_once`, which are then not logged."""
    lines: list[str] = []
    token = _listener.set(lines)
    try:
        yield lines
    finally:
        _listener.reset(token)


def say_once(message: str, key: tuple[str, ...]) -> None:
    """Logs a warning, once per `key` in this process. In a job of several processes, only process 0 logs."""
    if (lines := _listener.get()) is not None:
        lines.append(message)
        return
    if key in _said:
        return
    _said.add(key)
    # `jax.process_index` starts the backends. Without jax.distributed there is only one process anyway.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        logging.warning("dhelix: %s", message)


def _as_dhelix_error(error: Exception, name: str) -> DhelixError:
    if isinstance(error, PassRefusal):
        return PassRefusal(f"pass {name}: {error.reason}", error.instruction)
    return DhelixError(f"pass {name} failed: {type(error).__name__}: {error}")


def _signature(module: HloModule) -> list[Any]:
    entry = module.entry
    return [_copy(i.shape) for i in (*entry.parameters, entry.root)]


def _copy(shape: Any) -> Any:
    copy = Shape()
    copy.CopyFrom(shape)
    return copy


def _same_signature(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(shapes.same(x, y) for x, y in zip(before, after, strict=True))


def _dump_folder(dump_to: str | Path | None) -> Path | None:
    if dump_to != "xla":
        return None if dump_to is None else Path(dump_to)
    found = re.findall(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return Path(found[-1]) if found and found[-1] != "-" else None
