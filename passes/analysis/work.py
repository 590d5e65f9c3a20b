"""A rough measure of how much a piece of HLO computes: the floating-point operations of its matrix products.

Every other instruction with a non-empty result counts as one operation. The measure serves only to compare loops.
`passes/evaluation/costs.py` computes costs in seconds.
"""

from dhelix.passes.analysis.execution import counted_trips, entered
from dhelix.passes.hlo import Computation, Instruction, graph, shapes


def loop_work(loop: Instruction) -> int:
    """Operations of all iterations of a `while`. An unknown trip count is taken as 1."""
    return counted_trips(loop) * max(map(computation_work, entered(loop)))


def is_layer_loop(loop: Instruction) -> bool:
    """Whether a `while` may loop over layers: it computes floating-point values.

    JAX's random generators loop over integers only.
    """
    return any(shapes.is_floating(i.shape) for called in loop.called for i in graph.walk(called))


def computation_work(computation: Computation) -> int:
    """Operations of one execution, loops and calls included. Of a conditional, the largest branch counts."""
    total = 0
    for instruction in computation.instructions:
        if instruction.opcode == "dot":
            contracted = 1
            for dimension in instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions:
                contracted *= instruction.operands[0].shape.dimensions[dimension]
            total += 2 * shapes.element_count(instruction.shape) * contracted
        elif instruction.opcode == "while":
            total += loop_work(instruction)
        elif instruction.opcode in ("call", "fusion", "conditional"):
            total += max(map(computation_work, instruction.called), default=0)
        else:
            total += shapes.byte_size(instruction.shape) > 0
    return total
