"""The ways to run a step that are compared, from a step that hides nothing to two strands.

    SYSTEMS["wavelet"].words

`blocking` and `xla` run the plain step as XLA orders it. `megatron` orders it anew. The others have passes of their own
(`launch/simulate/programs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dhelix.errors import DhelixError
from dhelix.passes.framework.gain import StepParts


@dataclass(frozen=True)
class System:
    """A way to run a step.

    Attributes:
      words: what it does, for tables.
      plain: whether it compiles the plain step.
    """

    name: str
    words: str
    plain: bool = False


_ALL = (
    System("blocking", "compute waits for every collective", plain=True),
    System("megatron", "weight gradients beside reductions of their layer; else compute waits"),
    System("xla", "XLA's scheduler", plain=True),
    System("intra-batch", "one strand, reordered, and matrix products in parts"),
    System("wavelet", "two strands, operators in turn"),
    System("strands", "two strands, operators paired by cost"),
)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
"""By name, the slowest first as a rule."""


def chosen(names: list[str]) -> list[System]:
    """The systems with these names, in the order of SYSTEMS. Raises DhelixError if one is unknown."""
    for name in names:
        if name not in SYSTEMS:
            raise DhelixError(f"system {name!r} is unknown; choose from {', '.join(SYSTEMS)}")
    return [system for system in _ALL if system.name in names]


def blocking(parts: StepParts, peers: float) -> StepParts:
    """The parts of a step if compute waits for each of its collectives. Nothing overlaps, so nothing slows down.

    Args:
      parts: those of the same program in any order.
      peers: seconds in which its collectives wait for their last GPU.
    """
    return replace(parts, exposed=parts.sent + peers, slow_down=0.0, guessed_overlap=0.0, exposed_by=())
