"""What a simulation says of one step: its time, in parts; its memory; what it computes in a second.

step = SimulatedStep("strands", parts, memory, Work(tokens, flops, gpus=64, peak=989e12), limit=80e9)
step.mfu, step.tokens_per_second, step.hidden, step.missing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.framework.gain import StepParts
from dhelix.passes.framework.units import milliseconds


@dataclass(frozen=True)
class Work:
    """What one step of a model computes.

    Attributes:
      tokens: number of tokens of a step, on all GPUs.
      flops: floating-point operations of the model for these tokens, without recomputation. Causal attention counts in
        full.
      gpus: number of GPUs.
      peak: dense bf16 operations per second of one GPU.
    """

    tokens: int
    flops: float
    gpus: int
    peak: float


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step.

    Attributes:
      system: name of the way to run it (`systems.SYSTEMS`).
      parts: where its time goes.
      memory: bytes that it needs on a GPU, by the compiler's count.
      work: what it computes.
      limit: bytes of memory of a GPU.
      notes: what the user should know, one sentence each.
    """

    system: str
    parts: StepParts
    memory: int
    work: Work
    limit: float
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.parts.seconds

    @property
    def mfu(self) -> float:
        """Fraction of the GPUs' peak that the model's operations reach."""
        return self.work.flops / (self.work.gpus * self.work.peak * self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens in a second on each GPU."""
        return self.work.tokens / self.work.gpus / self.seconds

    @property
    def hidden(self) -> float:
        """Fraction of the communication's time alone that does not lengthen the step.

        Slow-down of compute lengthens it, and so do waits for the last GPU of a collective. So it may be below 0.
        """
        cost = self.parts.exposed + self.parts.slow_down
        return 1.0 - cost / self.parts.sent if self.parts.sent else 0.0

    @property
    def missing(self) -> float:
        """Bytes that a GPU lacks; 0 if the step fits."""
        return max(0.0, self.memory - self.limit)

    @property
    def waits(self) -> str:
        """The collectives that compute waits for longest, in words; "" if there are none."""
        return ", ".join(f"{words} {milliseconds(time)}" for words, time in self.parts.exposed_by if time > 0.0)

    @property
    def certainty(self) -> str:
        """How much of the time is guessed, in a sentence."""
        parts = self.parts
        guessed = f"{parts.guessed:.0%} of the times of kernels and collectives are guesses"
        if not parts.guessed:
            guessed = "All times of kernels and collectives are measured or interpolated"
        return guessed + (f", and {parts.guessed_overlap:.0%} of the overlap." if parts.guessed_overlap else ".")

    def to_json(self) -> dict[str, Any]:
        """All values as JSON, in seconds and bytes."""
        parts = self.parts
        return {
            "system": self.system,
            "seconds": self.seconds,
            "mfu": self.mfu,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "parts": {
                "kernels": parts.compute,
                "copies": parts.copies,
                "lower_clock": parts.clock,
                "slow_down": parts.slow_down,
                "exposed": parts.exposed,
                "pauses": parts.idle,
            },
            "communication": parts.sent,
            "hidden": self.hidden,
            "exposed_by": [{"collective": words, "seconds": seconds} for words, seconds in parts.exposed_by],
            "memory": self.memory,
            "missing_memory": self.missing,
            "guessed": parts.guessed,
            "guessed_overlap": parts.guessed_overlap,
            "notes": list(self.notes),
        }


def fastest(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    """The fastest step that fits; the fastest of all if none fits. `blocking` is for comparison, so it comes last."""
    return min(steps, key=lambda step: (step.system == "blocking", step.missing > 0, step.seconds))


def gains(steps: Sequence[SimulatedStep]) -> str:
    """How much faster the fastest step is than each other one, in words: "1.03 x as fast as xla"."""
    best = fastest(steps)
    return ", ".join(f"{one.seconds / best.seconds:.2f} x as fast as {one.system}" for one in steps if one is not best)
