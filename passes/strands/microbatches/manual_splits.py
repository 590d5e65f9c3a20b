"""Finds how arrays are split in the body of a loop that calls shard_maps. The shard_maps' own splits decide this.

    x   = dynamic-slice(batch, i)          batch  [M, b: dp, d]     along M it is sliced, so not split
    y   = shard_map(w, x)                  x      [b: dp, d]        the shard_map says so
    acc = acc + y                          y, acc [f: tp]           the shard_map says so, hence in every iteration

`[b: dp, d]` are two dimensions, of which b is split over the mesh axis dp, and d is not split.

Dimensions that must be split alike form one class (union-find over the dimensions of all values). A shard_map says how
a class is split. A class is not split if an operation needs its dimensions whole, or if no shard_map splits it.

`manual_loop.py` uses this module. The analysis takes time linear in the number of instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.constraints import SHARDING, Axes, Split, is_sharding_constraint, splits
from dhelix.passes.hlo.edit import ELEMENTWISE, combines_by, has_side_effect
from dhelix.passes.hlo.manual_computation import ManualComputation, elements, is_manual
from dhelix.passes.hlo.stacks import is_zero

_EACH = ELEMENTWISE | frozenset(
    "and not or xor convert copy floor ceil is-finite remainder round-nearest-afz round-nearest-even "
    "shift-left shift-right-arithmetic shift-right-logical atan2 cbrt tan".split()
)
_Dimension = tuple[Instruction, int, int]
"""A value, the number of one of its leaves (0 unless the value is a tuple), and a dimension of that leaf."""


@dataclass
class Splits:
    """The splits of all arrays in the body of `loop`, which calls the shard_maps `held`.

    Raises PassRefusal if an array would have to be split in two ways, or if an operation cannot be applied to parts.
    """

    loop: WhileLoop
    held: list[ManualComputation]
    parent: dict[_Dimension, _Dimension] = field(default_factory=dict)
    known: dict[_Dimension, tuple[Axes, int]] = field(default_factory=dict)
    """For the representative of each class (`_head`), the mesh axes that split the class, and the number of parts."""

    def __post_init__(self) -> None:
        body = self.loop.body
        users = body.users()
        inside = {i for m in self.held for i in m.instructions}
        inside |= {value for i in inside for value, _ in elements(i, users)}
        self.mesh = ""
        self.free = False
        self.partial = self.held[0].is_partial
        constraints: list[Instruction] = []
        for one in self.held:
            for (value, split), parameter in zip(one.operands, one.body.parameters, strict=True):
                self._state(value, 0, split, value.shape, parameter.shape)
            if one.to_global is not None:
                local = [o.shape for o in one.to_global.operands]
                for value, n in elements(one.to_global, users):
                    self._state(value, 0, one.results[n][1], value.shape, local[n])
        for instruction in body.instructions:
            if instruction not in inside:
                self._visit(instruction)
                if is_sharding_constraint(instruction):
                    constraints.append(instruction)
        for k in range(self.loop.size):
            self._alike(body.parameters[0], k, body.root, k)
            self._follow_start(k)
        for k in self.loop.condition_indices:
            for d in range(len(_leaf(body.parameters[0], k).dimensions)):
                self._pin((body.parameters[0], k, d))
        for constraint in constraints:
            self._check(constraint)

    def parts(self, value: Instruction, leaf: int, dimension: int) -> int:
        """The number of parts into which a dimension of a leaf of `value` is split."""
        return self._known((value, leaf, dimension))[1]

    def summed(self, reduction: Instruction) -> Axes:
        """The manual axes over which the reduced dimensions of `reduction` are split."""
        axes = (a for d in reduction.proto.dimensions for a in self._known((reduction.operands[0], 0, d))[0])
        return tuple(a for a in axes if a in self.held[0].axis_names)

    def split(self, element: int) -> Split:
        """How an element of the loop's state is split."""
        parameter = self.loop.body.parameters[0]
        dimensions = parameter.shape.tuple_shapes[element].dimensions
        axes = tuple(self._known((parameter, element, d))[0] for d in range(len(dimensions)))
        return Split(self.mesh, axes, (self.free,) * len(dimensions))

    def _known(self, at: _Dimension) -> tuple[Axes, int]:
        return self.known.get(self._head(at), ((), 1))

    def _head(self, at: _Dimension) -> _Dimension:
        while (above := self.parent.get(at, at)) != at:
            self.parent[at] = self.parent.get(above, above)
            at = above
        return at

    def _join(self, a: _Dimension, b: _Dimension) -> None:
        a, b = self._head(a), self._head(b)
        if a == b:
            return
        known = self.known.pop(b, None)
        self.parent[b] = a
        if known is not None:
            self._pin(a, *known)

    def _pin(self, at: _Dimension, axes: Axes = (), parts: int = 1) -> None:
        if self.known.setdefault(self._head(at), (axes, parts)) != (axes, parts):
            raise PassRefusal(f"{shapes.text(at[0].shape)} would have to be split in two ways, or gathered", at[0])

    def _state(self, value: Instruction, leaf: int, split: Split, whole: Any, local: Any) -> None:
        """Records how a shard_map splits an operand or a result."""
        if split.more or (self.mesh or split.mesh) != split.mesh:
            raise PassRefusal("its shard_maps use different meshes, or leave sums open", value)
        self.mesh = split.mesh
        self.free |= any(split.free)
        for d, axes in enumerate(split.axes):
            self._pin((value, leaf, d), axes, whole.dimensions[d] // local.dimensions[d])

    def _visit(self, instruction: Instruction) -> None:
        """Records which dimensions of operands and result must be split alike, for an operation outside shard_maps."""
        shape, operands = instruction.shape, instruction.operands
        rank = range(len(shape.dimensions))
        match instruction.opcode:
            case "parameter":
                pass
            case "get-tuple-element":
                self._alike(instruction, 0, operands[0], instruction.tuple_index)
            case "tuple":
                for k, operand in enumerate(operands):
                    self._alike(instruction, k, operand, 0)
            case "opt-barrier":
                for k in range(len(shape.tuple_shapes) or 1):
                    self._alike(instruction, k, operands[0], k)
            case opcode if opcode in _EACH:
                for operand in operands:
                    if operand.shape.dimensions:  # `select` and `clamp` read scalars, too
                        self._alike(instruction, 0, operand, 0)
            case "broadcast":
                for d, to in enumerate(instruction.proto.dimensions):
                    self._join((operands[0], 0, d), (instruction, 0, to))
            case "transpose":
                for d, source in enumerate(instruction.proto.dimensions):
                    self._join((operands[0], 0, source), (instruction, 0, d))
            case "iota":
                self._pin((instruction, 0, instruction.proto.dimensions[0]))
            case "reduce" if len(operands) == 2:
                over = instruction.proto.dimensions
                left = [d for d in range(len(operands[0].shape.dimensions)) if d not in over]
                for d in [] if _adds_up(instruction) else over:
                    self._pin((operands[0], 0, d))
                for d, source in zip(rank, left, strict=True):
                    self._join((operands[0], 0, source), (instruction, 0, d))
            case "slice" | "dynamic-slice":
                self._part(operands[0], instruction)
            case "dynamic-update-slice":
                self._alike(instruction, 0, operands[0], 0)
                self._part(operands[0], operands[1])
            case "reshape" if _wide(operands[0].shape) == _wide(shape):
                before, after = ([d for d, n in enumerate(s.dimensions) if n != 1] for s in (operands[0].shape, shape))
                for source, d in zip(before, after, strict=True):
                    self._join((operands[0], 0, source), (instruction, 0, d))
            case "custom-call" if is_sharding_constraint(instruction):
                self._alike(instruction, 0, operands[0], 0)
            case _:
                self._undivided(instruction)

    def _alike(self, a: Instruction, leaf_a: int, b: Instruction, leaf_b: int) -> None:
        for d in range(len(_leaf(a, leaf_a).dimensions)):
            self._join((a, leaf_a, d), (b, leaf_b, d))

    def _part(self, whole: Instruction, part: Instruction) -> None:
        for d, (a, b) in enumerate(zip(whole.shape.dimensions, part.shape.dimensions, strict=True)):
            if a == b:
                self._join((whole, 0, d), (part, 0, d))
            else:
                self._pin((whole, 0, d))
                self._pin((part, 0, d))

    def _check(self, constraint: Instruction) -> None:
        """Raises PassRefusal if the constraint contradicts the shard_maps, because `manual_loop` may remove it."""
        for split in splits(constraint.proto.frontend_attributes.map.get(SHARDING, "")):
            if self.partial and any(split.axes):
                raise PassRefusal("a sharding constraint is outside a shard_map over some of the axes", constraint)
            if split.more or split.mesh != self.mesh:
                raise PassRefusal("a sharding constraint leaves a sum open, or uses another mesh", constraint)
            for d, axes in enumerate(split.axes):
                known, _ = self._known((constraint, 0, d))
                if axes != known and not (split.free[d] and axes == known[: len(axes)]):
                    raise PassRefusal("a sharding constraint contradicts the shard_maps", constraint)

    def _undivided(self, instruction: Instruction) -> None:
        """Records that every device applies the operation to whole arrays.

        Raises PassRefusal for side effects, custom calls and shard_maps.
        """
        inside = [i for called in instruction.called for i in graph.walk(called)]
        if has_side_effect(instruction) or any(
            i.opcode == "custom-call" or is_manual(i) for i in (instruction, *inside)
        ):
            raise PassRefusal("an operation outside the shard_maps cannot run on every device", instruction)
        for value in (instruction, *instruction.operands):
            leaves = value.shape.tuple_shapes if shapes.is_tuple(value.shape) else [value.shape]
            for leaf, shape in enumerate(leaves):
                for d in range(len(shape.dimensions)):
                    self._pin((value, leaf, d))

    def _follow_start(self, element: int) -> None:
        """Raises PassRefusal if the step splits an initial value over more axes than the shard_maps do.

        Each iteration would then gather that value.
        """
        start = self.loop.initial(element)
        if start is None or not (start.opcode == "parameter" or is_sharding_constraint(start)):
            return
        for given in splits(start.proto.frontend_attributes.map.get(SHARDING, "")):
            for d, (axes, split) in enumerate(zip(given.axes, self.split(element).axes, strict=True)):
                if not self.partial and given.mesh == self.mesh and axes[: len(split)] == split and axes != split:
                    raise PassRefusal(
                        f"dimension {d} of {shapes.text(start.shape)} is split over {', '.join(axes)} outside of the"
                        " shard_map, and would be gathered for it in each iteration",
                        start,
                    )


def _adds_up(reduction: Instruction) -> bool:
    """Whether devices can reduce their parts, and then combine the results by the same operation."""
    kind = combines_by(reduction)
    return kind in ("maximum", "minimum") or (kind == "add" and is_zero(reduction.operands[1]))


def _wide(shape: Any) -> list[int]:
    return [n for n in shape.dimensions if n != 1]


def _leaf(value: Instruction, leaf: int) -> Any:
    return value.shape.tuple_shapes[leaf] if shapes.is_tuple(value.shape) else value.shape
