"""Runs XLA only until it has scheduled a program, and returns the scheduled module.

    lowered --> XLA: partitioner, fusion, schedule --| stopped here |--> tuned kernels, code

Without autotuning, this takes about a tenth of the time of a full compilation. Then matrix products for which tuning
would choose Triton use cuBLAS. With `tuned=True`, XLA tunes products as in a full compilation. On GPUs, this takes as
long as the tuning, but a later compilation of the same products finds them tuned.
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
from dhelix.runtime.compiler import autotune_results, deviceless, lowering, registration

# The locks exist because two threads may schedule the same program, and each must receive its own module. There are two
# locks because passes that run inside `at_schedule` may call `scheduled`.
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
    """Returns the serialized scheduled module that XLA makes from `source`.

    Returns None if XLA fails before it has a schedule. The function does not raise XLA's error, because a compilation
    of the program raises it anyway. It also returns None if hosts share binaries (`jax_share_binary_between_hosts`).

    Args:
      lowered: the program that `source` comes from.
      source: a serialized module.
      purpose: a word that becomes part of the module's name.
      before: function that is called with the module at the stage PRE_SCHEDULER. It returns the changed module, or None
        to leave the module unchanged.
      tuned: whether products are tuned as in a full compilation.
    """
    if jax.config.jax_share_binary_between_hosts:  # other hosts would wait for a binary that is never made
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
    """Compiles `lowered` with these options until the POST_SCHEDULER passes have run. Returns the serialized module.

    Returns None if hosts share binaries (`jax_share_binary_between_hosts`). Errors of the compiler and the passes are
    raised.
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
        with _at_schedule_lock, registration.temporary_hook(record, name), autotune_results.blaming():
            lowered.compile(dict(options))
    except jax.errors.JaxRuntimeError:
        if not found:
            raise
    return found[-1]
