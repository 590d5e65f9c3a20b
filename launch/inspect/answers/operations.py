"""Where the compute time of a step goes: by category, and by operation with the line of the program that made it.

Times come from the caller: estimates, or executions in a trace. Floating-point operations and bytes come from the
program. They give two measures of how close an operation comes to what the GPU can do:

    TFLOP/s       its operations per second
    roofline      max(operations / peak, bytes / memory bandwidth) / its time: 100 % is the best that any kernel can do

MFU counts each operation of the model once. What a checkpoint computes again counts only in HFU (PaLM, appendix B).
Neither halves the operations of a causal attention that its kernel does not compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dhelix.launch.shown.instruction_words import Words, communicates
from dhelix.passes.analysis.source import source_of
from dhelix.passes.evaluation.custom_calls import calls_of, family_of
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.hlo import Instruction
from dhelix.passes.plans.plan_operators import RECOMPUTED
from dhelix.profiles.hardware import Hardware

PRODUCTS, ATTENTION, MOVES, UNKNOWN, OTHERS = (
    "matrix products",
    "attention",
    "copies and fills",
    "unknown custom calls",
    "other kernels",
)


@dataclass(frozen=True)
class Operation:
    """All instructions of a step that do the same for the same line of the program.

    Attributes:
      what: such as GEMM or attention, see `instruction_words.describe`.
      category: one of the five above.
      source: file, line and function; "" if the program does not say.
      example: name of one of the instructions, the one that takes the most time.
      instructions: number of instructions.
      executions: number of their executions in one step.
      ms: their time in one step.
      flops, bytes: of all executions.
      recomputed: whether a checkpoint computes this again.
      best_ms: the time by the roofline of the GPU; None if the GPU is unknown.
    """

    what: str
    category: str
    source: str
    example: str
    instructions: int
    executions: float
    ms: float
    flops: float
    bytes: float
    recomputed: bool
    best_ms: float | None

    @property
    def tflops(self) -> float:
        """Tera floating-point operations per second."""
        return self.flops / self.ms / 1e9 if self.ms else 0.0

    @property
    def roofline(self) -> float | None:
        return None if self.best_ms is None or not self.ms else self.best_ms / self.ms

    @property
    def bound(self) -> str:
        """What limits a perfect kernel."""
        return "arithmetic" if self.flops and self.category in (PRODUCTS, ATTENTION) else "memory"


@dataclass(frozen=True)
class Utilization:
    """Floating-point operations of one GPU in one step, as fractions of what the GPU can do in the step's time.

    Attributes:
      flops: all operations; `recomputed` are those that a checkpoint computes again.
      peak: operations per second of the GPU.
    """

    flops: float
    recomputed: float
    peak: float
    step_ms: float

    @property
    def mfu(self) -> float:
        return (self.flops - self.recomputed) / self._possible

    @property
    def hfu(self) -> float:
        return self.flops / self._possible

    @property
    def _possible(self) -> float:
        return self.peak * self.step_ms / 1e3 or 1.0


def operations(
    executed: Iterable[tuple[Instruction, float, float, Cost]], hardware: Hardware | None, words: Words
) -> tuple[Operation, ...]:
    """The operations that compute, longest first.

    Args:
      executed: each instruction, its executions in one step, their milliseconds together, and its cost. The cost of
        one execution gives its operations and bytes.
      hardware: the GPU; None if it is unknown.
      words: what the instructions do.
    """
    found: dict[tuple[str, str, str, bool], Operation] = {}
    longest: dict[tuple[str, str, str, bool], float] = {}
    for instruction, count, ms, cost in executed:
        if not ms or communicates(instruction) is not None:
            continue
        category, what, source = category_of(instruction, words), words[instruction], source_of(instruction)
        recomputed = RECOMPUTED in instruction.op_name
        key = category, what, source, recomputed
        old = found.get(key) or Operation(
            what, category, source, "", 0, 0.0, 0.0, 0.0, 0.0, recomputed, None if hardware is None else 0.0
        )
        if ms > longest.get(key, 0.0):
            longest[key] = ms
            old = replace(old, example=instruction.name)
        best = old.best_ms
        if hardware is not None and best is not None:
            best += 1e3 * count * max(cost.flops / hardware.peak_flops, cost.bytes / hardware.memory_bandwidth)
        found[key] = replace(
            old,
            instructions=old.instructions + 1,
            executions=old.executions + count,
            ms=old.ms + ms,
            flops=old.flops + count * cost.flops,
            bytes=old.bytes + count * cost.bytes,
            best_ms=best,
        )
    return tuple(sorted(found.values(), key=lambda o: (-o.ms, o.what, o.source, o.recomputed)))


def categories(found: Iterable[Operation]) -> dict[str, Operation]:
    """The operations of each category together, longest category first."""
    sums: dict[str, Operation] = {}
    for one in found:
        old = sums.get(one.category)
        if old is None:
            sums[one.category] = replace(one, what=one.category, source="", recomputed=False)
            continue
        sums[one.category] = replace(
            old,
            instructions=old.instructions + one.instructions,
            executions=old.executions + one.executions,
            ms=old.ms + one.ms,
            flops=old.flops + one.flops,
            bytes=old.bytes + one.bytes,
            best_ms=None if old.best_ms is None or one.best_ms is None else old.best_ms + one.best_ms,
        )
    return dict(sorted(sums.items(), key=lambda item: (-item[1].ms, item[0])))


def utilization(found: Iterable[Operation], hardware: Hardware, step_ms: float) -> Utilization:
    """How well the step uses the GPU's arithmetic."""
    every = list(found)
    recomputed = sum(one.flops for one in every if one.recomputed)
    return Utilization(sum(one.flops for one in every), recomputed, hardware.peak_flops, step_ms)


def category_of(instruction: Instruction, words: Words) -> str:
    """The category of an instruction that computes."""
    word = words[instruction]
    if word == "GEMM":
        return PRODUCTS
    if word == "attention":
        return ATTENTION
    if word in ("copy", "fill"):
        return MOVES
    if any(family_of(call).work == "unknown" for call in calls_of(instruction)):
        return UNKNOWN
    return OTHERS
