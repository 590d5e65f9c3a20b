"""Names of loops, and names that JAX and the strand passes write into name stacks (shown by profiles and dumps)."""

from collections.abc import Iterable

from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW

BACKWARD_NAME = "transpose("  # in JAX's name stack of operations that reverse-mode differentiation made
ALPHA, BETA = "strand_alpha", "strand_beta"
STRANDS = "strands"  # a loop over micro-batches with two strands
LAYERS = "strand_layers"  # a merged loop over layers
REPLICAS = "sum_over_replicas"  # a sum of parts on different devices
FIRST, LAST = "first_layers", "last_layers"  # forward loops of skewed strands
FIRST_BACK, LAST_BACK = "back_first_layers", "back_last_layers"
SKEWED = (FIRST, LAST, FIRST_BACK, LAST_BACK)


def strand_loops(module: HloModule) -> list[Instruction]:
    """Loops over micro-batches with two strands."""
    every = (i for computation in module.computations for i in computation.instructions)
    return [i for i in every if i.opcode == "while" and i.name.startswith(f"{STRANDS}.")]


def merged_loops(computation: Computation) -> list[Instruction]:
    """Loops of `computation` that hold layers of both strands."""
    return [i for i in computation.instructions if i.opcode == "while" and i.name.startswith(LAYERS)]


def name_strand(strand: str, instructions: Iterable[Instruction]) -> None:
    """Puts `strand` in front of the name stacks of `instructions`.

    The callees of loops, calls and conditionals among them are renamed, too.
    """
    for instruction in instructions:
        if instruction.op_name:
            instruction.proto.metadata.op_name = f"{strand}/{instruction.op_name}"
        if instruction.opcode in CONTROL_FLOW:
            for called in instruction.called:
                name_strand(strand, called.instructions)
