"""Signatures: bytes that are equal for two instructions that do the same to their operands."""

import hashlib

from dhelix.passes.hlo import Computation, Instruction

_ACCIDENTAL = (
    "name", "id", "metadata", "operand_ids", "control_predecessor_ids", "called_computation_ids", "channel_id",
)  # fmt: skip


class Signatures:
    """Computes signatures and caches them. Instructions must not change while the cache is in use."""

    def __init__(self) -> None:
        self._of: dict[Instruction, bytes] = {}
        self._of_computation: dict[Computation, bytes] = {}

    def of(self, instruction: Instruction) -> bytes:
        """The signature: opcode, shape, attributes and what callees compute, but not the operands."""
        if instruction not in self._of:
            what = type(instruction.proto)()
            what.CopyFrom(instruction.proto)
            for name in _ACCIDENTAL:
                what.ClearField(name)
            parts = [what.SerializeToString(deterministic=True), *map(self._computation, instruction.called)]
            self._of[instruction] = parts[0] if len(parts) == 1 else _digest(parts)
        return self._of[instruction]

    def _computation(self, computation: Computation) -> bytes:
        if computation not in self._of_computation:
            number = {i: n for n, i in enumerate(computation.instructions)}
            parts = [str(number[computation.root]).encode()]
            for i in computation.instructions:
                read = [number[o] for o in i.operands] + [-1 - number[p] for p in i.control_predecessors]
                parts += [self.of(i), repr(read).encode()]
            self._of_computation[computation] = _digest(parts)
        return self._of_computation[computation]


def _digest(parts: list[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
