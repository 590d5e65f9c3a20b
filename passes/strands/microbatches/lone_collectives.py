"""Removes collectives whose groups are single devices, so that other passes see through them.

Before, on a mesh of dp 1 x tp 4:                          After:
    grads = all-reduce(stack), {0}, {1}, {2}, {3}              acc = acc + stack
    acc   = acc + grads

A program that is written for data parallelism sums over the axis "dp" on every mesh, even if this axis has one device.
JAX adds such sums, too, when it differentiates a shard_map. XLA removes these collectives only later. Until then,
passes cannot see that gradients are added up.

Contract
    Consumes  all-reduces, all-gathers and reduce-scatters in which every replica group is one device.
    Makes     the operand in place of the collective.
    Leaves    all other collectives.

Why it is legal: a sum, gather or scatter over one device returns the device's own operand.
Cost: time linear in the number of instructions. This pass is not based on a paper.
"""

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.hlo import HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.edit import replace_all_uses

_KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def drop_lone_collectives(module: HloModule) -> int:
    """Removes the single-device collectives of `module`. Returns the number of removed collectives."""
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
