"""Reads the kind, the size and the devices of a collective of an HLO module, in any form that XLA writes.

XLA writes a collective in one of three forms:

  - synchronous (`all-gather`);
  - as an async pair: `async-start`, whose computation holds the collective, and `async-done`. An older form of a pair
    is `all-gather-start` and `all-gather-done`. A pair may hold several collectives, which NCCL runs as one group;
  - inside a fusion (Triton collectives). The fusion is itself synchronous or an async pair.

XLA writes the groups of devices as lists of ids, as a reshaped and transposed iota, or as axes of a mesh. The device
ids of a mesh are a list or an iota. A collective without groups runs over all devices. An id is the number of a
replica, of a partition or of a device (`flattened_groups`).

Sizes are computed from the operands, and for an all-gather also from the result. An instruction's shape alone does not
give the size, because the forms put different arrays next to the result:

    all-reduce-start    f32[8], (f32[8], f32[8])                              only the results, one or several
    all-gather-start    (f32[8], f32[64]), ((f32[8], f32[8]), (f32[64], f32[64]))      operands, then results
    permute-start       (f32[8], f32[8]), (f32[8], f32[8], u32[], u32[])      and contexts
    async-start         ((f32[8]), f32[64]), ((f32[8]), f32[64], u32[])       operands, result, and contexts

Messages (`send`, `recv`) and transfers to or from host memory are not collectives. `passes/evaluation/transfers.py`
reads them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dhelix.passes.hlo import HloModule, Instruction, shapes
from dhelix.passes.hlo.schema import InstructionProto

KINDS = frozenset(
    """all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute
    collective-broadcast""".split()
)
_OPCODES = KINDS | {f"{kind}-start" for kind in KINDS}
_HOLDERS = frozenset(("async-start", "fusion", "call"))
GROUP_FIELDS = ("replica_groups", "collective_device_list", "iota_replica_groups", "mesh_replica_groups")

Groups = tuple[tuple[int, ...], ...]
_COMBINER_KEY = "combiner_key"  # frontend attribute: XLA does not combine collectives with different values
_OVER_BOTH = frozenset(("all-gather", "all-reduce", "reduce-scatter"))
_KERNEL, _PEERS = "mosaic_gpu", b"uses_xla_collective_metadata = true"


@dataclass(frozen=True)
class Collective:
    """A collective with the facts that determine its cost.

    Attributes:
      kind: HLO's name of the operation, such as `all-gather`.
      size: bytes of the whole buffer on one device. For an all-gather, this is the result; for other kinds, the
        operand. For a ragged all-to-all, this is the whole send buffer. The data determine how much of it is sent.
      groups: groups of devices that communicate with each other; (source, target) pairs for `collective-permute`. Empty
        if all devices form one group and the module does not say how many devices there are.
      others: the remaining collectives of the same instruction. They have another kind or other groups.
    """

    kind: str
    size: int
    groups: Groups
    others: tuple["Collective", ...] = ()

    def group_size(self, default: int) -> int:
        """Number of devices of the largest group; `default` if there are no groups."""
        return max(map(len, self.groups), default=default)

    def nodes(self, gpus_per_node: int) -> int:
        """The largest number of nodes that one group spans. Device n is on node n // gpus_per_node."""
        return max((len({d // gpus_per_node for d in group}) for group in self.groups), default=1)


def is_start(instruction: Instruction) -> bool:
    """Whether `instruction` begins an async pair of any kind (such as a collective, a fusion or a copy)."""
    return instruction.opcode.endswith("-start")


def is_done(instruction: Instruction) -> bool:
    """Whether `instruction` ends an async pair of any kind."""
    return instruction.opcode.endswith("-done")


def start_of(done: Instruction) -> Instruction:
    """The start instruction of the async pair that `done` ends."""
    start = done.operands[0]
    while start.opcode == "async-update":
        start = start.operands[0]
    return start


def keep_apart(collective: Instruction, name: str) -> None:
    """Adds `name` to the combiner key. XLA combines only collectives with equal combiner keys."""
    attributes = collective.proto.frontend_attributes.map
    attributes[_COMBINER_KEY] = f"{name} {attributes[_COMBINER_KEY]}" if _COMBINER_KEY in attributes else name


def kept_apart(collective: Instruction) -> str:
    """The combiner key of `collective`, with the names from `keep_apart` separated by spaces; "" if there is no key."""
    return collective.proto.frontend_attributes.map.get(_COMBINER_KEY, "")


def free_channel(module: HloModule) -> int:
    """A channel id larger than every channel id of the module."""
    return 1 + max((i.proto.channel_id for c in module.computations for i in c.instructions), default=0)


def find_collective(instruction: Instruction) -> Collective | None:
    """The collective that `instruction` runs or starts; None if there is none, as for the `-done` of a pair.

    An instruction may have several collectives. Collectives of the same kind and with equal groups count as one
    collective of their total size. The largest collective is returned, and its `others` are the remaining ones.
    """
    sizes: dict[tuple[str, Groups], int] = {}
    for found in payloads(instruction):
        alike = found.opcode.removesuffix("-start"), flattened_groups(found)
        sizes[alike] = sizes.get(alike, 0) + _size(found)
    if not sizes:
        return None
    first, *others = sorted((Collective(kind, size, groups) for (kind, groups), size in sizes.items()), key=_by_size)
    return replace(first, others=tuple(others)) if others else first


def _by_size(collective: Collective) -> tuple[int, str, Groups]:
    return -collective.size, collective.kind, collective.groups


def _size(collective: Instruction) -> int:
    kind, operands = collective.opcode.removesuffix("-start"), collective.operands
    if kind == "ragged-all-to-all" or any(shapes.is_tuple(o.shape) for o in operands):
        operands = operands[:1]  # the other operands are output buffers, offsets and sizes
    size = sum(shapes.byte_size(o.shape) for o in operands)
    if kind != "all-gather":
        return size
    pair = is_start(collective) and shapes.is_tuple(collective.shape)
    gathered = collective.shape.tuple_shapes[1] if pair else collective.shape
    return max(size, shapes.byte_size(gathered))


def payloads(instruction: Instruction, inside: bool = False) -> Iterator[Instruction]:
    """The collectives of one scheduled instruction, as instructions.

    If `inside`, `instruction` is part of an async pair or a fusion. There, a call is not control flow, so the
    collectives of its callee count.
    """
    opcode = instruction.opcode
    if opcode in _OPCODES:
        yield instruction
    elif opcode in _HOLDERS and (inside or opcode != "call"):
        for called in instruction.called:
            for inner in called.instructions:
                if inner.opcode in _OPCODES or inner.opcode in _HOLDERS:
                    yield from payloads(inner, True)


def flattened_groups(collective: Instruction) -> Groups:
    """`device_groups` with device numbers in place of ids.

    With P partitions, partition p of replica r is device r P + p. What an id means depends on two fields:

        channel   use_global_device_ids   ids count
        no        (either)                replicas; each partition communicates on its own
        yes       no                      partitions; in reductions and all-gathers: replicas, each with all partitions
        yes       yes                     devices

    Groups stay unchanged if the module does not say how many devices it has. They also stay unchanged if an id is too
    large for the number of replicas or partitions.
    """
    proto, groups = collective.proto, device_groups(collective)
    replicas, partitions = collective.computation.module.device_counts
    if not replicas * partitions:
        return groups
    if proto.channel_id and proto.use_global_device_ids:
        return groups or (tuple(range(replicas * partitions)),)
    by_replica = not proto.channel_id or collective.opcode.removesuffix("-start") in _OVER_BOTH
    counted = replicas if by_replica else partitions
    groups = groups or (tuple(range(counted)),)
    if any(number >= counted for group in groups for number in group):
        return groups
    if not by_replica:
        return groups if replicas == 1 else _apart(groups, 1, replicas, partitions)
    if not proto.channel_id:
        return groups if partitions == 1 else _apart(groups, partitions, partitions, 1)
    return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in groups)


def _apart(groups: Groups, stride: int, copies: int, shift: int) -> Groups:
    """Repeats each group `copies` times. In copy c, id n becomes n * stride + c * shift."""
    return tuple(tuple(n * stride + copy * shift for n in group) for group in groups for copy in range(copies))


def device_groups(collective: Instruction) -> Groups:
    """The groups of ids, read from any of XLA's forms; empty if all devices form one group."""
    proto = collective.proto
    if proto.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in proto.source_target_pairs)
    only = InstructionProto()
    for field in GROUP_FIELDS:
        getattr(only, field).MergeFrom(getattr(proto, field))
    return _groups(only.SerializeToString(deterministic=True))


@lru_cache(maxsize=1024)
def _groups(serialized: bytes) -> Groups:
    proto = InstructionProto.FromString(serialized)
    listed = proto.replica_groups or proto.collective_device_list.replica_groups
    if listed:
        return tuple(tuple(group.replica_ids) for group in listed)
    for iota in (proto.iota_replica_groups, proto.collective_device_list.iota_replica_group_list):
        if iota.num_replica_groups:
            ids = _iota(iota.iota_reshape_dims, iota.iota_transpose_perm)
            return tuple(itertools.batched(ids, iota.num_devices_per_group))
    mesh = proto.mesh_replica_groups.mesh
    return mesh_groups(mesh, proto.mesh_replica_groups.axes) if mesh.axes else ()


def _iota(dimensions: Sequence[int], permutation: Sequence[int]) -> list[int]:
    """0, 1, ... reshaped to `dimensions`, transposed by `permutation`, and flattened row by row."""
    strides = _strides(dimensions)
    order = list(permutation) or list(range(len(dimensions)))
    return [
        sum(i * strides[axis] for i, axis in zip(index, order, strict=True))
        for index in itertools.product(*(range(dimensions[axis]) for axis in order))
    ]


def mesh_groups(mesh: Any, axes: Any) -> Groups:
    """Groups of devices that differ only along `axes`.

    An entry of `axes` may be a sub-axis, as in Shardy: a mesh axis is split into `pre_size` x `size` x rest, major to
    minor, and the entry is the factor `size`.
    """
    dimensions: list[int] = []
    taken: list[int] = []
    for number, axis in enumerate(mesh.axes):
        parts = sorted(
            (ref.sub_axis.pre_size or 1, ref.sub_axis.size or axis.size)
            for ref in axes
            if ref.mesh_axis_index == number
        )
        done = 1
        for before, size in parts:
            dimensions += [before // done, size]
            taken.append(len(dimensions) - 1)
            done = before * size
        dimensions.append(axis.size // done)
    ids = list(mesh.device_ids) or _iota(mesh.iota.reshape_dims or dimensions, mesh.iota.transpose_perm)
    rest = [n for n in range(len(dimensions)) if n not in taken]
    width = 1
    for n in taken:
        width *= dimensions[n]
    return tuple(itertools.batched((ids[i] for i in _iota(dimensions, rest + taken)), width))


@dataclass(frozen=True)
class NamedMesh:
    """The mesh of devices that a program names.

    Attributes:
      axes: the size of each axis by name, outermost first.
      places: the coordinates of each device, one for each axis.
    """

    axes: Mapping[str, int]
    places: Mapping[int, tuple[int, ...]]

    def over(self, collective: Collective) -> tuple[str, ...]:
        """The axes along which the devices of a group differ, outermost first.

        Empty if a group lacks devices of these axes, or has a device outside the mesh. A permute may lack devices.
        """
        if not all(device in self.places for group in collective.groups for device in group):
            return ()
        places = [[self.places[device] for device in group] for group in collective.groups]
        found = {n for group in places for n, along in enumerate(zip(*group, strict=True)) if len(set(along)) > 1}
        names = tuple(name for n, name in enumerate(self.axes) if n in found)
        whole = math.prod(self.axes[name] for name in names)
        is_permute = collective.kind == "collective-permute"
        return names if is_permute or all(len(group) == whole for group in places) else ()


def named_mesh(module: HloModule) -> NamedMesh | None:
    """The only mesh whose axes collectives of `module` name; None if there is none, or more than one."""
    every = (i.proto.mesh_replica_groups.mesh for computation in module.computations for i in computation.instructions)
    found = {mesh.SerializeToString(deterministic=True): mesh for mesh in every if mesh.axes}
    if len(found) != 1:
        return None
    (mesh,) = found.values()
    axes = {axis.name: axis.size for axis in mesh.axes}
    ids = list(mesh.device_ids) or _iota(mesh.iota.reshape_dims or list(axes.values()), mesh.iota.transpose_perm)
    return NamedMesh(axes, dict(zip(ids, itertools.product(*map(range, axes.values())), strict=True)))


def _strides(dimensions: Sequence[int]) -> list[int]:
    strides = [1] * len(dimensions)
    for n in reversed(range(len(dimensions) - 1)):
        strides[n] = strides[n + 1] * dimensions[n + 1]
    return strides


def is_exclusive(instruction: Instruction) -> bool:
    """Whether `instruction` is a Mosaic kernel that waits for the same kernel on other devices."""
    if instruction.opcode != "custom-call":
        return False
    proto = instruction.proto
    return proto.custom_call_target.startswith(_KERNEL) and _PEERS in proto.backend_config


def exclusive_kernel(instruction: Instruction) -> Instruction | None:
    """The exclusive kernel (`is_exclusive`) in `instruction`; None if there is none.

    The instruction may be the kernel itself, or a fusion of the kernel with slices.
    """
    if instruction.opcode == "fusion":
        return next((i for i in instruction.called[0].instructions if is_exclusive(i)), None)
    return instruction if is_exclusive(instruction) else None
