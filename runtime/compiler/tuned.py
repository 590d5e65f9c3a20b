"""Programs for GPUs that need not exist, with all that is known of what XLA's autotuner chose on them.

    compiled = tuned.compile(lowered)        # as deviceless.compile, fusions beside products as on the card, too
    module = tuned.scheduled(lowered)        # what comes out of the passes at POST_SCHEDULER: no code is made

Of steps that were tuned on the card both give the card's program, instruction by instruction and in the same order;
only cuDNN attention has no workspace, because its plan needs the card (docs/design.md). For programs whose operators
are looked up among measured ones.

Of a step of which a product is not known they give what `deviceless.compile` gives: where XLA looks up all fusions, it
tries `untuned.pbtxt` on library calls, and crashes. Whether one is unknown, a schedule says (`scheduled_only`), so
hooks of the compiler run twice.
"""

from __future__ import annotations

from typing import Any

import jax

from dhelix.runtime.compiler import deviceless, scheduled_only

_UNTUNED = b'"selected_algorithm":"-1"'  # in the HLO of a product that none of the results was for, see untuned.pbtxt


def compile(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """To the end. `options` as of `deviceless.compile`."""
    return lowered.compile(_tuned_options(lowered, options)[0])


def scheduled(lowered: jax.stages.Lowered, **options: Any) -> bytes | None:
    """The module that passes at POST_SCHEDULER leave, serialized; None where XLA does not come to a schedule."""
    chosen, module = _tuned_options(lowered, options)
    if chosen.keys() >= deviceless.COMPILER_OPTIONS.keys():
        return module
    return scheduled_only.at_schedule(lowered, chosen)


def _tuned_options(lowered: jax.stages.Lowered, options: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """The compiler's options, and the module that was scheduled to know them."""
    untuned = {**deviceless.COMPILER_OPTIONS, **deviceless.results_option(), **options}
    module = scheduled_only.at_schedule(lowered, untuned)
    if module is None or _UNTUNED in module:
        return untuned, module
    return {**deviceless.results_option(), **options}, module
