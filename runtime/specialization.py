"""A step for one kind of arguments: lowered, transformed, and compiled when it is first called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import fingerprint, report
from dhelix.passes.manager import PassManager, Stage, say_once
from dhelix.passes.report import Report
from dhelix.runtime import agreement, lowering, registration

_ONE_DEVICE = "it runs on one device, which has no communication to hide (passes= or strict=True run all the same)"


class Specialization:
    """What to call for one kind of arguments, and the program behind it.

    A job is never broken: where passes refuse, or their result does not lower or compile, the program is left
    alone, which means that its caller runs the plain one, and a line in the log says why. With the manager's
    `strict` all of these raise instead.

    Attributes:
      original: as the user's function lowers.
      lowered: after the LOWERED passes.
      left_alone: no pass changed anything.
      verified: whether it was compared with the plain step.
    """

    def __init__(
        self, name: str, manager: PassManager, original: jax.stages.Lowered, even_on_one_device: bool = False
    ):
        """
        Args:
          name: of the step, for the log.
          manager: the passes.
          original: the step as the user's function lowers.
          even_on_one_device: run the passes where there is no communication that they could hide.
        """
        self.original = original
        self.lowered = original
        self.left_alone = False
        self.verified = False
        self._name = name
        self._strict = manager.strict
        self._lock = threading.Lock()
        self._compiled: jax.stages.Compiled | None = None
        self._order: str | None = None
        module = lowering.hlo_bytes(original)
        self._session = registration.Session(manager, module, fingerprint.module_name(module))
        if lowering.device_count(original) == 1 and not even_on_one_device:
            self._session.skip_lowered(_ONE_DEVICE)
            self._leave_alone(_ONE_DEVICE)
            return
        changed = self._session.run_lowered()
        if changed is None and manager.runs_at(Stage.LOWERED):
            self._say_nothing_changed()
        else:
            self._replace(module if changed is None else changed)

    def compile(self) -> Callable[..., Any] | None:
        """The transformed program, to be called without static arguments; None if it is left alone."""
        with self._lock:
            if self._compiled is None and not self.left_alone:
                try:
                    with self._session.compiling():
                        self._compiled = self.lowered.compile()
                except jax.errors.JaxRuntimeError as error:
                    # Processes that go on with different programs would wait for each other for ever.
                    if self._strict or jax.process_count() > 1:
                        raise
                    self._leave_alone(f"the interleaved program does not compile: {error}")
                else:
                    self._order = agreement.check_compiled(self._compiled, self._session.marker)
            return self._compiled

    def plan(self) -> Report:
        """What the LOWERED passes decided."""
        whole = self._session.report()
        stages = tuple(stage for stage in whole.stages if stage.stage == Stage.LOWERED.value)
        return Report(whole.module, whole.fingerprint, stages)

    def report(self) -> Report:
        """What the passes of all stages did; compiles the program unless `lowered` was compiled already."""
        if self.left_alone:
            return self.plan()
        later = (entry for entry in self._session.report() if entry.stage != Stage.LOWERED.value)
        if all(entry.outcome in (report.NOT_RUN, report.DISABLED) for entry in later):
            self.compile()
        return self.plan() if self.left_alone else self._session.report(self._order)

    def _replace(self, module: bytes) -> None:
        try:
            self.lowered = lowering.with_hlo(self.original, module, self._session.module_name)
        except DhelixError as error:
            if self._strict:
                raise
            self._leave_alone(str(error))

    def _leave_alone(self, reason: str) -> None:
        self.left_alone = True
        self.lowered = self.original
        first_line = reason.partition("\n")[0]
        say_once(f"{self._name} runs as it is: {first_line}", (self._name, first_line))

    def _say_nothing_changed(self) -> None:
        """One line in the log; where a pass refused or failed, the manager has written it."""
        self.left_alone = True
        entries = tuple(self.plan())
        if not any(entry.outcome in (report.REFUSED, report.FAILED) for entry in entries):
            notes = [f"{entry.name}: {note}" for entry in entries for note in entry.notes]
            self._leave_alone("; ".join(notes) or "no pass found anything to do")
