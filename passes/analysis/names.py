"""Names of loops, and names that JAX and the strand passes write into name stacks (shown by profiles and dumps).

Two strands, alpha and beta, are passes of two micro-batches that run interleaved in the same loop iteration. Mostly,
alpha is a backward pass, and beta is the forward pass of the next micro-batch.
"""

import re
from collections.abc import Iterable

from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW

BACKWARD_NAME = "transpose("  # JAX writes it into the name stacks of operations that reverse-mode differentiation makes
ALPHA, BETA = "strand_alpha", "strand_beta"
STRANDS = "strands"  # a loop over micro-batches with two strands
LAYERS = "strand_layers"  # a merged loop over layers
INSIDE = "inside: "  # begins the text of a merged loop that is in another one, such as a ring in a layer
REPLICAS = "sum_over_replicas"  # a sum of parts on different devices
FIRST, LAST = "first_layers", "last_layers"  # loops over the first and the other layers (`strand_skew`), forward
FIRST_BACK, LAST_BACK = "back_first_layers", "back_last_layers"  # the same, backward
TRIPS = "expected_trips_"  # before the number of iterations that a loop is expected to run, if they depend on data
SKEWED = (FIRST, LAST, FIRST_BACK, LAST_BACK)
_TRIPS = re.compile(rf"(?:^|/){TRIPS}(\d+)/while$")


def trips_name(trips: int) -> str:
    """A name for `jax.named_scope` around a loop that runs about `trips` iterations."""
    return f"{TRIPS}{trips}"


def expected_trips(loop: Instruction) -> int | None:
    """The number of iterations that the program's author expects of a loop; None if its name does not say it."""
    said = _TRIPS.search(loop.op_name)
    return int(said[1]) if said else None


def strand_loops(module: HloModule) -> list[Instruction]:
    """Loops over micro-batches with two strands."""
    every = (i for computation in module.computations for i in computation.instructions)
    return [i for i in every if i.opcode == "while" and i.name.startswith(f"{STRANDS}.")]


def merged_loops(computation: Computation) -> list[Instruction]:
    """Loops of `computation` that hold layers of both strands."""
    return [i for i in computation.instructions if i.opcode == "while" and i.name.startswith(LAYERS)]


def name_strand(strand: str, instructions: Iterable[Instruction]) -> None:
    """Puts `strand` (`ALPHA` or `BETA`) in front of the name stacks of `instructions`.

    Also renames the instructions in callees of loops, calls and conditionals.
    """
    for instruction in instructions:
        if instruction.op_name:
            instruction.proto.metadata.op_name = f"{strand}/{instruction.op_name}"
        if instruction.opcode in CONTROL_FLOW:
            for called in instruction.called:
                name_strand(strand, called.instructions)
