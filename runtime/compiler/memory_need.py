"""Finds how much memory a step needs on one GPU: an estimate before compilation, or the compiler's own number.

    plain = memory_need.of_module(scheduled)       # the plain step, as XLA schedules it (`step/plain_step.py`)
    limit = plain.allowed()                        # 2.5 % more than the plain step needs, arguments included
    memory_need.of_compiled(compiled).total        # of the interleaved step, to compare with the limit

The plain step is the step without passes. The interleaved step, which the passes make, may take at most 3 % more memory
than the plain step (DHelix section 6, arXiv 2411.15871). Only a compilation of the plain step tells exactly how much
memory it takes, and this would double the compile time. The plain step's schedule is enough for an estimate
(`runtime/compiler/scheduled_only.py`): the peak by live ranges is within 1 % of XLA's allocation. Half a percentage
point of the 3 % is reserved for this difference. With attached GPUs the schedule assumes cuBLAS for all products. If
XLA's autotuner chooses other kernels, the plain step may need less than the estimate, and the limit is too high.

The 3 % protect steps that fill a GPU. If no interleaved step keeps to them, but one fits into half of the GPU, this one
runs (`room`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import MEMORY_SLACK
from dhelix.profiles.hardware import Hardware

SLACK = MEMORY_SLACK - 0.005
"""Fraction by which a step may exceed the plain step's memory by live ranges.

The rest of the 3 % is reserved for gaps between buffers, which live ranges do not show.
"""

SHARE_OF_PROCESS = 0.75
"""Fraction of a GPU's memory that JAX reserves by default."""

_ROOM = 0.667
"""Fraction of a process's memory that one step may need. The rest is for what else the process keeps."""


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a step needs on one GPU.

    Attributes:
      arguments: bytes of the arguments.
      beside: bytes of temporaries, and of results that do not reuse the memory of a donated argument.
    """

    arguments: int
    beside: int

    @property
    def total(self) -> int:
        return self.arguments + self.beside

    def allowed(self, slack: float = SLACK) -> int:
        """The bytes that another step may need in total: (1 + `slack`) times the total of this step."""
        return int((1.0 + slack) * self.total)


def room(hardware: Hardware) -> int:
    """The bytes that a step may need without harm, whatever the plain step needs: about half of a GPU's memory.

    On attached GPUs, the share of a process counts (`XLA_PYTHON_CLIENT_MEM_FRACTION`, by default three quarters).
    """
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    mine = (stats or {}).get("bytes_limit", SHARE_OF_PROCESS * hardware.memory_bytes)
    return int(_ROOM * min(mine, hardware.memory_bytes))


def of_module(module: HloModule) -> MemoryNeed:
    """The memory of a scheduled module by live ranges, without gaps between buffers."""
    memory = Memory(module)
    return MemoryNeed(memory.arguments, memory.peak(module.entry, module.schedule[module.entry]))


def of_compiled(compiled: jax.stages.Compiled) -> MemoryNeed:
    """The memory that XLA allocates for a compiled step on one GPU."""
    found = compiled.memory_analysis()
    assert found is not None  # GPU executables always report their memory
    beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return MemoryNeed(found.argument_size_in_bytes, beside)
