"""Sharding constraints: what a program says of how an array is split, as Shardy's text or as XLA's tiles."""

import math
import re

from dhelix.passes.hlo.module import HloModule, Instruction

_SHARDING = "xla.sdy.sharding"

type Known = tuple[str, tuple[str, ...], str]
"""A mesh, for each dimension what it is split over, and over what its sum is still open (`unreduced`): as text."""


def is_sharding_constraint(instruction: Instruction) -> bool:
    """What tells the partitioner how its operand is split, as JAX does of counters on meshes of explicit axes."""
    return instruction.opcode == "custom-call" and instruction.proto.custom_call_target == "Sharding"


def stated(value: Instruction) -> Known | None:
    """What the program says to Shardy of a single array: `...<@mesh, [{"dp"}, {}]>...`."""
    text = value.proto.frontend_attributes.map.get(_SHARDING, "")
    if not (is_sharding_constraint(value) or value.opcode == "parameter") or text.count("<@") != 1:
        return None
    mesh, _, rest = text.rpartition("<")[2].partition(", [")
    split, _, rest = rest.partition("]")
    dimensions = tuple(part.strip(" {}") for part in split.split("}"))[:-1]
    dimensions = tuple(part.lstrip(", {") for part in dimensions)
    still_open = re.search(r"unreduced=\{[^}]*\}", rest)
    known = mesh, dimensions, still_open[0] if still_open else ""
    return known if len(dimensions) == len(value.shape.dimensions) else None


def leaves_open(constraint: Instruction) -> bool:
    """Whether it says that a sum over devices is still open."""
    known = stated(constraint)
    return known is not None and bool(known[2])


def splits_first(constraint: Instruction) -> bool:
    """Whether it is a constraint that splits its first dimension."""
    if not is_sharding_constraint(constraint):
        return False
    known = stated(constraint)
    if known is not None:
        return known[1][0] not in ("", "?")
    return list(constraint.proto.sharding.tile_assignment_dimensions[:1]) not in ([], [1])


def mesh_size(module: HloModule) -> int:
    """Devices of the largest mesh that the program names to Shardy; 1 without."""
    text = module.proto.frontend_attributes.map.get("xla.sdy.meshes", "")
    sizes = [math.prod(map(int, re.findall(r"\"=(\d+)", mesh))) for mesh in re.findall(r"<\[(.*?)\]", text)]
    return max(sizes, default=1)
