"""Specializes a step for one kind of arguments: transforms its program at once, and compiles it at the first call."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from dhelix.errors import DhelixError, HostsDisagreeError, first_line
from dhelix.passes import jax_compat
from dhelix.passes.communication.collective_matmul.pattern import Placed
from dhelix.passes.framework import fingerprint, report
from dhelix.passes.framework.gain import Gain, StepParts, guesses
from dhelix.passes.framework.manager import Stage, say_once
from dhelix.passes.framework.report import Report, StageReport
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans.plan import Plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.runtime.compiler import lowering, memory_limits, memory_need, registration
from dhelix.runtime.processes import agreement, first_run
from dhelix.runtime.processes.rendezvous import Job
from dhelix.runtime.step import plain_step
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import alternatives
from dhelix.runtime.step.step_passes import pass_manager, weighed, without_plan
from dhelix.runtime.step.target import Target
from dhelix.runtime.tuning import in_effect
from dhelix.runtime.tuning.in_effect import Applied

_TO_ONE_DEVICE = b"SPMDFullToShardShape"  # marks the start of a shard_map in HLO lowered for GSPMD
_MANUAL_IN_GSPMD = (
    "the passes support shard_map only with Shardy, JAX's default (jax_use_shardy_partitioner=True), but this one is "
    "lowered for GSPMD"
)
_ONE_DEVICE = "it runs on one device, which has no communication to hide (passes= or strict=True interleave it anyway)"

_USELESS, _NOT_WORTH_MEMORY = 1.0, 0.98
"""The plain step runs if the interleaved step's predicted time, relative to the plain step's, is at least this.

The second number is for steps that need more memory than usual. Of the measured steps in one node with a predicted gain
below 10 % (docs/results), none gained 1 % more than predicted, and MaxText's step lost 1 % instead of gaining it.
"""


class Specialization:
    """The program for one kind of arguments, before and after the passes.

    dhelix never breaks a job. Passes may refuse the program. Something may also fail before the step runs: conversion
    to HLO and back, reading a profile, or compilation of the transformed program. In all these cases, the step is left
    alone: its caller runs the plain step, and a line in the log says why. With `strict`, an error is raised instead.

    A plan that does not fit is refused late, when the compiler orders the program. By then, the program contains the
    plan's replacements of collectives. So the step is compiled again without the plan.

    Attributes:
      original: the lowered step before any pass.
      lowered: the step after the LOWERED passes; `original` if the step is left alone.
      left_alone: whether the plain step runs: because no pass changed anything, something failed, memory did not
        suffice, or the interleaved step is predicted to be no faster.
      verified: whether the step was compared with the plain step.
    """

    def __init__(
        self,
        name: str,
        label: str,
        options: StepOptions,
        original: jax.stages.Lowered,
        before: StageReport | None = None,
    ):
        """
        Args:
          name: name of the step.
          label: text that distinguishes the step in the log from other steps of the same name.
          options: options of the step.
          original: the lowered step before any pass.
          before: the report of the pass that sharded its states, if they are sharded.
        """
        self.original = original
        jax_compat.mark_known(original)
        self._before = () if before is None else (before,)
        self.lowered = original
        self.left_alone = False
        self.verified = False
        self._name, self._label = name, label
        self._options = options
        self._limit: int | None = None
        self._limit_given = options.memory_limit is not None
        self._target: Target | None = None
        self._paired: tuple[Placed, ...] = ()
        self._lock = threading.Lock()
        self._compiled: jax.stages.Compiled | None = None
        self._order: str | None = None
        self._refused: StageReport | None = None
        self._job = first_run.of_program(original)
        self._agreed = False
        self._plain: plain_step.PlainStep | None = None
        self._seconds = 0.0
        self._session: registration.Session | None = None
        self._why = ""
        self._slower: Report | None = None
        self._settings: Applied | None = None
        start = time.perf_counter()
        with self._left_alone_on_error():
            self._target = Target.of(original, options)
            if lowering.device_count(original) > 1 or options.strict or options.passes is not None:
                program = lowering.hlo_bytes(original)
                if self._target is not None:
                    self._plain = plain_step.PlainStep(original, program, self._target.costs, options.xla)
                self._limit = plain_step.memory_limit(name, options, self._plain)
                self._paired = weighed(options, self._target, original, self._limit)
                self._session = self._begin(self._limit, program)
                self._transform(program)
            else:
                self._session = self._begin(self._limit)
                self._session.skip_lowered(_ONE_DEVICE)
                self._leave_alone(_ONE_DEVICE)
        self._seconds += time.perf_counter() - start

    def compile(self, runs: bool = False) -> Callable[..., Any] | None:
        """The compiled program, which takes no static arguments, and `runs` next; None if `jax.jit` runs the step."""
        with self._lock:
            if not self._agreed:
                self._agreed = True
                why = (self._why or "a pass refused or failed") if self.left_alone else None
                manager = None if self._session is None else self._session.manager
                with self._left_alone_on_error(self._job):
                    first_run.check_choice(self._name, self.original, manager, self._limit, why, self._job)
            sets = self._options.tuning is not None and self._target is not None
            if self._compiled is None and (sets or not self.left_alone):
                start = time.perf_counter()
                with self._left_alone_on_error(self._job):
                    if self.left_alone:  # `jax.jit` would not tell which program it compiled
                        self._compiled = self.original.compile()
                    else:
                        self._interleave()
                    self._check_order()
                    self._set_collectives()
                self._seconds += time.perf_counter() - start
            if (said := self._unset()) and self._settings is None:
                say_once(f"{self._name}: {said}", (self._label, said))
            if runs and self._settings is not None:
                self._settings.before_call()
            return self._compiled

    def preview(self) -> Report:
        """Reports what the passes of stage LOWERED decided."""
        if self._session is None:
            name = lowering.module_name(self.original)
            stage = pass_manager(self._options).not_run(Stage.LOWERED, name, self._why)
            return Report(name, "", (*self._before, stage), left_alone=self._why, settings=self._unset())
        whole = self._session.report()
        stages = tuple(stage for stage in whole.stages if stage.stage == Stage.LOWERED.value)
        stages = (*self._before, *stages)
        why = self._why if self.left_alone else ""
        return Report(whole.module, whole.fingerprint, stages, left_alone=why, settings=self._unset())

    def report(self, compared: bool = True) -> Report:
        """Reports what passes of all stages did, and if `compared`, the gain. Compiles what this takes."""
        if self._session is None or (self.left_alone and self._compiled is None and self._slower is None):
            return self.preview()
        later = (entry for entry in self._session.report() if entry.stage != Stage.LOWERED.value)
        if all(entry.outcome in (report.NOT_RUN, report.DISABLED) for entry in later):
            self.compile()
        if self._slower is not None:
            return dataclasses.replace(self._slower, settings=self._unset(), compile_seconds=self._seconds)
        if self.left_alone and self._compiled is None:
            return self.preview()
        return self._whole_report(compared)

    def _whole_report(self, compared: bool = True) -> Report:
        assert self._session is not None
        whole = self._session.report(self._order)
        stages = (*self._before, *whole.stages, *filter(None, [self._refused]))
        gain = self._gain(stages) if compared else None
        return dataclasses.replace(
            whole,
            stages=stages,
            left_alone=self._why if self.left_alone else "",
            gain=gain,
            settings=self._unset() if self._settings is None else self._settings.said,
            compile_seconds=self._seconds if self._compiled is not None else 0.0,
            plain_seconds=0.0 if self._plain is None else self._plain.seconds,
        )

    def _gain(self, stages: Sequence[StageReport]) -> Gain | None:
        after = next((stage.parts for stage in stages if stage.parts is not None), None)
        if self._plain is None or after is None:
            return None
        before, known = self._plain.seconds, self._plain.known  # `known` is computed here if it was not needed before
        self._seconds += self._plain.seconds - before
        return None if known is None else Gain(known[1], after)

    def _begin(self, memory_limit: int | None, program: bytes | None = None) -> registration.Session:
        module = lowering.hlo_bytes(self.original) if program is None else program
        if _TO_ONE_DEVICE in module:  # after a transformation, XLA could abort the process instead of raising an error
            raise DhelixError(_MANUAL_IN_GSPMD)
        given = self._target, self.original, memory_limit, self._paired, self._label
        played = None if self._plain is None else self._played
        name = fingerprint.module_name(module)
        return registration.Session(pass_manager(self._options, *given), module, name, played=played)

    def _played(self, scheduled: bytes) -> StepParts:
        assert self._target is not None  # only called if there is a plain step
        return plain_step.of_scheduled(HloModule.from_bytes(scheduled), self._target.costs())

    @contextlib.contextmanager
    def _left_alone_on_error(self, job: Job | None = None) -> Iterator[None]:
        """Wraps code that runs before the step. If the code fails, the step is left alone, so the job goes on.

        If the code fails in one process of `job`, all processes leave the step alone. With `strict`, an error is raised
        instead.
        """
        try:
            yield
        except HostsDisagreeError:
            raise
        except Exception as error:
            if self._options.strict:
                if isinstance(error, DhelixError):
                    raise
                raise DhelixError(f"{self._name} cannot be interleaved: {first_line(error)}") from error
            logging.vlog(1, "%s", traceback.format_exc())
            self._compiled = self._session = None  # discard the results of the passes
            why = f"it cannot be interleaved: {first_line(error)}"
            self._leave_alone(why if job is None else job.leave(why, error))

    def _transform(self, program: bytes | None = None) -> None:
        """Runs the LOWERED passes. `program` is the lowered step as serialized HLO, if it is at hand."""
        assert self._session is not None
        changed = self._session.run_lowered()
        makes_strands = self._options.schedule != "intra_batch"  # which orders programs that no pass has changed, too
        if changed is None and makes_strands and self._session.manager.runs_at(Stage.LOWERED):
            self._say_nothing_changed()
        else:
            module = changed or program or lowering.hlo_bytes(self.original)
            self.lowered = lowering.with_hlo(self.original, module, self._session.module_name)

    def _compile(self) -> None:
        assert self._session is not None
        try:
            with self._session.compiling():
                self._compiled = self.lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise DhelixError(f"the interleaved program does not compile: {first_line(error)}") from error

    def _interleave(self) -> None:
        """Compiles the step, and leaves it alone if it needs too much memory or is no faster."""
        self._compile()
        if self._compiled is not None and self._options.plan is not None:
            self._drop_refused_plan(self._options.loaded_plan)
        if self._compiled is not None and self._limit is not None:
            self._keep_memory(self._limit)
        if self._compiled is not None and not self.left_alone:
            self._keep_speed()

    def _check_order(self) -> None:
        """Compares the order of collectives between processes, after all other work, which may have failed in one."""
        compiled = None if self.left_alone else self._compiled
        marker = "" if self._session is None else self._session.marker
        self._order = first_run.check_order(self._name, compiled, marker, self._job)

    def _set_collectives(self) -> None:
        """Puts the settings of the plan's collectives into effect, if the compiled program runs."""
        if self._options.tuning is not None and self._compiled is not None and self._target is not None:
            plan = self._options.loaded_tuning
            self._target.compare(plan, self._options)
            module = lowering.compiled_module(self._compiled)
            self._settings = in_effect.apply(self._name, self._label, plan, module, self._job)

    def _unset(self) -> str:
        """Why this program cannot have the settings that were given; "" if it can, or none were given."""
        runs_plain = self.left_alone and self._compiled is None
        return in_effect.unset(self._options.tuning, runs_plain, self._target is not None)

    def _drop_refused_plan(self, plan: Plan) -> None:
        """If the plan replaced collectives and was refused, compiles the step again without it."""
        assert self._session is not None
        done = self._session.report()
        chosen = {one.name for one in alternatives(plan.collectives)}
        put = any(entry.changed for entry in done if entry.name in chosen)
        refused = done[PlannedOrder.name].outcome in (report.REFUSED, report.FAILED)
        if not self._largest(int(put and refused), "drop a refused plan"):
            return
        self._refused = next((s for s in done.stages if s.stage == PlannedOrder.stage.value), None)
        self._options = without_plan(self._options)
        self._compiled, self._session = None, self._begin(self._limit)
        reason = (
            "the plan was refused, so the step is compiled again without the plan's replacements of collectives, as "
            "with schedule='xla'"
        )
        say_once(f"{self._name}: {reason}", (self._label, reason))
        self._transform()
        if not self.left_alone:
            self._compile()

    def _keep_memory(self, limit: int) -> None:
        """Leaves the step alone if it needs more than `limit` bytes, arguments included, by the compiler's count.

        The scheduling pass has counted live ranges, and either kept to the limit or refused. If it refused, and no
        limit was given, the step may use the GPUs' room. But the compiler's allocation also has gaps between buffers.
        If the step needs too much, the plain step is compiled, because its memory by the compiler's count may raise the
        limit. Then the step is compiled once more, with a limit that is reduced by the gaps.
        """
        plain, needed = None, self._needed(self._compiled)
        would_do, gaps, refused = self._limit_that_would_do(needed)
        if refused and self._use_room(limit, would_do):
            return
        if needed > limit and not self._limit_given:
            plain = jax_compat.apart(self.original).compile()
            limit = max(limit, self._largest(memory_need.of_compiled(plain).allowed(), "weigh the plain step's memory"))
        if needed > limit and not refused:
            needed = self._again(max(limit - gaps, 0))
            would_do = min(would_do, self._limit_that_would_do(needed)[0]) if needed > limit else needed
            if needed > limit and self._use_room(limit, would_do):
                return
        if needed <= limit:
            return
        reason = memory_limits.exceeded(limit, would_do, self._limit_given)
        if self._options.strict:
            raise DhelixError(f"{self._name}: {reason}")
        plain = jax_compat.apart(self.original).compile() if plain is None else plain
        of_plain = self._largest(memory_need.of_compiled(plain).total, "weigh the plain step's memory")
        self._leave_alone(reason + memory_limits.exceeded_by_plain(of_plain, limit))
        self._compiled = plain

    def _again(self, limit: int) -> int:
        """Compiles the step once more. Returns the bytes that it needs; 0 if this fails."""
        self._compiled, self._session = None, self._begin(limit)
        self._transform()
        self._compile()
        return 0 if self._compiled is None else self._needed(self._compiled)

    def _use_room(self, limit: int, would_do: int) -> bool:
        """Compiles the step again, with the GPUs' room as limit if that is enough. Returns whether it keeps to it."""
        assert self._target is not None
        # A limit between both would save memory that nobody needs, and may cost speed.
        room = -self._largest(-memory_need.room(self._target.hardware), "compare the GPUs' memory")
        if self._limit_given or room <= limit or room < would_do:
            return False
        self._limit_given = True
        if limit < (needed := self._again(room)) <= room:
            say_once(f"{self._name}: {(said := memory_limits.more(needed, limit))}", (self._label, said))
        return needed <= room

    def _keep_speed(self) -> None:
        """Leaves the step alone unless it is predicted to be faster than the plain step.

        If the user insists (`StepOptions.insists`), the interleaved step runs all the same. Then the report says that
        no gain is predicted.
        """
        if self._options.insists or self._plain is None:
            return
        found = self._whole_report()
        roomy = self._limit_given and self._options.memory_limit is None  # see `_use_room`
        useless = found.gain is not None and found.gain.ratio >= (_NOT_WORTH_MEMORY if roomy else _USELESS)
        if self._largest(int(useless), "compare the predicted times") and found.gain is not None:
            self._compiled = None
            why = f"{found.gain.time()}; {guesses(found.gain.after)}"
            enough = f"not {1 - _NOT_WORTH_MEMORY:.0%} faster, and need more memory" if roomy else "not faster"
            self._leave_alone(f"two strands are {enough}: {why} (strict=True interleaves the step anyway)")
            self._slower = dataclasses.replace(found, left_alone=self._why)

    def _needed(self, compiled: jax.stages.Compiled | None) -> int:
        assert compiled is not None
        return self._largest(memory_need.of_compiled(compiled).total, "weigh memory")

    def _largest(self, value: int, purpose: str) -> int:
        """The largest value of all processes, whose compilers may count differently. All must decide alike."""
        return agreement.largest(f"{purpose} of step {self._name!r}", value, self._job)

    def _limit_that_would_do(self, needed: int) -> tuple[int, int, bool]:
        """Returns (limit that would suffice, bytes lost in gaps, whether a pass refused because of the limit)."""
        assert self._compiled is not None and self._session is not None
        stages = (*self._session.report().stages, *filter(None, [self._refused]))
        gaps, said = memory_limits.gaps_and_need(needed, lowering.compiled_module(self._compiled), stages)
        gaps, said = (self._largest(count, "weigh gaps in the memory") for count in (gaps, said))
        return min(needed, said + gaps) if said else needed, gaps, said > 0

    def _leave_alone(self, reason: str) -> None:
        self.left_alone, self._why = True, reason
        self.lowered = self.original  # frees the transformed program
        say_once(f"{self._name} runs as it is: {reason}", (self._label, reason))

    def _say_nothing_changed(self) -> None:
        """Leaves the step alone and logs why, unless the pass manager has already logged a refusal or a failure."""
        self.left_alone = True
        entries = tuple(self.preview())
        if not any(entry.outcome in (report.REFUSED, report.FAILED) for entry in entries):
            notes = [f"{entry.name}: {note}" for entry in entries for note in entry.notes]
            self._leave_alone("; ".join(notes) or "no pass found anything to do")
