"""Runs passes while XLA compiles a lowered program: sessions, compiler hooks, and reports that survive a cache hit.

A `Session` runs the passes for one lowered program, before and during its compilation. It is used in this order:

    session = Session(manager, module, "jit_step")  # fingerprints the inputs, registers the hook on first use
    new = session.run_lowered()                     # LOWERED passes; None when they changed nothing
    lowered = with_hlo(lowered, new or module, session.module_name)
    with session.compiling():
        executable = lowered.compile()              # XLA calls the hook: PRE_ and POST_SCHEDULER passes
    session.report()

The compiler hook is a function that XLA calls with each module. It is registered once per process, stage and platform,
and serves all sessions. The session adds a marker to the module's name: a fingerprint of program, passes and profile.
The hook finds the session by this marker, and returns at once for modules without a marker. Registration initializes
JAX's backends, and `jax.distributed.initialize()` must come before that. So nothing is registered at import or
decoration.

JAX's compilation cache does not know about passes. The marker in the module's name gives two plans for one program
different cache entries. No pass runs after a cache hit, so reports are stored in the cache's folder, too. This works
only for local cache folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
from absl import logging
from jax.extend import xla

from dhelix.errors import DhelixError
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.framework.manager import PassManager, Stage, say_once
from dhelix.passes.framework.report import FAILED, REFUSED, Report, StageReport
from dhelix.runtime.compiler import cache_notes

_HOOK_STAGES = {
    Stage.PRE_SCHEDULER: xla.PipelineStage.PRE_SCHEDULER,
    Stage.POST_SCHEDULER: xla.PipelineStage.POST_SCHEDULER,
}
GPU_PLATFORMS = ("cuda",)

_lock = threading.RLock()
_sessions: dict[str, weakref.WeakSet[Session]] = {}  # by marker; weak references, so only owners keep sessions alive
_registered: dict[tuple[Stage, str], bool] = {}  # False: the process does not have this platform
_temporary: list[tuple[str, Callable[[Stage, bytes], bytes | None]]] = []  # (part of the module name, transform)
_unpredicted: list[None] = []  # one for each `unpredicted` that is entered


def enabled() -> bool:
    """Whether the environment variable DHELIX lets dhelix change programs. Raises DhelixError for an unknown value."""
    value = os.environ.get("DHELIX", "on").strip().lower()
    if value not in ("", "on", "1", "off", "0"):
        raise DhelixError(f"DHELIX={value!r} is unknown; set it to on or off")
    return value not in ("off", "0")


def on() -> bool:
    return not switched_off()


def switched_off() -> str:
    """Returns a text that says what switches dhelix off; "" if dhelix is on.

    JAX's NaN checks switch dhelix off. They rerun a failing step operation by operation, and this works only for
    programs that JAX lowered itself.
    """
    config = jax.config
    switches = {
        "DHELIX=off": not enabled(),
        "jax.disable_jit": config.jax_disable_jit,
        "jax_debug_nans": config.jax_debug_nans,
        "jax_debug_infs": config.jax_debug_infs,
    }
    found = [name for name, on in switches.items() if on]
    return f"is switched off by {' and '.join(found)}" if found else ""


class Session:
    """Runs the passes for one lowered program, before and during its compilation.

    Attributes:
      marker: fingerprint of the program, the passes and the profile, as 16 hex digits.
      module_name: the name under which the program must be compiled. It includes the marker.
      compiles: whether the session is inside `compiling`.
    """

    def __init__(
        self,
        manager: PassManager,
        module: bytes,
        name: str,
        profile: object = None,
        platforms: Sequence[str] = GPU_PLATFORMS,
        played: Callable[[bytes], StepParts] | None = None,
    ):
        """
        Args:
          manager: the passes to run.
          module: the lowered program as a serialized HloModuleProto, before any pass.
          name: the program's name, such as "jit_step".
          profile: source of the passes' costs; part of the fingerprint.
          platforms: platforms on which the hook runs. On "cpu", only POST_SCHEDULER passes run. There, XLA calls the
            PRE_SCHEDULER hook after copy insertion, when it is not safe to change loops.
          played: predicts how the time of a scheduled module is divided into parts, for the report.
        """
        self.manager = manager
        self.marker = manager.fingerprint(module, profile)
        self.module_name = fingerprint.mark(name, self.marker)
        self._module = module
        self._played = played
        self._stages: dict[Stage, StageReport] = {}
        self._error: Exception | None = None
        self.compiles = False
        with _lock:
            _sessions.setdefault(self.marker, weakref.WeakSet()).add(self)
        weakref.finalize(self, _forget, self.marker)
        for stage in _HOOK_STAGES:
            if manager.runs_at(stage) or (stage is Stage.POST_SCHEDULER and played is not None):
                register(stage, platforms)

    def run_lowered(self) -> bytes | None:
        """Runs the LOWERED passes. Returns the new module, or None if nothing changed. May be called only once.

        If an earlier process ran the same passes on an equal module, its result is read from the compilation cache's
        folder. Results are stored there only if no pass refused or failed. So every process reports refusals itself.
        """
        module, self._module = self._module, b""  # frees the program, which may hold large constants
        name = f"{self.marker}_{fingerprint.of_all_but_id(module)}.lowered"
        if self.manager.dump_to is None and (known := self._known_lowered(name)) is not None:
            changed, self._stages[Stage.LOWERED] = known
            return changed
        changed, found = self.manager.run(Stage.LOWERED, module, self.module_name)
        self._stages[Stage.LOWERED] = found
        if changed is not None and not any(entry.outcome in (REFUSED, FAILED) for entry in found.passes):
            cache_notes.write(f"{name}.hlo.pb", changed)
            cache_notes.write(f"{name}.json", Report(self.module_name, self.marker, (found,)).to_json())
        return changed

    def _known_lowered(self, name: str) -> tuple[bytes, StageReport] | None:
        try:
            text, changed = cache_notes.read(f"{name}.json"), cache_notes.read_bytes(f"{name}.hlo.pb")
            if text is None or changed is None:
                return None
            (stage,) = Report.from_json(text).stages
        except (OSError, ValueError, DhelixError) as error:
            logging.vlog(
                1,
                "the stored result of the passes for %s cannot be read and is made again: %s",
                self.module_name,
                error,
            )
            return None
        return changed, dataclasses.replace(stage, stored=True)

    def skip_lowered(self, reason: str) -> None:
        """Records why the LOWERED passes do not run."""
        self._stages[Stage.LOWERED] = self.manager.not_run(Stage.LOWERED, self.module_name, reason)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Wraps `lowered.compile()`. With `strict`, raises the error of a pass, not the XLA error that wraps it."""
        self._error, self.compiles = None, True
        try:
            yield
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self.compiles = False

    def run_hook(self, stage: Stage, module: bytes) -> bytes | None:
        """Runs the passes of `stage` when the compiler calls the hook. Raises errors only if the manager is strict."""
        try:
            changed, found = self.manager.run(stage, module, fingerprint.module_name(module))
            if stage is Stage.POST_SCHEDULER:
                found = self._with_parts(found, changed or module)
            for session in _sessions_of(self.marker):  # sessions with equal inputs have the same passes and results
                session._stages[stage] = found
            self._store()
            return changed
        except Exception as error:
            if self.manager.strict:
                self._error = error
                raise
            logging.vlog(1, "%s", traceback.format_exc())
            reason = f"the {stage.value} passes failed: {type(error).__name__}: {error}"
            name = fingerprint.unmark(self.module_name)
            say_once(f"{name} keeps XLA's program: {reason}", (self.manager.step, reason))
            return None

    def _with_parts(self, found: StageReport, module: bytes) -> StageReport:
        """Adds the scheduled step's predicted times to `found`. If the prediction fails, the error is only logged."""
        if self._played is None or _unpredicted:
            return found
        start = time.perf_counter()
        try:
            parts = self._played(module)
        except Exception as error:
            logging.vlog(1, "%s", traceback.format_exc())
            say_once(f"cannot predict times of {fingerprint.unmark(self.module_name)}: {error}", ("played",))
            return found
        return dataclasses.replace(found, parts=parts, seconds=found.seconds + time.perf_counter() - start)

    def report(self, collective_fingerprint: str | None = None) -> Report:
        """Reports what the passes did, in this process or in an earlier one whose executable the cache returned."""
        stored = self._stored()
        stages = []
        for stage in Stage:
            if stage in self._stages:
                stages.append(self._stages[stage])
            elif stage in stored:
                stages.append(dataclasses.replace(stored[stage], stored=True))
            elif any(p.stage is stage for p in self.manager.passes):
                reason = (
                    "runs in the GPU compiler, which did not run here (or the compilation cache had the step without "
                    "a report)"
                )
                stages.append(self.manager.not_run(stage, self.module_name, reason))
        return Report(self.module_name, self.marker, tuple(stages), collective_fingerprint)

    def _store(self) -> None:
        """Writes the reports of the hook's stages to the compilation cache's folder, if there is one."""
        stages = tuple(self._stages[s] for s in _HOOK_STAGES if s in self._stages)
        cache_notes.write(f"{self.marker}.json", Report(self.module_name, self.marker, stages).to_json())

    def _stored(self) -> dict[Stage, StageReport]:
        """The stage reports in the compilation cache's folder; empty if the file is missing or damaged."""
        name = f"{self.marker}.json"
        try:
            text = cache_notes.read(name)
            if text is None:
                return {}
            report = Report.from_json(text)
            if report.fingerprint != self.marker:
                raise DhelixError("it belongs to another step")
            return {Stage(s.stage): s for s in report.stages}
        except (OSError, ValueError, DhelixError) as error:  # ValueError: not UTF-8, or an unknown stage
            path = cache_notes.path_of(name)
            say_once(f"cannot use the stored report {path}: {' '.join(str(error).split())}", ("stored", str(path)))
            return {}


def _sessions_of(marker: str) -> list[Session]:
    """The sessions with this marker. Sessions that are compiling come first."""
    with _lock:
        return sorted(_sessions.get(marker, ()), key=lambda session: not session.compiles)


def _forget(marker: str) -> None:
    with _lock:
        if not list(_sessions.get(marker, ())):
            _sessions.pop(marker, None)


def register(stage: Stage, platforms: Sequence[str]) -> None:
    """Registers the hook for `stage`, once per process and platform. Skips platforms that this process lacks."""
    for platform in platforms:
        if platform == "cpu" and stage is Stage.PRE_SCHEDULER:
            continue
        with _lock:
            if (stage, platform) in _registered:
                continue
            try:
                xla.register_hlo_module_transformation(
                    partial(_hook, stage),
                    name=_hook_name(stage),
                    stage=_HOOK_STAGES[stage],
                    platforms=platform,
                )
                _registered[stage, platform] = True
            except jax.errors.JaxRuntimeError as error:  # this process does not have the platform's plugin
                logging.vlog(1, "no %s hook on %s: %s", stage.value, platform, error)
                _registered[stage, platform] = False


def clear() -> None:
    """Removes the hook from every platform and forgets all sessions."""
    with _lock:
        for (stage, platform), present in _registered.items():
            if present:
                xla.clear_hlo_module_transformation(_hook_name(stage), stage=_HOOK_STAGES[stage], platforms=platform)
        _registered.clear()
        _sessions.clear()


@contextlib.contextmanager
def temporary_hook(
    transform: Callable[[Stage, bytes], bytes | None], module_name: str, platforms: Sequence[str] = GPU_PLATFORMS
) -> Iterator[None]:
    """Applies `transform` to modules that are compiled inside the context and whose name contains `module_name`.

    `transform` runs after the passes of the module's session, and after enclosing temporary hooks. The process-wide
    hook calls `transform`, so nothing is unregistered in XLA. (If a hook is unregistered while another thread compiles,
    the process crashes.)
    """
    for stage in _HOOK_STAGES:
        register(stage, platforms)
    entry = module_name, transform
    _temporary.append(entry)
    try:
        yield
    finally:
        _temporary.remove(entry)


@contextlib.contextmanager
def unpredicted() -> Iterator[None]:
    """Leaves the times of steps that are compiled inside the context out of their reports.

    Whoever predicts them from the compiled module anyway saves the second prediction.
    """
    _unpredicted.append(None)
    try:
        yield
    finally:
        _unpredicted.pop()


def _hook(stage: Stage, module: bytes) -> bytes | None:
    marker = fingerprint.marker_of(module)
    sessions = [] if marker is None else _sessions_of(marker)
    changed = sessions[0].run_hook(stage, module) if sessions and enabled() else None
    name = fingerprint.module_name(module) if _temporary else ""
    for transform in [transform for wanted, transform in list(_temporary) if wanted in name]:
        changed = transform(stage, changed or module) or changed
    return changed


def _hook_name(stage: Stage) -> str:
    return f"dhelix-{stage.value}"
