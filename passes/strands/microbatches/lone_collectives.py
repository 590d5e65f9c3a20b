"""Takes away collectives of one device each, so that other passes see through them.

Before, on a mesh of dp 1 x tp 4:                          After:
    grads = all-reduce(stack), {0}, {1}, {2}, {3}              acc = acc + stack
    acc   = acc + grads

A program that is written for data parallelism sums over its axis on every mesh, and JAX does so where a shard_map is
differentiated. XLA takes such collectives away, but only later: until then they hide that gradients are added up.

Contract
    Consumes  all-reduces, all-gathers and reduce-scatters of which every group is one device by its number.
    Makes     their operand in their place.
    Leaves    all others.

Why it is legal: what one device sums, gathers or scatters alone is its own.
Cost: linear in instructions. No paper.
"""

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.hlo import HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.edit import replace_all_uses

_KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def drop_lone_collectives(module: HloModule) -> int:
    """Takes them away; returns how many."""
    count = 0
    for computation in module.computations:
        stay = graph.tied(computation)
        stands_for: dict[Instruction, Instruction] = {}
        for instruction in computation.instructions:  # operands first
            if instruction not in stay and _is_alone(instruction):
                operand = instruction.operands[0]
                stands_for[instruction] = stands_for.get(operand, operand)
        if stands_for:
            replace_all_uses(computation, stands_for)
            computation.instructions = [i for i in computation.instructions if i not in stands_for]
            count += len(stands_for)
    return count


def _is_alone(collective: Instruction) -> bool:
    if collective.opcode not in _KINDS or len(collective.operands) != 1:
        return False
    groups = device_groups(collective)
    of_devices = collective.proto.use_global_device_ids or not collective.proto.channel_id
    same = shapes.same(collective.shape, collective.operands[0].shape)
    return bool(groups) and all(len(group) == 1 for group in groups) and of_devices and same
