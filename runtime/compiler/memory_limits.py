"""What is known and said about the memory of a step that exceeds its limit.

    gaps, need = gaps_and_need(needed, module, stages)     # of a compiled step and the report of its passes
    exceeded(limit, would_do, given=False)                 # "two strands need more than 23.6 GiB, ..."

`Specialization` decides with them: another limit, or the plain step.
"""

from __future__ import annotations

from collections.abc import Iterable

from dhelix.passes.framework.report import StageReport
from dhelix.passes.framework.units import bytes_option, bytes_text
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import MEMORY_SLACK
from dhelix.runtime.compiler import memory_need


def gaps_and_need(needed: int, module: HloModule, stages: Iterable[StageReport]) -> tuple[int, int]:
    """The bytes that the compiler loses in gaps between buffers, and those that a pass reported as needed.

    The second number is 0 if no pass refused because of the limit. A step then needs that number and the gaps, which
    may be less than the compiled program needs.

    Args:
      needed: bytes that the compiled step needs.
      module: the compiled step.
      stages: reports of its passes.
    """
    notes = (note for stage in stages for entry in stage.passes for note in entry.notes)
    said = max((note.facts["needed"] for note in notes if "needed" in note.facts), default=0)
    return max(needed - memory_need.of_module(module).total, 0), said


def exceeded(limit: int, would_do: int, given: bool) -> str:
    """Why two strands do not run.

    Args:
      limit: bytes that they may need.
      would_do: the smallest sufficient limit.
      given: whether the user gave the limit.
    """
    why = "" if given else f" (the plain step's memory plus {MEMORY_SLACK:.0%})"
    return (
        f"two strands need more than {bytes_text(limit)}, arguments included{why}; the smallest sufficient limit "
        f"is memory_limit={bytes_option(would_do)!r}"
    )


def exceeded_by_plain(plain: int, limit: int) -> str:
    """What is said besides if the plain step exceeds the limit, too. Only a limit of the user can be so small."""
    if plain <= limit:
        return ""
    return f"; the plain step, which runs, needs more than the limit, too: {bytes_text(plain)}"


def more(needed: int, limit: int) -> str:
    """What is said of two strands that need more than the usual limit, for which the GPUs have room."""
    return (
        f"two strands need {bytes_text(needed)}, more than {bytes_text(limit)} (the plain step's memory plus "
        f"{MEMORY_SLACK:.0%}); the GPU has room for them (memory_limit= sets another limit)"
    )
