"""Runs a step under settings of its collectives, and measures it.

    trials = StepTrials(lowered, arguments, target)
    bodies = trials.bodies()                      # the overlaps of the step, from a trace with NCCL's defaults
    trials.times(bodies, {identity: setting})     # of the overlaps, from a trace
    trials.seconds({identity: setting})           # of a step, without the profiler

The settings change between two steps, in the running process: NCCL asks the plugin about each collective anew. Each
step runs on the state that the one before returned, if a step returns one like its first argument. Otherwise each gets
a copy of the arguments. All processes of a job run the same trials, and get the same times.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import executions as runs_of
from dhelix.passes.framework.fingerprint import module_fingerprint, of_bytes
from dhelix.passes.plans.plan import PlanTarget
from dhelix.passes.plans.tuned_collectives import identities
from dhelix.passes.tuning.launch_order import has_sends, sequences
from dhelix.runtime.compiler import memory_need
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.profiling.in_process import copies
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.tuning import in_effect, plugin
from dhelix.runtime.tuning.bodies import Body, StepTimes, Trace, bodies_of, times_of
from dhelix.runtime.tuning.plugin import Asked, TunerError
from dhelix.runtime.tuning.step_search import StepSettings
from dhelix.runtime.tuning.tables import table

_TRACED, _TIMED = 3, 3  # steps of a trace, and of a time
_ROOM = 1 << 20


class StepTrials:
    """A compiled step with arguments, on GPUs.

    Attributes:
      module: the scheduled program.
      asked: what NCCL asked in the first step.
    """

    def __init__(
        self, lowered: jax.stages.Lowered, arguments: tuple[Any, ...], target: PlanTarget, use_up: bool = False
    ) -> None:
        """Compiles the step, and runs it once.

        Args:
          lowered: the step. Its kernels must not be in CUDA graphs, because a trace does not name these.
          arguments: the first ones, without static ones. They stay, because a step that donates gets a copy.
          target: the machine, whose names of collectives plans use.
          use_up: whether arguments may be used up, if the step donates them.

        Raises:
          TunerError: NCCL does not use the plugin. As after any error, the process has its settings again.
        """
        self._plugin = plugin.install()
        self._compiled = lowered.compile(dict(NO_GRAPHS))
        self.module = compiled_module(self._compiled)
        self._names = {identity: [] for identity in identities(self.module, target).values()}
        for instruction, identity in identities(self.module, target).items():
            self._names[identity].append(instruction)
        self._target, self._arguments = target, arguments
        self._chains: bool | None = None
        self._use_up = use_up
        self._loaded: str | None = None
        self.asked: Sequence[Asked] = ()
        try:
            self._run_once()
        except BaseException:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the GPUs may have failed; the first error counts
                self.end()
            raise

    def _run_once(self) -> None:
        """Runs the step with NCCL's defaults, and keeps what NCCL asks. Raises TunerError if it does not ask."""
        self._set({})
        self._plugin.record(_ROOM)
        self._step()
        self.asked = self._plugin.recorded()
        self._plugin.record(0)
        if agreement.largest("see whether NCCL uses the plugin", int(not self._plugin.counts().communicators)):
            raise TunerError(
                "NCCL does not use the tuner plugin: it made its communicators before, or knows no interface of it; "
                "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING says which"
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the next step. If a step donates them, they take the place of those that were given."""
        return self._arguments

    @property
    def memory(self) -> int:
        """Bytes that the step needs on a GPU by the compiler's count, arguments included."""
        return memory_need.of_compiled(self._compiled).total

    @property
    def key(self) -> str:
        """A digest of the program, by which its trials are found again, also by another process."""
        return module_fingerprint(self.module.to_bytes())

    @property
    def devices(self) -> int:
        """The number of GPUs that run the program."""
        return math.prod(self.module.device_counts)

    def known(self, settings: StepSettings) -> StepSettings:
        """The settings of collectives that the program has."""
        return {identity: setting for identity, setting in settings.items() if identity in self._names}

    @property
    def sends(self) -> bool:
        """Whether the program has all-to-alls or permutes, about which NCCL asks no plugin."""
        return has_sends(self.module)

    @property
    def surprise(self) -> str:
        """The first question of NCCL in a step that is not the one of the program's launch order; "" if there is none.

        Settings would then reach the wrong collectives.
        """
        expected = [[(q.kind, q.bytes) for q in each] for each in sequences(self.module).values()]
        by_communicator: dict[int, list[tuple[str, int]]] = {}
        for one in self.asked:
            by_communicator.setdefault(one.communicator, []).append((one.kind, one.bytes))
        for asked in by_communicator.values():
            if asked in expected or not expected:
                continue
            nearest = max(expected, key=lambda each: _common(asked, each))
            n = _common(asked, nearest)
            said, wanted = ("the end of the step" if n >= len(part) else _words(*part[n]) for part in (asked, nearest))
            return f"question {n + 1} of {len(asked)} is {said}, where the program has {wanted}"
        return ""

    def bodies(self) -> tuple[Body, ...]:
        """The overlaps of the step that are worth tuning; none if NCCL asks no plugin, as with symmetric memory."""
        if not agreement.largest("see whether NCCL asks", int(bool(self.asked))):
            return ()
        return bodies_of(self.module, self._target, self._trace({}), runs_of(self.module))

    def times(self, bodies: Sequence[Body], settings: StepSettings) -> StepTimes:
        """The times of overlaps under settings."""
        trace = self._trace(settings)
        return {body.fingerprint: times_of(body, trace) for body in bodies}

    def seconds(self, settings: StepSettings) -> float:
        """The time of a step under settings: the median of some steps, of the slowest process."""
        self._set(settings)
        self._step()
        found = []
        for _ in range(_TIMED):
            start = time.perf_counter()
            self._step()
            found.append(time.perf_counter() - start)
        told = agreement.gathered("compare times of a step", json.dumps(statistics.median(found)))
        return max(map(json.loads, told))

    def end(self) -> None:
        """Gives NCCL back the settings that other steps of this process have."""
        self._plugin.record(0)
        in_effect.wait_for_gpus()
        in_effect.restore()

    def _trace(self, settings: StepSettings) -> Trace:
        self._set(settings)
        self._step()
        name = self.module.name
        return Trace(self.module, executions.record_everywhere(lambda: [self._step() for _ in range(_TRACED)], name))

    def _step(self) -> None:
        uses_up = self._chains or (self._chains is None and self._use_up)
        given = self._arguments if uses_up else copies(self._arguments)
        out = jax.block_until_ready(self._compiled(*given))
        if self._chains is None:
            self._chains = isinstance(out, tuple) and bool(out) and _alike(out[0], self._arguments[0])
        if self._chains:
            self._arguments = (out[0], *self._arguments[1:])
        elif self._use_up and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._arguments)):
            raise TunerError("the step does not return its new state first, so its arguments cannot be used up")

    def _set(self, settings: StepSettings) -> None:
        by_instruction = {i: setting for name, setting in settings.items() for i in self._names[name]}
        text = table(self.module, by_instruction)
        if text != self._loaded:
            in_effect.wait_for_gpus()
            if len(set(agreement.gathered("set the collectives of a step", of_bytes(text.encode())))) > 1:
                raise DhelixError("the processes would set the collectives differently: do all run the same program?")
            self._plugin.load(text)
            self._loaded = text


def _common(first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]) -> int:
    """How many questions two sequences begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _words(kind: str, size: int) -> str:
    return f"{kind} of {size:,} bytes"


def _alike(new: Any, old: Any) -> bool:
    """Whether `new` can take the place of `old` among the arguments."""
    new_leaves, new_tree = jax.tree.flatten(new)
    old_leaves, old_tree = jax.tree.flatten(old)
    return new_tree == old_tree and all(
        isinstance(n, jax.Array)
        and isinstance(o, jax.Array)
        and (n.shape, n.dtype) == (o.shape, o.dtype)
        and n.sharding.is_equivalent_to(o.sharding, n.ndim)
        for n, o in zip(new_leaves, old_leaves, strict=True)
    )
