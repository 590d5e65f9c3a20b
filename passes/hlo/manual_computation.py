"""A `shard_map` in HLO: three instructions that stay together. They run a computation on each device's part of arrays.

    a = custom-call(x), custom_call_target="xla.sdy.GlobalToLocalShape"     x: a whole array; a: this device's part
    b = call(a), to_apply=xla.sdy.manual_computation_body
    y = custom-call(b), custom_call_target="xla.sdy.LocalToGlobalShape"

Attributes of the custom calls list the mesh axes that split each dimension, and the manual axes. A shard_map without
operands has no first custom call. A shard_map without results has no last custom call. docs/design/programs.md
describes what happens to the three instructions. `shardy_import.py` turns them back into an operation of Shardy.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.constraints import AXIS, Axes, Split, mesh_axes, meshes, splits
from dhelix.passes.hlo.edit import TO_GLOBAL, TO_LOCAL, drop_dead, inline_calls
from dhelix.passes.hlo.module import Computation, HloModule, Instruction

_AXES, _IN, _OUT = "xla.sdy.manual_axes", "xla.sdy.in_shardings", "xla.sdy.out_shardings"


@dataclass(frozen=True)
class ManualComputation:
    """The three instructions of one shard_map. A missing custom call is None."""

    to_local: Instruction | None
    call: Instruction
    to_global: Instruction | None

    @property
    def instructions(self) -> list[Instruction]:
        return [i for i in (self.to_local, self.call, self.to_global) if i is not None]

    @property
    def body(self) -> Computation:
        return self.call.called[0]

    @property
    def axes(self) -> str:
        """Text that lists the manual mesh axes."""
        edge = self.to_local or self.to_global
        return "" if edge is None else _attribute(edge, _AXES)

    @property
    def axis_names(self) -> Axes:
        return tuple(AXIS.findall(self.axes))

    @property
    def is_partial(self) -> bool:
        """Whether some mesh axes are not manual but left to the partitioner. True if a mesh is unknown."""
        module = self.call.computation.module
        names = dict.fromkeys(split.mesh for _, split in (*self.operands, *self.results))
        meshes = [mesh_axes(module, name) for name in names]
        return any(not mesh or len(mesh) > len(self.axis_names) for mesh in meshes)

    @property
    def operands(self) -> list[tuple[Instruction, Split]]:
        """For each parameter of the body: the whole array, and how this array is split."""
        if self.to_local is None:
            return []
        listed = splits(_attribute(self.to_local, _IN))
        at = [_index(o) for o in self.call.operands]
        return [(self.to_local.operands[k], listed[k]) for k in at]

    @property
    def results(self) -> list[tuple[int, Split]]:
        """For each result: its index in the body's result tuple, and how the whole array is split."""
        if self.to_global is None:
            return []
        listed = splits(_attribute(self.to_global, _OUT))
        return [(_index(o), split) for o, split in zip(self.to_global.operands, listed, strict=True)]


def groups_over(module: HloModule, name: str, axes: Axes) -> list[list[int]]:
    """Groups of devices of mesh `name`. The devices of a group differ only in their coordinates along `axes`.

    The devices of a group are ordered by these coordinates, and the first axis is the major one.

    Raises PassRefusal if the module does not declare these axes of the mesh.
    """
    mesh = mesh_axes(module, name)
    if not mesh.keys() >= set(axes):
        raise PassRefusal(f"the module does not declare axes {', '.join(axes)} of mesh {name}")
    listed = re.search(r"device_ids=\[([^\]]*)\]", meshes(module).get(name, ""))
    ids = map(int, listed[1].split(",")) if listed else range(math.prod(mesh.values()))
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for place, device in zip(itertools.product(*map(range, mesh.values())), ids, strict=True):
        at = dict(zip(mesh, place, strict=True))
        others = tuple(n for axis, n in at.items() if axis not in axes)
        groups.setdefault(others, []).append((tuple(at[axis] for axis in axes), device))
    return [[device for _, device in sorted(group)] for group in groups.values()]


def is_manual(call: Instruction) -> bool:
    """Whether a call runs the body of a `shard_map`. Such a call must stay, because the partitioner looks for it."""
    return call.opcode == "call" and "xla.sdy" in call.called[0].name


def stays_a_call(call: Instruction) -> bool:
    """Whether a call must not be inlined: the call of a shard_map or composite, or a call marked `inlineable`."""
    return "inlineable" in call.proto.frontend_attributes.map or is_manual(call) or call.proto.is_composite


def inline_all(computation: Computation) -> None:
    """Inlines the calls in `computation` and its loops unless `stays_a_call(call)`. Drops dead code."""
    inline_calls(computation, keep=stays_a_call)
    drop_dead(computation)
    for loop in [i for i in computation.instructions if i.opcode == "while"]:
        inline_all(loop.called[0])


def manual_computations(computation: Computation) -> list[ManualComputation]:
    """The shard_maps of `computation`, in order.

    Raises PassRefusal if a shard_map does not consist of the three instructions in the docstring of this file.
    """
    users = computation.users()
    found = []
    for call in filter(is_manual, computation.instructions):
        before = {_source(o) for o in call.operands}
        after = {u for value in _parts(call, users) for u in users[value] if u.opcode != "get-tuple-element"}
        edges = [(i, target) for some, target in ((before, TO_LOCAL), (after, TO_GLOBAL)) for i in some]
        if len(before) > 1 or len(after) > 1 or any(i.proto.custom_call_target != target for i, target in edges):
            raise PassRefusal("the shard_map is not a chain of to-local, call and to-global", call)
        found.append(ManualComputation(next(iter(before), None), call, next(iter(after), None)))
    return found


def elements(value: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> list[tuple[Instruction, int]]:
    """The results of one of the three instructions of a shard_map, each with its number.

    If the instruction returns a tuple, the results are the instructions that read its elements. Otherwise the result is
    the instruction itself, with number 0.
    """
    return [(i, _index(i)) for i in _parts(value, users)]


def make_manual(
    computation: Computation,
    like: ManualComputation,
    operands: Sequence[tuple[Instruction, Split]],
    body: Computation,
    results: Sequence[tuple[Any, Split]],
) -> tuple[ManualComputation, list[Instruction]]:
    """Appends a shard_map over the manual axes of `like`. Returns the shard_map and its results (whole arrays).

    Args:
      operands: for each parameter of `body`, the whole array and how this array is split.
      body: the computation of the shard_map. It returns a tuple.
      results: for each element of that tuple, the shape of the whole array and how this array is split.
    """
    builder = Builder(computation)
    edge = like.to_local or like.to_global
    assert edge is not None
    to_local = to_global = None
    given: list[Instruction] = []
    if operands:
        to_local = builder.copy(edge, [o for o, _ in operands], [])
        _describe(to_local, TO_LOCAL, (p.shape for p in body.parameters), _IN, [split for _, split in operands])
        given = [builder.element(to_local, k) for k in range(len(operands))]
    call = builder.copy(like.call, given, [body])
    call.proto.shape.CopyFrom(body.root.shape)
    if results:
        made = [builder.element(call, k) for k in range(len(results))]
        to_global = builder.copy(edge, made, [])
        _describe(to_global, TO_GLOBAL, (shape for shape, _ in results), _OUT, [split for _, split in results])
    whole = [] if to_global is None else [builder.element(to_global, k) for k in range(len(results))]
    return ManualComputation(to_local, call, to_global), whole


def _describe(edge: Instruction, target: str, made: Iterable[Any], name: str, listed: Sequence[Split]) -> None:
    """Gives a custom call of a shard_map another target, other result shapes and other splits.

    `edge` is a copy of either custom call.
    """
    edge.proto.custom_call_target = target
    edge.proto.shape.CopyFrom(shapes.tuple_of(made))
    attributes = edge.proto.frontend_attributes.map
    for other in (_IN, _OUT):
        attributes.pop(other, None)
    attributes[name] = f"#sdy.sharding_per_value<[{', '.join(split.text for split in listed)}]>"


def _attribute(edge: Instruction, name: str) -> str:
    return edge.proto.frontend_attributes.map.get(name, "")


def _source(value: Instruction) -> Instruction:
    return value.operands[0] if value.opcode == "get-tuple-element" else value


def _index(value: Instruction) -> int:
    return value.tuple_index if value.opcode == "get-tuple-element" else 0


def _parts(value: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> list[Instruction]:
    if not shapes.is_tuple(value.shape):
        return [value]
    return [u for u in users[value] if u.opcode == "get-tuple-element"]
