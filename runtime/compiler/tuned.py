"""Compiles programs for GPUs that this machine does not have, with the recorded autotuner results of those GPUs.

    compiled = tuned.compile(lowered)        # like deviceless.compile, but other fusions are tuned as on the GPU, too
    module = tuned.scheduled(lowered)        # the module after the POST_SCHEDULER passes; generates no code

For a step whose products were all tuned on the GPU, both functions return exactly the program that the GPU compiles.
The one exception: cuDNN attention has no workspace, because its plan needs the GPU (docs/design/compiler.md). Use this
module for programs whose operators are looked up among measured ones.

For a step with a product without recorded result, both functions return what `deviceless.compile` gives. If XLA looked
up all fusions of such a step, it would apply `untuned.pbtxt` to library calls and crash. A scheduling run finds out
whether a product is unknown, so the compiler hooks run twice.
"""

from __future__ import annotations

from typing import Any

import jax

from dhelix.runtime.compiler import deviceless, scheduled_only

_UNTUNED = b'"selected_algorithm":"-1"'  # marks a product without recorded result (untuned.pbtxt)


def compile(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """Compiles fully; `options` as for `deviceless.compile`."""
    return lowered.compile(_tuned_options(lowered, options)[0])


def scheduled(lowered: jax.stages.Lowered, **options: Any) -> bytes | None:
    """The module after the POST_SCHEDULER passes, serialized; None as for `scheduled_only.at_schedule`."""
    chosen, module = _tuned_options(lowered, options)
    if chosen.keys() >= deviceless.COMPILER_OPTIONS.keys():
        return module
    return scheduled_only.at_schedule(lowered, chosen)


def _tuned_options(lowered: jax.stages.Lowered, options: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """The compiler options, and the module that was scheduled to choose them."""
    untuned = {**deviceless.COMPILER_OPTIONS, **deviceless.results_option(), **options}
    module = scheduled_only.at_schedule(lowered, untuned)
    if module is None or _UNTUNED in module:
        return untuned, module
    return {**deviceless.results_option(), **options}, module
