"""The scheduled program that XLA makes, without compiling it to the end.

    lowered --> XLA: partitioner, fusion, schedule --| stopped here |--> tuned kernels, code

Stopping there takes about a tenth of a full compilation if nothing is tuned. Matrix products that tuning would give to
Triton are then cuBLAS's. With `tuned=True` products are tuned as in a full compilation. On GPUs this takes as long as
the tuning, but a later compilation of the same products finds them tuned.
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

# A lock, because two threads may schedule the same program, and each must receive its own module. Two locks, because
# passes that run inside `at_schedule` may call `scheduled`.
_lock, _at_schedule_lock = threading.Lock(), threading.Lock()


class _BrokenOffError(Exception):
    """Stops a compilation once the scheduled module is recorded."""


def scheduled(
    lowered: jax.stages.Lowered,
    source: bytes,
    purpose: str,
    before: Callable[[bytes], bytes | None] = lambda module: None,
    tuned: bool = False,
) -> bytes | None:
    """The scheduled module that XLA makes of `source`, serialized. Takes the time of XLA's passes.

    Returns None if XLA fails before it has a schedule; the error is not raised, since compiling the program raises it
    too. Also returns None if hosts share binaries (`jax_share_binary_between_hosts`).

    Args:
      lowered: the program that `source` comes from.
      source: a serialized module.
      purpose: a word for the module's name.
      before: called with the module at PRE_SCHEDULER; returns the changed module, or None to leave it unchanged.
      tuned: tune products as a full compilation does.
    """
    if jax.config.jax_share_binary_between_hosts:  # other hosts would wait for the binary that is never made
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
            logging.vlog(1, "the schedule of %s is unknown: %s", name, error)
    return found[-1] if found else None


def at_schedule(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> bytes | None:
    """The module after the POST_SCHEDULER passes, serialized, when `lowered` is compiled with these options.

    Returns None if hosts share binaries (`jax_share_binary_between_hosts`). Raises what the compiler and the passes
    raise.
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
