"""Memory that a step needs on one GPU, estimated before compilation or reported by the compiler.

    plain = memory_need.of_module(scheduled)       # the plain step, as XLA schedules it (`step/plain_step.py`)
    limit = plain.allowed()                        # 2.5 % more than the plain step needs, arguments included
    memory_need.of_compiled(compiled).total        # of the interleaved step, to compare with the limit

Interleaving may take at most 3 % more memory than the plain step (DHelix section 6, arXiv 2411.15871). Only XLA knows
how much the plain step takes, and compiling it fully would cost as much again as compiling the step. The plain step's
schedule is enough (`runtime/compiler/scheduled_only.py`): its peak by live ranges is within 1 % of XLA's allocation.
Half a percentage point of the 3 % is reserved for that difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import MEMORY_SLACK

SLACK = MEMORY_SLACK - 0.005
"""Fraction by which a step may exceed the plain step's memory by live ranges. The rest of the 3 % is for gaps."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one GPU.

    Attributes:
      arguments: bytes of the arguments.
      beside: temporaries, and results that do not reuse a donated argument.
    """

    arguments: int
    beside: int

    @property
    def total(self) -> int:
        return self.arguments + self.beside

    def allowed(self, slack: float = SLACK) -> int:
        """Bytes that another step may need in total: those of this step, and a fraction `slack` more."""
        return int((1.0 + slack) * self.total)


def of_module(module: HloModule) -> MemoryNeed:
    """Memory of a scheduled module by live ranges, without gaps between buffers."""
    memory = Memory(module)
    return MemoryNeed(memory.arguments, memory.peak(module.entry, module.schedule[module.entry]))


def of_compiled(compiled: jax.stages.Compiled) -> MemoryNeed:
    """Memory as XLA allocates it on a GPU."""
    found = compiled.memory_analysis()
    assert found is not None  # GPU executables always report it
    beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return MemoryNeed(found.argument_size_in_bytes, beside)
