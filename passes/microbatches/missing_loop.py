"""Why a step has no loop over micro-batches that could become two strands, and what its writer can do about it.

    for x in microbatches:                      g0 = backward(w, x0)
        gradients += grad(loss)(w, x)    ->     g1 = backward(w, x1)      JAX writes a Python loop out, as does
                                                g2 = backward(w, x2)      lax.scan(..., unroll=True)

Written-out micro-batches are told by their backward passes: operations of one name, shape and kind, none of which
depends on another. Layers that are written out depend on each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.hlo import Computation, HloModule, Instruction, graph


def no_loop(module: HloModule) -> PassRefusal:
    """For a program in which no loop holds a backward pass."""
    if not any(_is_backward(i) for i in graph.walk(module.entry)):
        return PassRefusal(
            "the step holds no backward pass (nothing was made by reverse-mode differentiation); decorate the function "
            "that takes the gradients"
        )
    count = max(map(_written_out, {module.entry, *_called(module.entry)}))
    if count > 1:
        return PassRefusal(
            f"the step takes gradients {count} times over, one beside another: if these are micro-batches, a Python "
            "loop or unroll= has written out the loop over them; loop with lax.scan, without unroll=, or take "
            "gradients with dhelix.value_and_grad and give microbatches="
        )
    return PassRefusal(
        "the step has no loop over micro-batches that takes gradients: take and accumulate them in a loop inside the "
        "step (lax.scan, optax.microbatching; the gradient of a whole loop is none), or take them with "
        "dhelix.value_and_grad and give microbatches=; accumulation across calls, as optax.MultiSteps does, cannot be "
        "interleaved"
    )


def _is_backward(instruction: Instruction) -> bool:
    return BACKWARD_NAME in instruction.op_name


def _called(computation: Computation) -> Iterator[Computation]:
    return (called for i in graph.walk(computation, _runs_once) if _runs_once(i) for called in i.called)


def _runs_once(instruction: Instruction) -> bool:
    return instruction.opcode in ("call", "conditional")


def _written_out(computation: Computation) -> int:
    """How many equal backward passes, independent of each other, a computation holds. One sweep a kind of operation."""
    kinds: dict[Hashable, set[Instruction]] = {}
    for instruction in computation.instructions:
        if (kind := _kind(instruction)) is not None:
            kinds.setdefault(kind, set()).add(instruction)
    # Those of one layer are as many as micro-batches; gradients of several layers' weights may be independent, too.
    return min((len(_first(computation, members)) for members in kinds.values()), default=0)


def _kind(instruction: Instruction) -> Hashable | None:
    """Equal for what one line of a user's program became, each time that it ran; None for what carries no weight."""
    held = instruction.opcode == "call" and any(map(_is_backward, graph.walk(instruction.called[0])))
    if not held and not (instruction.opcode in ("dot", "while") and _is_backward(instruction)):
        return None
    proto = instruction.proto
    shape, numbers = (part.SerializeToString(deterministic=True) for part in (proto.shape, proto.dot_dimension_numbers))
    return instruction.opcode, instruction.op_name, shape, numbers


def _first(computation: Computation, members: set[Instruction]) -> set[Instruction]:
    """Those of `members` that depend on no other one."""
    behind: set[Instruction] = set()
    for instruction in computation.instructions:
        if any(operand in behind or operand in members for operand in instruction.operands):
            behind.add(instruction)
    return members - behind
