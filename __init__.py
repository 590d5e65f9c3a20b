"""dhelix: compiler passes for JAX/XLA that hide the communication of distributed LLM training.

    from dhelix import strand_interleave, value_and_grad

Names are loaded when they are first used: `dhelix --help` imports no JAX, and importing dhelix touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhelix.errors import DhelixError
    from dhelix.runtime.pipeline.fold import Fold
    from dhelix.runtime.step.strand_interleave import strand_interleave
    from dhelix.runtime.step.value_and_grad import value_and_grad

__all__ = ["DhelixError", "Fold", "strand_interleave", "value_and_grad"]

_HOMES = {
    "DhelixError": "dhelix.errors",
    "Fold": "dhelix.runtime.pipeline.fold",
    "strand_interleave": "dhelix.runtime.step.strand_interleave",
    "value_and_grad": "dhelix.runtime.step.value_and_grad",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dhelix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
