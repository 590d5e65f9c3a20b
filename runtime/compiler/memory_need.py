"""What a step needs on one GPU, known before it is compiled, or said by the compiler.

    plain = memory_need.of_module(scheduled)       # the plain step, as XLA schedules it (`step/plain_step.py`)
    limit = plain.allowed()                        # 2.5 % more than it needs, arguments and all
    memory_need.of_compiled(compiled).total        # of the interleaved step, to be compared with that

The promise is that interleaving takes no more than 3 % of the plain step's memory (DHelix section 6), and what the
plain step takes is XLA's to say. To compile all of it would cost as much again as the step itself. Its schedule
is enough (`runtime/compiler/scheduled_only.py`): what lives at once in that order is within 1 % of what XLA allocates
(8.33 GiB for 8.34; unrolled layers 8.47 for 8.52). For that, half a per cent of the 3 is kept back.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import MEMORY_SLACK

SLACK = MEMORY_SLACK - 0.005
"""Of the plain step's memory by live ranges, that a step may need more; the rest is lost in gaps."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one GPU: of the arguments, and beside them: temporaries, and results that take over no argument."""

    arguments: int
    beside: int

    @property
    def total(self) -> int:
        return self.arguments + self.beside

    def allowed(self, slack: float = SLACK) -> int:
        """Bytes altogether, if they may be `slack` more than this."""
        return int((1.0 + slack) * self.total)


def of_module(module: HloModule) -> MemoryNeed:
    """By live ranges in the order of a schedule; gaps between buffers are left out."""
    memory = Memory(module)
    return MemoryNeed(memory.arguments, memory.peak(module.entry, module.schedule[module.entry]))


def of_compiled(compiled: jax.stages.Compiled) -> MemoryNeed:
    """As XLA allocates it on a GPU."""
    found = compiled.memory_analysis()
    assert found is not None  # GPU executables say it
    beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return MemoryNeed(found.argument_size_in_bytes, beside)
