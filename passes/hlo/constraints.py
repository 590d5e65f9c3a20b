"""Sharding constraints: what a program says of how an array is split, as Shardy's text or as XLA's tiles (GSPMD)."""

import math
import re
from collections.abc import Mapping, Sequence

from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.module import HloModule, Instruction

MESHES = "xla.sdy.meshes"
_SHARDING = "xla.sdy.sharding"
REPLICATED, TILED = 0, 3  # XLA's OpSharding.Type; TILED is its OTHER

type Known = tuple[str, tuple[str, ...], str]
"""A mesh, for each dimension what it is split over, and over what its sum is still open (`unreduced`): as text."""

type Split = tuple[str, ...] | None
"""The axes that a dimension is split over, the major one first; None leaves it to propagation."""


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


def stated_split(value: Instruction) -> list[Split] | None:
    """The same for each dimension; what is split over a part of an axis counts as left to propagation."""
    known = stated(value)
    if known is None:
        return None
    return [tuple(re.findall(r'"([^"]+)"', axes)) if not re.search(r"\?|:", axes) else None for axes in known[1]]


def constrained(
    builder: Builder, value: Instruction, split: Sequence[Split], mesh: str, axes: Mapping[str, int]
) -> Instruction:
    """`value`, with a constraint that says how it is split.

    Args:
      split: of each dimension.
      mesh: name of Shardy's mesh; empty for GSPMD, which reads tiles.
      axes: the mesh's axes and their sizes; for GSPMD in the order of devices, the last axis changing fastest.
    """
    made = builder.make("custom-call", value.shape, [value], custom_call_target="Sharding")
    if mesh:
        state(made, split, mesh)
    else:
        _tile(made, split, axes)
    return made


def state(value: Instruction, split: Sequence[Split], mesh: str) -> None:
    """Writes to Shardy on a parameter or a constraint how it is split, as `constrained` takes it."""
    texts = ["{?}" if over is None else "{" + ", ".join(f'"{axis}"' for axis in over) + "}" for over in split]
    said = f"<@{mesh}, [{', '.join(texts)}]>"
    full = f"#sdy.sharding{said}" if value.opcode == "parameter" else f"#sdy.sharding_per_value<[{said}]>"
    value.proto.frontend_attributes.map[_SHARDING] = full


def _tile(constraint: Instruction, split: Sequence[Split], axes: Mapping[str, int]) -> None:
    names = list(axes)
    used = [axis for over in split for axis in over or ()]
    rest = [axis for axis in names if axis not in used]
    tiles = constraint.proto.sharding
    tiles.type = TILED
    tiles.tile_assignment_dimensions.extend(math.prod(axes[axis] for axis in over or ()) for over in split)
    if rest:
        tiles.tile_assignment_dimensions.append(math.prod(axes[axis] for axis in rest))
        tiles.replicate_on_last_tile_dim = True
    tiles.iota_reshape_dims.extend(axes.values())
    tiles.iota_transpose_perm.extend(names.index(axis) for axis in [*used, *rest])
    if open_ := [str(d) for d, over in enumerate(split) if over is None]:
        constraint.proto.backend_config = f"unspecified_dims=[{','.join(open_)}]".encode()


def splits_first(constraint: Instruction) -> bool:
    """Whether it is a constraint that splits its first dimension."""
    if not is_sharding_constraint(constraint):
        return False
    known = stated(constraint)
    if known is not None:
        return known[1][0] not in ("", "?")
    return list(constraint.proto.sharding.tile_assignment_dimensions[:1]) not in ([], [1])


def mesh_size(module: HloModule) -> int:
    """Devices of the largest mesh that the program names to Shardy, or that its tiles lie on; 1 without."""
    text = module.proto.frontend_attributes.map.get(MESHES, "")
    sizes = [math.prod(map(int, re.findall(r"\"=(\d+)", mesh))) for mesh in re.findall(r"<\[(.*?)\]", text)]
    tiles = (i.proto.sharding.tile_assignment_dimensions for c in module.computations for i in c.instructions)
    return max([*sizes, *map(math.prod, tiles)], default=1)
