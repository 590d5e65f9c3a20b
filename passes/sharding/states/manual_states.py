"""Moves the collectives of sharded states into a shard_map, where the passes can see and order them.

A shard_map takes whole parameters and returns whole gradients, so the partitioner would gather and slice at its edges.

    w = whole(p); g = shard_map(w)                 g = shard_map(p), where the body begins with all-gather(p)
        ... all-reduce(dw) * c                 ->      ... reduce-scatter(dw) * c
    shard(g)                                       g is split already

An all-reduce over more devices than the shards becomes a reduce-scatter over the shards and an all-reduce over the
copies (AMSP section III-B).

Over the axes of parameters, the all-gather moves to where the model computes with a parameter (`late_gathers.py`). Over
the axes of gradients, the reduce-scatter moves to where a gradient appears (`early_scatters.py`). The rest stays at the
body's begin and end.

Why it is legal: an all-gather of the shards is the whole parameter. A device keeps its own part of an all-reduced
gradient, which is what a reduce-scatter gives, and operations with scalars act on each element alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import GROUP_FIELDS, device_groups, free_channel
from dhelix.passes.hlo import Builder, Computation, Instruction
from dhelix.passes.hlo.constraints import Axes, Split, mesh_axes, splits, stated
from dhelix.passes.hlo.edit import drop_dead, replace_all_uses
from dhelix.passes.hlo.manual_computation import ManualComputation, groups_over, manual_computations
from dhelix.passes.sharding.states.early_scatters import EarlyScatters, follows_loop
from dhelix.passes.sharding.states.late_gathers import LateGathers
from dhelix.passes.sharding.states.moves import divide
from dhelix.passes.strands.gradients.parts import addition

_IN, _OUT = "xla.sdy.in_shardings", "xla.sdy.out_shardings"
_SCALED = frozenset("multiply divide convert".split())


@dataclass(frozen=True)
class _Shards:
    """The dimension of an array that a shard_map gets split, and the axes (in quotes) over which it is split.

    Attributes:
      mesh: the mesh that the axes belong to.
      sizes: the number of devices of each axis.
    """

    dimension: int
    axes: Axes
    mesh: str
    sizes: tuple[int, ...]

    @classmethod
    def between(cls, whole: Split, sharded: Split, sizes: dict[str, int]) -> _Shards | None:
        """What `sharded` splits in addition to `whole`; None if this is not exactly one dimension, split further."""
        found = []
        for dimension, (before, after) in enumerate(zip(whole.axes, sharded.axes, strict=True)):
            if after[: len(before)] != before or any(":" in axis for axis in after):
                return None
            if more := after[len(before) :]:
                found.append(cls(dimension, more, whole.mesh, tuple(sizes[axis] for axis in more)))
        return found[0] if len(found) == 1 else None

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def cut(self, names: Axes) -> tuple[_Shards | None, _Shards | None]:
        """The shards over the major axes that are among `names`, and over the other axes within them."""
        count = sum(1 for _ in itertools.takewhile(lambda axis: axis.strip('"') in names, self.axes))
        parts = (self.axes[:count], self.sizes[:count]), (self.axes[count:], self.sizes[count:])
        major, minor = (_Shards(self.dimension, axes, self.mesh, sizes) if axes else None for axes, sizes in parts)
        return major, minor


class ManualStates:
    """The shard_maps of a program, while the states that they take and return are sharded.

    Every shard_map is changed once, by `finish`, however many states it takes.
    """

    def __init__(self, entry: Computation) -> None:
        self.manuals = manual_computations(entry)
        self._module = entry.module
        self._channels = itertools.count(free_channel(entry.module))
        self._users = {manual.body: manual.body.users() for manual in self.manuals}
        self._taken = {manual.body: _taken(manual) for manual in self.manuals}
        self._given = {manual.body: manual.results for manual in self.manuals}
        self._entered: dict[Computation, dict[Instruction, tuple[_Shards, Axes, Instruction]]] = {}
        self._scattered: dict[Computation, list[tuple[Instruction, _Shards | None]]] = {}

    def enter(self, whole: Instruction, readers: Sequence[Instruction], parameters: Axes) -> None:
        """Lets a parameter enter shard_maps in shards, unless other instructions read it whole, too.

        Args:
          whole: the sharding constraint that would gather the parameter.
          readers: the instructions that read `whole`.
          parameters: the data-parallel axes over which the parameter stays split while the model reads it.
        """
        (state,) = whole.operands
        others = any(reader.opcode != "custom-call" for reader in readers)
        if stated(state) is None or (others and not parameters):
            return
        for manual in self.manuals:
            edge = manual.to_local
            if edge is not None and edge in readers:
                for k in [k for k, operand in enumerate(edge.operands) if operand is whole]:
                    self._enter(manual, k, state, parameters)

    def _enter(self, manual: ManualComputation, k: int, state: Instruction, parameters: Axes) -> None:
        edge, before, sharded = manual.to_local, self._taken[manual.body][k], stated(state)
        assert edge is not None and sharded is not None  # see `enter`
        shards = _Shards.between(before, sharded, mesh_axes(self._module, before.mesh))
        if shards is None or not set(shards.axes) <= set(manual.axis_names):
            return
        entered = self._entered.setdefault(manual.body, {})
        for number, operand in enumerate(manual.call.operands):
            if _index(operand) == k:
                parameter = manual.body.parameters[number]
                entered[parameter] = shards, parameters, state
                for value in (parameter, operand):
                    divide(value.shape, shards.dimension, shards.count)
        edge.operands[k] = state
        if edge.shape.tuple_shapes:
            divide(edge.shape.tuple_shapes[k], shards.dimension, shards.count)
        _restate(edge, _IN, k, sharded)

    def _gather(self, value: Instruction, dimension: int, shards: _Shards, like: Instruction) -> Instruction:
        """Appends the all-gather of `value` along `dimension` over the axes of `shards`, named after `like`."""
        shape = type(value.shape)()
        shape.CopyFrom(value.shape)
        shape.dimensions[dimension] *= shards.count
        made = Builder(value.computation).make(
            "all-gather", shape, [value], channel_id=next(self._channels), use_global_device_ids=True,
            dimensions=[dimension],
        )  # fmt: skip
        _set_groups(made, groups_over(self._module, shards.mesh, shards.axes))
        made.proto.metadata.CopyFrom(like.proto.metadata)
        return made

    def leave(self, value: Instruction, sharded: Split, gradients: Axes) -> bool:
        """Lets a gradient leave a shard_map in shards, if the shard_map sums it over the devices that hold the shards.

        Args:
          value: the gradient, as the shard_map returns it.
          sharded: how it is split afterwards.
          gradients: the data-parallel axes over which it is split in each micro-batch.

        Returns:
          Whether it does.
        """
        edge = value.operands[0] if value.opcode == "get-tuple-element" else value
        manual = next((one for one in self.manuals if one.to_global is edge), None)
        if manual is None or manual.body.root.opcode != "tuple":
            return False
        k, root = _index(value), manual.body.root
        position, before = self._given[manual.body][k]
        shards = _Shards.between(before, sharded, mesh_axes(self._module, before.mesh))
        if shards is None or not set(shards.axes) <= set(manual.axis_names):
            return False
        chain = _scaled_sum(root.operands[position], self._users[manual.body])
        axes = _axes_of(chain[-1], manual, before.mesh) if chain else None
        if axes is None or not set(shards.axes) <= set(axes):
            return False
        copies = tuple(axis for axis in axes if axis not in shards.axes)
        root.operands[position] = self._scatter(manual, chain, shards, gradients, copies)
        held = [root.shape.tuple_shapes[position], manual.call.shape.tuple_shapes[position]]
        for shape in [*held, *(o.shape for o in edge.operands if _index(o) == position)]:
            divide(shape, shards.dimension, shards.count)
        _restate(edge, _OUT, k, sharded)
        return True

    def _scatter(
        self, manual: ManualComputation, chain: list[Instruction], shards: _Shards, gradients: Axes, copies: Axes
    ) -> Instruction:
        """The chain of `_scaled_sum` on shards: reduce-scatters, an all-reduce over the copies, and the scaling."""
        *scaling, total = chain
        builder, (made,) = Builder(total.computation), total.operands
        early, late = shards.cut(gradients)
        for part in filter(None, (early, late)):
            made = self._reduce_scatter(total, made, shards.dimension, part)
            self._scattered.setdefault(manual.body, []).append((made, part if part is early else None))
        if copies:
            of_shards = made.shape
            made = builder.copy(total, [made])
            made.shape.CopyFrom(of_shards)
            self._over(made, shards.mesh, copies)
        for step in reversed(scaling):
            numbers = [builder.copy(o, o.operands) for o in step.operands[1:]]
            made = builder.copy(step, [made, *numbers])
            for value in (made, *numbers):
                divide(value.shape, shards.dimension, shards.count)
        return made

    def _reduce_scatter(self, like: Instruction, value: Instruction, dimension: int, shards: _Shards) -> Instruction:
        """Appends the reduce-scatter of `value` over the axes of `shards`, which adds up as the collective `like`."""
        builder = Builder(value.computation)
        alike = value.shape.element_type == like.shape.element_type
        made = builder.copy(like, [value], None if alike else [addition(builder, value.shape.element_type)])
        made.opcode = "reduce-scatter"
        made.proto.ClearField("dimensions")
        made.proto.dimensions.append(dimension)
        made.shape.CopyFrom(value.shape)
        divide(made.shape, dimension, shards.count)
        self._over(made, shards.mesh, shards.axes)
        return made

    def _over(self, made: Instruction, mesh: str, axes: Axes) -> None:
        made.proto.channel_id = next(self._channels)
        _set_groups(made, groups_over(self._module, mesh, axes))

    def finish(self) -> int:
        """Gathers what entered in shards, and drops the reductions of whole gradients.

        Other passes would take such a reduction for a reader of the gradient.

        Returns:
          The number of gradients that a loop adds up whole, although they shall be split in each micro-batch.
        """
        whole = 0
        for manual in self.manuals:
            self._gather_entered(manual.body)
            manual.body.sort()
            if manual.body in self._scattered:
                drop_dead(manual.body)
                whole += self._scatter_early(manual.body)
        return whole

    def _gather_entered(self, body: Computation) -> None:
        users, late = body.users(), LateGathers()
        for parameter, (shards, parameters, state) in self._entered.get(body, {}).items():
            value, readers = parameter, users[parameter]
            major, minor = shards.cut(parameters)
            if minor is not None:
                value = self._gather(parameter, shards.dimension, minor, state)
            for reader in readers:
                reader.operands = [value if operand is parameter else operand for operand in reader.operands]
            if major is not None:
                gather = functools.partial(self._gather, shards=major, like=state)
                late.move(value, readers, (shards.dimension, major.count), gather)
        late.finish()

    def _scatter_early(self, body: Computation) -> int:
        """Moves reduce-scatters over the axes of gradients into loops. Returns the number of those that could not."""
        early, stands_for, stayed = EarlyScatters(), dict[Instruction, Instruction](), 0
        for made, shards in self._scattered[body]:
            if shards is None:
                continue
            scatter = functools.partial(self._reduce_scatter, made, shards=shards)
            (dimension,) = made.proto.dimensions
            if early.move(made, (dimension, shards.count), scatter):
                stands_for[made] = made.operands[0]
            else:
                stayed += follows_loop(made.operands[0])
        early.finish()
        replace_all_uses(body, stands_for)
        drop_dead(body)
        return stayed


def _taken(manual: ManualComputation) -> list[Split]:
    """How each operand of a shard_map is split."""
    edge = manual.to_local
    return [] if edge is None else splits(edge.proto.frontend_attributes.map[_IN])


def _scaled_sum(value: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> list[Instruction]:
    """The operations with scalars that make `value` from an all-reduce, last first, and the all-reduce; or nothing."""
    chain = []
    while len(users[value]) == 1:
        chain.append(value)
        if value.opcode == "all-reduce":
            return chain if len(value.operands) == 1 else []
        rest = [o for o in value.operands[1:] if o.opcode != "broadcast" or o.proto.dimensions]
        if value.opcode not in _SCALED or rest:
            return []
        value = value.operands[0]
    return []


def _axes_of(total: Instruction, manual: ManualComputation, mesh: str) -> Axes | None:
    """The manual axes over which an all-reduce sums; None if its groups are not those of mesh axes."""
    module = total.computation.module
    groups = {frozenset(group) for group in device_groups(total)}
    names = manual.axis_names
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {frozenset(group) for group in groups_over(module, mesh, axes)} == groups:
                return axes
    return None


def _set_groups(collective: Instruction, groups: list[list[int]]) -> None:
    for name in GROUP_FIELDS:
        collective.proto.ClearField(name)
    for group in groups:
        collective.proto.replica_groups.add(replica_ids=group)


def _restate(edge: Instruction, attribute: str, k: int, split: Split) -> None:
    """Writes another split of operand or result `k` of a shard_map's edge."""
    count = itertools.count()
    text = edge.proto.frontend_attributes.map[attribute]
    new = re.sub(r"<@[^>]*>", lambda found: split.text if next(count) == k else found[0], text)
    edge.proto.frontend_attributes.map[attribute] = new


def _index(value: Instruction) -> int:
    return value.tuple_index if value.opcode == "get-tuple-element" else 0
