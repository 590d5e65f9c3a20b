"""Translates a program's tiles (GSPMD) to shardings over a mesh (Shardy), so that Shardy can propagate them.

    x = parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
    w = parameter(1), sharding={devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}

A device's number can be read as the digits of a mixed-radix number. With radices [2, 4], x is split over the first
digit. With radices [4, 2], w is split over the last digit. Both are also digits with radices [2, 2, 2]. So the mesh is
["axis_0"=2, "axis_1"=2, "axis_2"=2] over the devices in order, and the shardings are

    x: [{"axis_0"}, {}]        w: [{}, {"axis_2"}]

Only the tiles of the entry's parameters and of sharding constraints are translated. The result serves analysis only;
XLA never sees it. XLA itself has a translation from tiles to Shardy, but jaxlib does not expose it.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.constraints import MESHES, REPLICATED, TILED, is_sharding_constraint, state

_MESH = "mesh"
_UNSPECIFIED = re.compile(rb"unspecified_dims=\[([\d,]*)\]")

type _Digit = tuple[int, int]
"""A digit of a device's number: (size, stride in devices)."""


def as_shardy(module: HloModule) -> None:
    """Adds Shardy shardings next to the tiles of a program lowered for GSPMD. Adds nothing if no tile splits an array.

    Raises:
      PassRefusal: tiles cannot be read or fit no common mesh.
    """
    said = {instruction: _digits(instruction) for instruction in _sharded(module)}
    devices = {math.prod(i.proto.sharding.iota_reshape_dims) for i in said if i.proto.sharding.type == TILED}
    if not devices:
        return
    if len(devices) > 1:
        raise PassRefusal("the program's tile shardings use different numbers of devices")
    axes = _axes([digit for split in said.values() for over in split for digit in over], *devices)
    sizes = ", ".join(f'"{name}"={size}' for name, (size, _) in axes.items())
    module.proto.frontend_attributes.map[MESHES] = f"{{{_MESH} = #sdy.mesh<[{sizes}]>}}"
    for instruction, split in said.items():
        left = _left_open(instruction)
        over = [tuple(name for digit in of for name, axis in axes.items() if _within(axis, digit)) for of in split]
        state(instruction, [None if d in left else names for d, names in enumerate(over)], _MESH)


def _sharded(module: HloModule) -> Iterator[Instruction]:
    for computation in module.computations:
        for i in computation.instructions:
            if i.proto.custom_call_target == "SPMDFullToShardShape":
                raise PassRefusal("a program lowered for GSPMD must not contain a shard_map", i)
            if is_sharding_constraint(i) or (i.opcode == "parameter" and computation is module.entry):
                if i.proto.HasField("sharding"):
                    yield i


def _left_open(instruction: Instruction) -> set[int]:
    """The dimensions that a constraint leaves to propagation."""
    found = _UNSPECIFIED.search(instruction.proto.backend_config)
    return set(map(int, filter(None, found[1].split(b",")))) if found else set()


def _digits(instruction: Instruction) -> list[list[_Digit]]:
    """For each dimension, the digits of the device number over which it is split, major digit first."""
    tiles, rank = instruction.proto.sharding, len(instruction.shape.dimensions)
    if tiles.type == REPLICATED:
        return [[] for _ in range(rank)]
    if (
        tiles.type != TILED
        or tiles.HasField("named_sharding")
        or any(kind != REPLICATED for kind in tiles.last_tile_dims)
    ):
        raise PassRefusal("the sharding is neither tiled nor replicated", instruction)
    if tiles.tile_assignment_devices:
        raise PassRefusal("the tile sharding lists devices one by one, so it matches no mesh", instruction)
    strides = _strides(tiles.iota_reshape_dims)
    left = [(tiles.iota_reshape_dims[k], strides[k]) for k in reversed(tiles.iota_transpose_perm)]  # a stack
    found: list[list[_Digit]] = []
    for count in tiles.tile_assignment_dimensions[:rank]:
        over: list[_Digit] = []
        while count > 1:
            size, stride = left.pop()
            taken = min(size, count)
            if size % taken or count % taken:
                raise PassRefusal("the tile sharding matches no mesh", instruction)
            over.append((taken, stride * (size // taken)))
            if taken < size:
                left.append((size // taken, stride))
            count //= taken
        found.append(over)
    return found


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _axes(digits: Sequence[_Digit], devices: int) -> dict[str, _Digit]:
    """The axes of the coarsest mesh in which every digit is a product of axes; major axis first.

    The mesh has the devices in order.
    """
    ends = sorted({1, devices} | {end for size, stride in digits for end in (stride, stride * size)})
    if any(larger % smaller for smaller, larger in pairwise(ends)):
        raise PassRefusal("the program's tile shardings match no common mesh")
    axes = [(larger // smaller, smaller) for smaller, larger in pairwise(ends)]
    return {f"axis_{number}": axis for number, axis in enumerate(reversed(axes))}


def _within(axis: _Digit, digit: _Digit) -> bool:
    (size, stride), (whole, first) = axis, digit
    return first <= stride and stride * size <= first * whole
