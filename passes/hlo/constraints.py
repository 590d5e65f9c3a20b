"""Reads and writes shardings.

Shardy writes a sharding as text on an argument, a constraint or a shard_map. GSPMD writes a sharding as tiles.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.module import HloModule, Instruction

MESHES = "xla.sdy.meshes"
SHARDING = "xla.sdy.sharding"
REPLICATED, TILED = 0, 3  # values of XLA's OpSharding.Type; XLA calls TILED "OTHER"
AXIS = re.compile(r'"[^"]*"(?::\(\d+\)\d+)?')

Axes = tuple[str, ...]
type Over = Axes | None
"""Names of the mesh axes that split a dimension, major axis first. None leaves the dimension to propagation."""


@dataclass(frozen=True)
class Split:
    """How one array is split.

    Attributes:
      mesh: name of the mesh.
      axes: for each dimension, the mesh axes that split it, in quotes as in the text.
      free: for each dimension, whether propagation may split it over more axes.
      more: the rest of the text, such as the mesh axes over which the array still has to be summed (`unreduced`).
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
        """Whether the array still has to be summed over devices."""
        return "unreduced={" in self.more

    @property
    def over(self) -> list[Over]:
        """The names of the axes that split each dimension.

        An entry is None (left to propagation) if propagation may split the dimension further, or if only a part of an
        axis splits the dimension.
        """
        whole = [not free and ":" not in "".join(axes) for axes, free in zip(self.axes, self.free, strict=True)]
        return [
            tuple(axis.strip('"') for axis in axes) if known else None
            for axes, known in zip(self.axes, whole, strict=True)
        ]


def splits(text: str) -> list[Split]:
    """All splits in the text of an attribute. Raises PassRefusal for a mesh without a name."""
    _, *pieces = text.split("<@")
    if "<mesh<" in text:
        raise PassRefusal("a sharding uses a mesh without a name")
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
    """Maps the name of each of Shardy's meshes to the text of its definition."""
    text = module.proto.frontend_attributes.map.get(MESHES, "")
    return dict(re.findall(r"([\w.-]+) = #sdy\.mesh<([^>]*)>", text))


def mesh_axes(module: HloModule, name: str) -> dict[str, int]:
    """Maps each axis of a mesh (in quotes) to its size. The map is empty if the module does not define the mesh."""
    return {axis: int(size) for axis, size in re.findall(r'("[^"]*")=(\d+)', meshes(module).get(name, ""))}


def is_sharding_constraint(instruction: Instruction) -> bool:
    """Whether an instruction tells the partitioner how its operand is split.

    On meshes with explicit axes, JAX constrains even loop counters.
    """
    return instruction.opcode == "custom-call" and instruction.proto.custom_call_target == "Sharding"


def stated(value: Instruction) -> Split | None:
    """The split in Shardy's text on a parameter or constraint, `...<@mesh, [{"dp"}, {}]>...`.

    None if the text has no split or several splits.
    """
    text = value.proto.frontend_attributes.map.get(SHARDING, "")
    if not (is_sharding_constraint(value) or value.opcode == "parameter") or text.count("<@") != 1:
        return None
    (found,) = splits(text)
    return found if len(found.axes) == len(value.shape.dimensions) else None


def leaves_open(constraint: Instruction) -> bool:
    """Whether the constraint says that its array still has to be summed over devices."""
    known = stated(constraint)
    return known is not None and known.is_open


def constrained(
    builder: Builder, value: Instruction, split: Sequence[Over], mesh: str, axes: Mapping[str, int]
) -> Instruction:
    """Adds a sharding constraint on `value`, and returns the constraint.

    Args:
      split: for each dimension, the mesh axes that split it (`Over`).
      mesh: name of Shardy's mesh; empty for GSPMD, which reads tiles.
      axes: the mesh's axes and their sizes. GSPMD needs the axes in device order: the last axis changes fastest.
    """
    made = builder.make("custom-call", value.shape, [value], custom_call_target="Sharding")
    if mesh:
        state(made, split, mesh)
    else:
        _tile(made, split, axes)
    return made


def state(value: Instruction, split: Sequence[Over], mesh: str) -> None:
    """Writes Shardy's sharding attribute on a parameter or a constraint. `split` is as in `constrained`."""
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
    """Whether the instruction is a sharding constraint that splits dimension 0."""
    if not is_sharding_constraint(constraint):
        return False
    known = stated(constraint)
    if known is not None:
        return bool(known.axes[0])
    return list(constraint.proto.sharding.tile_assignment_dimensions[:1]) not in ([], [1])


def mesh_size(module: HloModule) -> int:
    """Number of devices of the largest Shardy mesh or GSPMD tile assignment in the module; 1 if there is none."""
    sizes = [math.prod(mesh_axes(module, name).values()) for name in meshes(module)]
    tiles = (i.proto.sharding.tile_assignment_dimensions for c in module.computations for i in c.instructions)
    return max([*sizes, *map(math.prod, tiles)], default=1)
