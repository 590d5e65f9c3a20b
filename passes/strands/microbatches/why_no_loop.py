"""Reports why a step has no loop over micro-batches that could become two strands, and what its author can do about it.

This module does not handle unrolled micro-batches. They become a loop, or `equal_parts` reports why they cannot.
"""

from __future__ import annotations

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Computation, HloModule, Instruction, graph
from dhelix.passes.strands.microbatches.written_out.anchors import is_backward, takes_gradients


def no_loop(module: HloModule) -> PassRefusal:
    """The refusal for a program that has neither a loop with a backward pass nor several independent backward passes.

    Calls in the program must be inlined.
    """
    if not any(is_backward(i) for i in graph.walk(module.entry)):
        return PassRefusal(
            "the step has no backward pass (no reverse-mode differentiation); decorate the function that takes the "
            "gradients"
        )
    again = next(filter(None, map(_gradient_of_gradients, graph.run_once(module.entry))), None)
    if again is not None:
        return PassRefusal(
            "the step takes gradients at values that depend on other gradients (several optimizer steps, or gradients "
            "of gradients), and micro-batches must not; decorate a function that takes one optimizer step, and loop "
            "over micro-batches in it",
            again,
        )
    return PassRefusal(
        "the step does not take gradients in a loop over micro-batches: give microbatches= of 2 or more and call "
        "dhelix.value_and_grad, or accumulate gradients in your own loop inside the step (lax.scan or Python)"
    )


def _gradient_of_gradients(computation: Computation) -> Instruction | None:
    """The first product or loop of a backward pass whose forward pass reads results of another backward pass.

    None if there is no such backward pass.
    """
    first = graph.descendants(computation, filter(takes_gradients, computation.instructions))
    again = [i for i in computation.instructions if "jvp(" in i.op_name and not is_backward(i)]
    behind = graph.descendants(computation, [i for i in again if not first.isdisjoint(i.operands)])
    return next((i for i in computation.instructions if takes_gradients(i) and i in behind), None)
