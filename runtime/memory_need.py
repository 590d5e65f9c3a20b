"""What a step needs on one GPU, known before it is compiled, or said by the compiler.

    plain = memory_need.as_scheduled(lowered)      # the plain step: None where that cannot be known
    limit = plain.allowed()                        # bytes beside the arguments: 3 % more than it needs altogether
    memory_need.of_compiled(compiled).beside       # of the interleaved step, to be compared with that

    lowered --> XLA: partitioner, fusion, schedule --| here it is broken off |--> tuned kernels, code

The promise is that interleaving takes no more than 3 % of the plain step's memory (DHelix section 6), and what the
plain step takes is XLA's to say. To compile all of it would cost as much again as the step itself. Its schedule
is enough: what lives at once in that order is within 1 % of what XLA allocates (8.33 GiB for 8.34; unrolled layers
8.47 for 8.52), and breaking off there takes a tenth of the time (0.6 s for 5 s, 2.0 s for 6 s with 8 unrolled layers,
where nothing is tuned; on GPUs tuning makes the difference larger).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import jax
from absl import logging

from dhelix.errors import DhelixError
from dhelix.passes import fingerprint
from dhelix.passes.buffers import Memory
from dhelix.passes.hlo import HloModule, shapes
from dhelix.passes.manager import Stage
from dhelix.runtime import deviceless, lowering, registration

SLACK = 0.03
"""Of the plain step's memory, that a step may need more (DHelix section 6)."""

_lock = threading.Lock()  # hooks of the compiler have names


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one GPU: of the arguments, and beside them: temporaries, and results that take over no argument."""

    arguments: int
    beside: int

    def allowed(self, slack: float = SLACK) -> int:
        """Bytes beside the arguments, if altogether it may be `slack` more than this."""
        return int((1.0 + slack) * (self.arguments + self.beside)) - self.arguments


class _BrokenOffError(Exception):
    """All that was asked for is known."""


def as_scheduled(lowered: jax.stages.Lowered) -> MemoryNeed | None:
    """What a program for GPUs needs in XLA's order, without compiling it to the end.

    None where XLA does not come to a schedule; whoever compiles the program hears why. Takes the time of XLA's passes.
    """
    if jax.config.jax_share_binary_between_hosts:  # the others would wait for what is broken off here
        return None
    source = lowering.hlo_bytes(lowered)
    name = f"{fingerprint.module_name(source)}_memory_{fingerprint.of_bytes(source)}"
    scheduled: list[bytes] = []

    def record(stage: Stage, module: bytes) -> None:
        if stage is Stage.POST_SCHEDULER:
            scheduled.append(module)
            raise _BrokenOffError

    try:
        renamed = lowering.with_hlo(lowered, source, name)
        with _lock, registration.temporary_hook(record, name):
            renamed.compile(dict(deviceless.COMPILER_OPTIONS))
    except (jax.errors.JaxRuntimeError, DhelixError) as error:
        if not scheduled:
            logging.vlog(1, "the memory of %s is not known: %s", name, error)
    return of_module(HloModule.from_bytes(scheduled[-1])) if scheduled else None


def of_module(module: HloModule) -> MemoryNeed:
    """By live ranges in the order of a schedule; gaps between buffers are left out."""
    arguments = sum(shapes.byte_size(p.shape) for p in module.entry.parameters)
    return MemoryNeed(arguments, Memory(module).peak(module.entry, module.schedule[module.entry]))


def of_compiled(compiled: jax.stages.Compiled) -> MemoryNeed:
    """As XLA allocates it on a GPU."""
    found = compiled.memory_analysis()
    assert found is not None  # GPU executables say it
    beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return MemoryNeed(found.argument_size_in_bytes, beside)
