"""All-to-alls in place of other collectives: what the passes that make them share.

An all-to-all sends each device its part directly. On symmetric memory copy engines do it, which take no SMs; through
host memory it reaches more bandwidth than the rings of NCCL's other collectives (docs/profiles.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dhelix.passes.collectives import GROUP_FIELDS, find_collective
from dhelix.passes.costs import CostModel
from dhelix.passes.hlo import Builder, Instruction, Shape, edit, shapes
from dhelix.passes.operator_keys import OperatorKeys
from dhelix.profiles import roofline
from dhelix.profiles.keys import CollectiveKey


def why_not(collective: Instruction) -> str:
    """Why a reduce-scatter or an all-gather has no form with an all-to-all; "" if it has."""
    if len(collective.operands) != 1 or shapes.is_tuple(collective.shape):
        return "several arrays at once"
    if not collective.proto.channel_id:
        return "over replicas, not partitions"
    found = find_collective(collective)
    dimension = collective.proto.dimensions[0]
    sizes = [collective.operands[0].shape.dimensions[dimension], collective.shape.dimensions[dimension]]
    if found is None or found.group_size(default=0) * min(sizes) != max(sizes):
        return "its groups do not say how many parts there are"
    return ""


def why_too_dear(collective: Instruction, model: CostModel, passes: int) -> str:
    """Why `collective` stays: by `model`, alone, it takes no longer than an all-to-all; "" if it does.

    Args:
      passes: over how many arrays of the operand's and the result's size, together, an all-to-all needs memory's
        bandwidth before or after it.
    """
    hardware = model.hardware
    key = OperatorKeys(hardware.gpus_per_node, model.implementation)[collective]
    if not isinstance(key, CollectiveKey):
        return "no key to look its cost up by"
    moved = passes * (key.bytes + key.bytes // key.group_size)
    exchange = model.estimator.solo(replace(key, kind="all-to-all")).seconds
    seconds = exchange + roofline.memory_seconds(moved, hardware)
    return "" if seconds < model.estimator.solo(key).seconds else "not faster with an all-to-all"


def all_to_all(builder: Builder, operand: Instruction, like: Instruction) -> Instruction:
    """Part k of `operand`, along the dimension of `like` and over its devices, goes to device k; theirs come back."""
    made = builder.make("all-to-all", array(operand.shape.element_type, operand.shape.dimensions), [operand])
    made.proto.dimensions.extend(like.proto.dimensions)
    made.proto.channel_id = like.proto.channel_id
    for field in GROUP_FIELDS:
        getattr(made.proto, field).MergeFrom(getattr(like.proto, field))
    return made


def put_in_place(old: Instruction, first: Instruction, last: Instruction) -> None:
    """Readers of `old` read `last`; what had to come before `old` comes before `first`; `old` goes."""
    computation = old.computation
    first.control_predecessors = old.control_predecessors
    for other in computation.instructions:
        other.control_predecessors = [last if p is old else p for p in other.control_predecessors]
    edit.replace_uses(computation, old, last)
    computation.instructions.remove(old)


def array(element_type: int, dimensions: Iterable[int]) -> Any:
    """A shape without a layout: layouts come later."""
    return Shape(element_type=element_type, dimensions=dimensions)
