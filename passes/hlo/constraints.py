"""Shardings as programs state them: Shardy's text on arguments, constraints and shard_maps, or XLA's tiles (GSPMD)."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.module import HloModule, Instruction

MESHES = "xla.sdy.meshes"
SHARDING = "xla.sdy.sharding"
REPLICATED, TILED = 0, 3  # XLA's OpSharding.Type; TILED is its OTHER
AXIS = re.compile(r'"[^"]*"(?::\(\d+\)\d+)?')

Axes = tuple[str, ...]
type Over = Axes | None
"""Names of the axes that a dimension is split over, the major one first; None leaves it to propagation."""


@dataclass(frozen=True)
class Split:
    """How one array is split.

    Attributes:
      mesh: its name.
      axes: for each dimension the mesh axes that it is split over, as the text has them.
      free: for each dimension whether it may be split over more axes.
      more: what the text says more, such as sums that are still open.
    """

    mesh: str
    axes: tuple[Axes, ...]
    free: tuple[bool, ...]
    more: str = ""

    @property
    def text(self) -> str:
        each = [", ".join((*axes, *("?" * free))) for axes, free in zip(self.axes, self.free, strict=True)]
        return f"<@{self.mesh}, [{', '.join(f'{{{dimension}}}' for dimension in each)}]>"

    @property
    def is_open(self) -> bool:
        """Whether a sum over devices is still open."""
        return "unreduced={" in self.more

    @property
    def over(self) -> list[Over]:
        """By names of axes; what is split over a part of an axis counts as left to propagation."""
        whole = [not free and ":" not in "".join(axes) for axes, free in zip(self.axes, self.free, strict=True)]
        return [
            tuple(axis.strip('"') for axis in axes) if known else None
            for axes, known in zip(self.axes, whole, strict=True)
        ]


def splits(text: str) -> list[Split]:
    """All that an attribute lists. Raises PassRefusal for a mesh without a name."""
    _, *pieces = text.split("<@")
    if "<mesh<" in text:
        raise PassRefusal("a sharding is on a mesh without a name")
    found = []
    for piece in pieces:
        mesh, _, rest = piece.partition(", [")
        dimensions, _, rest = rest.partition("]")
        each = re.findall(r"\{([^}]*)\}", dimensions)
        axes = tuple(tuple(AXIS.findall(d)) for d in each)
        more = rest.strip(", ").rstrip("]>") if "={" in rest else ""
        found.append(Split(mesh.strip(), axes, tuple("?" in d for d in each), more))
    return found


def meshes(module: HloModule) -> dict[str, str]:
    """What the program says of each of Shardy's meshes, by name."""
    text = module.proto.frontend_attributes.map.get(MESHES, "")
    return dict(re.findall(r"([\w.-]+) = #sdy\.mesh<([^>]*)>", text))


def mesh_axes(module: HloModule, name: str) -> dict[str, int]:
    """Axes of a mesh, as `Split` has them, with their sizes; none where the module does not say."""
    return {axis: int(size) for axis, size in re.findall(r'("[^"]*")=(\d+)', meshes(module).get(name, ""))}


def is_sharding_constraint(instruction: Instruction) -> bool:
    """What tells the partitioner how its operand is split, as JAX does of counters on meshes of explicit axes."""
    return instruction.opcode == "custom-call" and instruction.proto.custom_call_target == "Sharding"


def stated(value: Instruction) -> Split | None:
    """What the program says to Shardy of a single array: `...<@mesh, [{"dp"}, {}]>...`."""
    text = value.proto.frontend_attributes.map.get(SHARDING, "")
    if not (is_sharding_constraint(value) or value.opcode == "parameter") or text.count("<@") != 1:
        return None
    (found,) = splits(text)
    return found if len(found.axes) == len(value.shape.dimensions) else None


def leaves_open(constraint: Instruction) -> bool:
    """Whether it says that a sum over devices is still open."""
    known = stated(constraint)
    return known is not None and known.is_open


def constrained(
    builder: Builder, value: Instruction, split: Sequence[Over], mesh: str, axes: Mapping[str, int]
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


def state(value: Instruction, split: Sequence[Over], mesh: str) -> None:
    """Writes to Shardy on a parameter or a constraint how it is split, as `constrained` takes it."""
    texts = ["{?}" if over is None else "{" + ", ".join(f'"{axis}"' for axis in over) + "}" for over in split]
    said = f"<@{mesh}, [{', '.join(texts)}]>"
    full = f"#sdy.sharding{said}" if value.opcode == "parameter" else f"#sdy.sharding_per_value<[{said}]>"
    value.proto.frontend_attributes.map[SHARDING] = full


def _tile(constraint: Instruction, split: Sequence[Over], axes: Mapping[str, int]) -> None:
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
        return bool(known.axes[0])
    return list(constraint.proto.sharding.tile_assignment_dimensions[:1]) not in ([], [1])


def mesh_size(module: HloModule) -> int:
    """Devices of the largest mesh that the program names to Shardy, or that its tiles lie on; 1 without."""
    sizes = [math.prod(mesh_axes(module, name).values()) for name in meshes(module)]
    tiles = (i.proto.sharding.tile_assignment_dimensions for c in module.computations for i in c.instructions)
    return max([*sizes, *map(math.prod, tiles)], default=1)
