"""Finds the memory that the plain step needs, and predicts its time. The plain step is the step without passes.

The memory limit of an interleaved step follows from the plain step's memory (`memory_need.py`). The gain of an
interleaved step is relative to the plain step's time (`passes/framework/gain.py`). Memory and time follow from the
plain step's schedule. XLA may take seconds to schedule a large step, so the results are stored in the compilation
cache's folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import msgspec
from absl import logging

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.framework.manager import say_once
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import cache_notes, deviceless, memory_need, scheduled_only
from dhelix.runtime.compiler.memory_need import MemoryNeed
from dhelix.runtime.step.options import StepOptions


class PlainStep:
    """A lowered step before any pass. Its memory and predicted time are computed on first use.

    Attributes:
      seconds: seconds that this process took to compute memory and time.
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        program: bytes,
        costs: Callable[[], Costs],
        xla: Mapping[str, Any] | None = None,
    ):
        """
        Args:
          lowered: the step, lowered for GPUs.
          program: the lowered step as serialized HLO.
          costs: function that makes the operator costs for the prediction.
          xla: XLA options with which the step is compiled.
        """
        self._lowered, self._program = lowered, program
        self._costs = costs
        self._options = dict(xla or {})
        self.seconds = 0.0

    @cached_property
    def known(self) -> tuple[MemoryNeed, StepParts] | None:
        """The memory that the plain step needs, and the parts of its predicted time.

        None if XLA fails before it has a schedule. A later compilation of the program then raises the error.
        """
        start = time.perf_counter()
        try:
            program, costs = self._program, self._costs()
            self._program = b""  # frees the program, which may hold large constants
            name = f"plain_{self._fingerprint(program, costs)}.json"
            found = _stored(name)
            # For deviceless targets XLA tunes nothing, so scheduling with the step's own options is as fast. On GPUs,
            # tuning would take long, so memory and time are those with cuBLAS for all products.
            tuned = not deviceless.are_attached(jax_compat.devices(self._lowered))
            if found is None and (module := self._scheduled(program, tuned)) is not None:
                scheduled = HloModule.from_bytes(module)
                found = memory_need.of_module(scheduled), of_scheduled(scheduled, costs)
                cache_notes.write(name, json.dumps([dataclasses.asdict(one) for one in found]))
            return found
        finally:
            self.seconds = time.perf_counter() - start

    def _scheduled(self, program: bytes, tuned: bool) -> bytes | None:
        return scheduled_only.scheduled(self._lowered, program, "plain", tuned=tuned)

    def _fingerprint(self, program: bytes, costs: Costs) -> str:
        """A fingerprint of the program, of XLA's options, and of everything that determines costs."""
        measured = None if costs.estimator is None else (costs.estimator.profile, costs.estimator.section.setting)
        options = {name: str(value) for name, value in self._options.items()}
        given = {"flags": os.environ.get("XLA_FLAGS", ""), "options": options, "hardware": costs.hardware}
        return fingerprint.input_fingerprint((), program, {**given, "measured": measured})


def memory_limit(step: str, options: StepOptions, plain: PlainStep | None) -> int | None:
    """Returns the bytes that a step may need on each GPU; None if there is no limit.

    The limit is the user's `memory_limit`, if it is given. Otherwise it is the plain step's memory plus a slack
    (`MemoryNeed.allowed`). For a plan, this default is at least the limit with which the plan was made. There is no
    default limit for some schedules (`StepOptions.limited`), for user-defined passes, and if the plain step's memory is
    unknown. On devices other than GPUs, there is never a limit.

    Args:
      step: name of the step, for the log.
      options: options of the step.
      plain: the plain step; None on devices other than GPUs.
    """
    if plain is None:
        if options.memory_limit is not None:
            line = "memory_limit= has no effect on these devices, because operators are ordered only on GPUs"
            say_once(f"{step}: {line}", (step, line))
        return None
    if options.memory_limit is not None or not options.limited or plain.known is None:
        return options.most_bytes
    planned = 0 if options.plan is None else options.loaded_plan.order.memory_limit
    return max(plain.known[0].allowed(), planned)


def of_scheduled(module: HloModule, costs: Costs) -> StepParts:
    """Predicts the parts of a scheduled step's time. The result also has the step's memory, from live ranges."""
    need = memory_need.of_module(module)
    return step_parts(module, costs, need.total)


def _stored(name: str) -> tuple[MemoryNeed, StepParts] | None:
    try:
        text = cache_notes.read(name)
        if text is None:
            return None
        return msgspec.json.decode(text, type=tuple[MemoryNeed, StepParts])
    except (OSError, ValueError, RecursionError, DhelixError) as error:
        logging.vlog(1, "cannot use %s: %s", name, error)
        return None
