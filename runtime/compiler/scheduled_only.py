"""A program as XLA schedules it, without compiling it to the end.

    lowered --> XLA: partitioner, fusion, schedule --| here it is broken off |--> tuned kernels, code

Breaking off there takes a tenth of the time (0.6 s for 5 s, 2.0 s for 6 s with 8 unrolled layers), where nothing is
tuned: products that tuning would give to Triton are cuBLAS's there. `tuned=True` has them as a compilation to the end
would; on GPUs that takes as long as tuning does, and whoever compiles the same products later finds them tuned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from dhelix.errors import DhelixError
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.manager import Stage
from dhelix.runtime.compiler import deviceless, lowering, registration

# Two threads may ask about one program, and each module is for one of them. Passes of a program that is broken off by
# `at_schedule` may ask for a `scheduled` one.
_lock, _at_schedule_lock = threading.Lock(), threading.Lock()


class _BrokenOffError(Exception):
    """All that was asked for is known."""


def scheduled(
    lowered: jax.stages.Lowered,
    source: bytes,
    purpose: str,
    before: Callable[[bytes], bytes | None] = lambda module: None,
    tuned: bool = False,
) -> bytes | None:
    """The scheduled module that XLA makes of `source`, serialized; None where it does not come to a schedule, which
    whoever compiles the program hears of, too. Takes the time of XLA's passes.

    Args:
      lowered: what `source`, a serialized module, is lowered from.
      purpose: a word for the module's name.
      before: called with the module at PRE_SCHEDULER; returns what it becomes, or None to leave it.
      tuned: with the operators that a compilation to the end would have.
    """
    if jax.config.jax_share_binary_between_hosts:  # the others would wait for what is broken off here
        return None
    name = f"{fingerprint.unmark(fingerprint.module_name(source))}_{purpose}_{fingerprint.of_bytes(source)}"
    found: list[bytes] = []

    def record(stage: Stage, module: bytes) -> bytes | None:
        if stage is not Stage.POST_SCHEDULER:
            return before(module)
        found.append(module)
        raise _BrokenOffError

    try:
        renamed = lowering.with_hlo(lowered, source, name)
        with _lock, registration.temporary_hook(record, name):
            renamed.compile({} if tuned else dict(deviceless.COMPILER_OPTIONS))
    except (jax.errors.JaxRuntimeError, DhelixError) as error:
        if not found:
            logging.vlog(1, "the schedule of %s is not known: %s", name, error)
    return found[-1] if found else None


def at_schedule(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> bytes | None:
    """The module that passes at POST_SCHEDULER leave, serialized, where `lowered` is compiled so; None
    where several hosts would wait for it. Raises what the compiler and the passes raise.
    """
    if jax.config.jax_share_binary_between_hosts:
        return None
    name = lowering.module_name(lowered)
    found: list[bytes] = []

    def record(stage: Stage, module: bytes) -> None:
        if stage is Stage.POST_SCHEDULER:
            found.append(module)
            raise _BrokenOffError

    try:
        with _at_schedule_lock, registration.temporary_hook(record, name):
            lowered.compile(dict(options))
    except jax.errors.JaxRuntimeError:
        if not found:
            raise
    return found[-1]
