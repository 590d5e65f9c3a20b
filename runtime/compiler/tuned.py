"""Compiles programs for GPUs that this machine does not have, with the recorded autotuner results of those GPUs.

    compiled = tuned.compile(lowered)        # like deviceless.compile, but other fusions are tuned as on the GPU, too
    module = tuned.scheduled(lowered)        # the module after the POST_SCHEDULER passes; generates no code

If the recorded results contain all products of a step, both functions give exactly the program that XLA compiles on the
GPU. There is one exception: cuDNN attention has no workspace, because its plan needs the GPU (docs/design/compiler.md).
Use this module for programs whose operators are looked up in a profile.

If the results lack a product, both functions use the choices of `deviceless.compile`. For such a step, XLA cannot look
up all fusions: it would apply `untuned.pbtxt` to library calls and crash. To find out whether a product is missing,
both functions first schedule the program, so the compiler hooks may run twice.
"""

from __future__ import annotations

from typing import Any

import jax

from dhelix.runtime.compiler import deviceless, scheduled_only

_UNTUNED = b'"selected_algorithm":"-1"'  # marks a product that has no recorded result (untuned.pbtxt)


def compile(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """Compiles `lowered` to an executable. `options` are the same as for `deviceless.compile`."""
    return lowered.compile(_tuned_options(lowered, options)[0])


def scheduled(lowered: jax.stages.Lowered, **options: Any) -> bytes | None:
    """Returns the serialized module after the POST_SCHEDULER passes.

    Returns None if `scheduled_only.at_schedule` returns None.
    """
    chosen, module = _tuned_options(lowered, options)
    if chosen.keys() >= deviceless.COMPILER_OPTIONS.keys():
        return module
    return scheduled_only.at_schedule(lowered, chosen)


def _tuned_options(lowered: jax.stages.Lowered, options: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """Returns the compiler options to use, and the serialized module of the scheduling run that decided them."""
    untuned = {**deviceless.COMPILER_OPTIONS, **deviceless.results_option(), **options}
    module = scheduled_only.at_schedule(lowered, untuned)
    if module is None or _UNTUNED in module:
        return untuned, module
    return {**deviceless.results_option(), **options}, module
