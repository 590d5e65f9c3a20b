"""Accumulation across calls: recognizes it, and says what to change for each known trainer.

A step interleaves micro-batches that one call holds. Some trainers call the step once for each micro-batch, and keep
the sum of gradients in the optimizer's state. Then no program holds two micro-batches.

    explained("[...] does not take gradients in a loop over micro-batches: give microbatches= [...]", program)
    # "[...] does not take gradients in a loop over micro-batches; Keras: leave gradient_accumulation_steps out, [...]"

JAX writes the files and functions of Python that made an operation into a program. So the program itself says whose
step it is. What else the process has imported does not matter.
"""

from __future__ import annotations

NO_LOOP = "does not take gradients in a loop over micro-batches"
_MULTI_STEPS = ("MultiSteps.", "mini_step")
"""Methods of optax.MultiSteps, and a field of its state. A Flax NNX optimizer shows only methods."""

_TRAINERS = (
    ("MaxText", ("maxtext/", "MaxText/"), "set gradient_accumulation_steps to 2 or more, so that it "
     "loops in its step"),
    ("Levanter", ("levanter/",), "set trainer.per_device_parallelism below the batch of a device, so that it loops "
     "in its step"),
    ("Tunix", ("tunix/sft/peft_trainer.py",), "leave gradient_accumulation_steps out, give train() whole batches, and "
     "override create_train_step_fn with a loop over micro-batches, as docs/guide/run.md shows"),
    ("Keras", ("keras/src/backend/jax/trainer.py",), "leave gradient_accumulation_steps out, give fit() whole "
     "batches, and override train_step with a loop over micro-batches, as docs/guide/run.md shows"),
)  # fmt: skip
_ANY = "give all micro-batches of an optimizer step to one call, and loop over them in it (lax.scan)"


def explained(why: str, program: str) -> str:
    """Why a program is left alone, with advice for a step without a loop over micro-batches.

    Args:
      why: the reason of a pass, whose advice is for decorated steps.
      program: the program's text, with locations.
    """
    before, found, _ = why.partition(NO_LOOP)
    return f"{before}{found}; {_advice(program)}" if found else why


def _advice(program: str) -> str:
    """One sentence on what to change."""
    for name, places, what in _TRAINERS:
        if any(place in program for place in places):
            return f"{name}: {what}"
    if any(place in program for place in _MULTI_STEPS):
        return f"optax.MultiSteps accumulates gradients across calls: leave it out, and {_ANY}"
    return _ANY
