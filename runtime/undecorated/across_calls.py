"""Accumulation across calls: recognizes it, and says what to change for each known trainer.

A step interleaves micro-batches that one call holds. Some trainers call the step once for each micro-batch, and keep
the sum of gradients in the optimizer's state. Then no program holds two micro-batches.
"""

from __future__ import annotations

from collections.abc import Container

_MULTI_STEPS = b"mini_step"
"""The name of a field of optax.MultiSteps' state, which is in a program's names of arguments."""

_TRAINERS = (
    ("MaxText", ("MaxText", "maxtext"), "set gradient_accumulation_steps to 2 or more: MaxText then loops in its step"),
    ("Levanter", ("levanter",), "set trainer.per_device_parallelism below the batch of a device: it then loops in its "
     "step"),
    ("Tunix", ("tunix",), "it accumulates across calls; leave gradient_accumulation_steps out, and loop over "
     "micro-batches in the step"),
    ("Keras", ("keras",), "it accumulates across calls; leave gradient_accumulation_steps out, and loop over "
     "micro-batches in an own train_step (lax.scan)"),
)  # fmt: skip
_ANY = "give all micro-batches of an optimizer step to one call, and loop over them in it (lax.scan)"


def advice(program: bytes, modules: Container[str]) -> str:
    """One sentence on what to change, for a program with gradients but without a loop over micro-batches.

    Args:
      program: the program's bytecode.
      modules: the modules that the process has imported.
    """
    trainer = next(((name, what) for name, packages, what in _TRAINERS if any(p in modules for p in packages)), None)
    if trainer is not None:
        return f"{trainer[0]}: {trainer[1]}"
    return f"gradients are accumulated across calls by optax.MultiSteps: {_ANY}" if _MULTI_STEPS in program else _ANY
