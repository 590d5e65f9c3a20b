"""The programs that `strategies.py` measures: a strategy for model states, a number of micro-batches, and who compiles.

This module does not import JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = "zero1, embedding zero3"
"""ZeRO-1, but XLA exchanges rows of the embedding in each micro-batch, and nobody gathers it."""
OURS, AT_ONCE, BASELINE, BASELINE_PGLE = "dhelix", "gathered at once", "XLA", "XLA, PGLE"
STRATEGIES = ("dp", "zero1", "zero2", "zero3")
MICROBATCHES = (1, 2, 4, 8)
SPREAD = (1, 4)
"""Numbers of micro-batches for which ZeRO-1 is also measured with other ways to gather parameters, and traced."""


@dataclass(frozen=True)
class Program:
    """One program. `strands/worker.py` calls it a variant.

    Attributes:
      microbatches: micro-batches of a step, on each GPU.
      strategy: how states are sharded: one of `STRATEGIES`, ROWS, or "fsdp", which is XLA's own sharding of parameters.
      by: who compiles: OURS, AT_ONCE (ours without parameter-gathering), BASELINE, or BASELINE_PGLE.
    """

    microbatches: int
    strategy: str
    by: str

    @property
    def name(self) -> str:
        return f"M {self.microbatches}, {self.strategy}, {self.by}"

    @property
    def kind(self) -> str:
        return "XLA" if self.by.startswith("XLA") else "ours"

    @property
    def guided(self) -> bool:
        return self.by == BASELINE_PGLE

    @property
    def traced(self) -> bool:
        """Whether the program is one of those whose ways to gather parameters are compared in traces."""
        return self.strategy in ("zero1", ROWS) and self.microbatches in SPREAD


def programs() -> dict[str, Program]:
    """All programs by name, those of one strategy together, because they share a state."""
    found = [Program(m, strategy, OURS) for strategy in STRATEGIES for m in MICROBATCHES]
    found += [Program(m, "zero1", AT_ONCE) for m in SPREAD] + [Program(m, ROWS, OURS) for m in SPREAD]
    found += [Program(m, "fsdp", by) for by in (BASELINE, BASELINE_PGLE) for m in MICROBATCHES]
    return {one.name: one for one in sorted(found, key=lambda one: one.strategy)}


PROGRAMS = programs()
