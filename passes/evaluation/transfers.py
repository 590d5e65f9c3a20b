"""Data movement outside collectives: messages between two devices, and transfers to and from the host.

    send, recv                       pipeline permutes that XLA split; both ends of a message name the same channel
    copy-start, copy, fusions        one side is in host memory: its layout says `S(5)`
    MoveToHost, MoveToDevice         custom calls that request a transfer, in programs that are not yet compiled
    send, recv of the host, infeed, outfeed

Offloaded activations and optimizer states move in slices: by a dynamic-slice from host memory, or by an update in place
of a buffer in host memory, alone or fused. XLA runs transfers on copy engines, so their costs are on the host lane. A
fusion that computes with values in host memory is no transfer. It is a kernel that waits for these values
(`host_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dhelix.passes.analysis.collectives import Groups, device_groups
from dhelix.passes.evaluation.operator_work import read_bytes, written_bytes
from dhelix.passes.hlo import Instruction, shapes
from dhelix.profiles.keys import OperatorKey

SENDS = ("send", "recv")
TO_HOST, FROM_HOST = "copy to host", "copy from host"
_HOST_MEMORY = 5
_PAIRS = "_xla_send_recv_source_target_pairs"  # XLA's frontend attribute
_PAIR = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")
_ANNOTATIONS = {"MoveToHost": TO_HOST, "MoveToDevice": FROM_HOST}
_MOVES = frozenset(
    """parameter constant bitcast copy slice dynamic-slice dynamic-update-slice tuple get-tuple-element reshape
    transpose""".split()
)
_MEASURES = frozenset("add subtract multiply select compare clamp convert maximum minimum remainder divide".split())


@dataclass(frozen=True)
class Transfer:
    """A message or a transfer between host and device.

    Attributes:
      kind: `send`, `recv`, or `send/recv` if both ends of a channel are in one computation; else TO_HOST or FROM_HOST.
      size: bytes that one device sends or receives.
      groups: (source, target) pairs of a message.
      host: whether the data use the link to the host.
    """

    kind: str
    size: int
    groups: Groups = ()
    host: bool = False

    def group_size(self, default: int) -> int:
        """Number of GPUs that take part. `default` is not used; it is there as in `Collective.group_size`."""
        return 1 if self.host else 2


def find_transfer(instruction: Instruction) -> Transfer | None:
    """The transfer that begins at `instruction`, or None.

    A message with both ends in one computation begins at its recv.
    """
    opcode, proto = instruction.opcode, instruction.proto
    if opcode in SENDS:
        return _message(instruction)
    if opcode == "async-start":
        inside = (find_transfer(i) for called in instruction.called for i in called.instructions)
        return next((found for found in inside if found is not None), None)
    if opcode in ("infeed", "outfeed"):
        fed = instruction.shape if opcode == "infeed" else instruction.operands[0].shape
        return Transfer(FROM_HOST if opcode == "infeed" else TO_HOST, shapes.byte_size(fed), host=True)
    if opcode == "custom-call" and (kind := _ANNOTATIONS.get(proto.custom_call_target)):
        return Transfer(kind, shapes.byte_size(instruction.operands[0].shape), host=True)
    size = host_bytes(instruction) if _only_moves(instruction) else 0
    if not size:
        return None
    return Transfer(TO_HOST if _written_to_host(instruction) else FROM_HOST, size, host=True)


def begins_pair(instruction: Instruction) -> bool:
    """Whether the instruction is a send or recv: the start of an async pair that its `-done` ends."""
    return instruction.opcode in SENDS


def host_bytes(instruction: Instruction) -> int:
    """Bytes that an instruction moves between device and host memory. Copies and slices within host memory count 0."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in ("copy", "copy-start"):
        result = shapes.first(instruction.shape)
        return shapes.byte_size(result) if _on_host(result) is not _on_host(operands[0].shape) else 0
    if opcode in ("dynamic-slice", "slice", "dynamic-update-slice"):
        part = operands[1].shape if opcode == "dynamic-update-slice" else instruction.shape
        whole = instruction.shape if opcode == "dynamic-update-slice" else operands[0].shape
        return shapes.byte_size(part) if _on_host(whole) is not _on_host(part) else 0
    if opcode != "fusion" or not any(_any_on_host(v.shape) for v in (instruction, *operands)):
        return 0
    fused = instruction.called[0]
    users = fused.users()
    read = (
        read_bytes(parameter, users)
        for parameter, operand in zip(fused.parameters, operands, strict=True)
        if _on_host(operand.shape)
    )
    outputs = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    written = (written_bytes(o) for o, s in zip(outputs, _leaves(instruction.shape), strict=False) if _on_host(s))
    return sum(read) + sum(written)


def transfer_key(instruction: Instruction) -> OperatorKey | None:
    """The key of a transfer. No profile has such a key. None for other instructions."""
    found = find_transfer(instruction)
    if found is None:
        return None
    return OperatorKey("other", f"transfer:{'-'.join(found.kind.split())}", (found.size,), 0.0, found.size)


def _message(instruction: Instruction) -> Transfer | None:
    opcode, proto = instruction.opcode, instruction.proto
    size = shapes.byte_size(instruction.operands[0].shape if opcode == "send" else instruction.shape.tuple_shapes[0])
    if proto.is_host_transfer:
        return Transfer(TO_HOST if opcode == "send" else FROM_HOST, size, host=True)
    partner = next(
        (
            i
            for i in instruction.computation.instructions
            if i.opcode in SENDS and i.opcode != opcode and proto.channel_id and i.proto.channel_id == proto.channel_id
        ),
        None,
    )
    if partner is not None and opcode == "send":
        return None
    pairs = tuple((int(a), int(b)) for a, b in _PAIR.findall(proto.frontend_attributes.map.get(_PAIRS, "")))
    return Transfer(opcode if partner is None else "send/recv", size, pairs or device_groups(instruction))


def _on_host(shape: Any) -> bool:
    return shape.layout.memory_space == _HOST_MEMORY


def _leaves(shape: Any) -> Iterator[Any]:
    if not shapes.is_tuple(shape):
        yield shape
    for inner in shape.tuple_shapes:
        yield from _leaves(inner)


def _any_on_host(shape: Any) -> bool:
    return any(map(_any_on_host, shape.tuple_shapes)) if shapes.is_tuple(shape) else _on_host(shape)


def _written_to_host(instruction: Instruction) -> bool:
    return _any_on_host(instruction.shape.tuple_shapes[0] if instruction.opcode == "copy-start" else instruction.shape)


def _only_moves(instruction: Instruction) -> bool:
    """Whether copy engines can run `instruction`. They can if it computes nothing except slice positions."""
    if instruction.opcode != "fusion":
        return True
    inside = instruction.called[0].instructions
    return all(i.opcode in _MOVES or (i.opcode in _MEASURES and not i.shape.dimensions) for i in inside)
