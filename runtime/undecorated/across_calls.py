"""Accumulation across calls: recognizes it, and says what to change for each known trainer.

A step interleaves micro-batches that one call holds. Some trainers call the step once for each micro-batch, and keep
the sum of gradients in the optimizer's state. Then no program holds two micro-batches.
"""

from __future__ import annotations

from collections.abc import Container

_MARKS = (
    (b"mini_step", "optax.MultiSteps"),
    (b"gradient_accumulator", "the optimizer's gradient_accumulation_steps (Keras)"),
    (b"grad_accum", "the trainer"),
)
"""Names of the states that hold sums of gradients, in a program's names of arguments."""

_TRAINERS = (
    ("MaxText", ("MaxText", "maxtext"), "set gradient_accumulation_steps to 2 or more: MaxText then loops in its step"),
    ("Levanter", ("levanter",), "set trainer.per_device_parallelism below the batch of a device: it then loops in its "
     "step"),
    ("Tunix", ("tunix",), "leave gradient_accumulation_steps out, give the whole batch, and take its gradients by "
     "dhelix.value_and_grad(microbatches=...)"),
    ("Keras", ("keras",), "leave gradient_accumulation_steps out, and override train_step with a lax.scan over "
     "micro-batches"),
)  # fmt: skip
_ANY = "give all micro-batches of an optimizer step to one call, and loop over them in it (lax.scan)"


def accumulator(program: bytes) -> str:
    """What accumulates gradients across calls, by the names of a program's arguments; "" if nothing does."""
    return next((words for mark, words in _MARKS if mark in program), "")


def advice(program: bytes, modules: Container[str]) -> str:
    """One sentence on what to change, for a program with gradients but without a loop over micro-batches.

    Args:
      program: the program's bytecode.
      modules: the modules that the process has imported.
    """
    trainer = next(((name, what) for name, packages, what in _TRAINERS if any(p in modules for p in packages)), None)
    found = accumulator(program)
    if trainer is not None:
        return f"{trainer[0]}: {trainer[1]}"
    return f"gradients are accumulated across calls by {found}: {_ANY}" if found else _ANY
