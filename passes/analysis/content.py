"""What an instruction is, apart from names: instructions with equal content take the same time and do the same.

    fusion.7 = f32[8] fusion(a), kind=kLoop, calls=fused.7       fused.7: p.3, multiply.9 = multiply(p.3, p.3)
    fusion.8 = f32[8] fusion(b), kind=kLoop, calls=fused.8       fused.8: p.4, multiply.12 = multiply(p.4, p.4)

A step has each of its fusions once for each layer and micro-batch. Each has a computation of its own, which differs
from the others in names alone. Whoever computes something from fusions needs to do this only once for each content.

The content covers the operands' shapes, but not what computes the operands. It leaves out the metadata, so two contents
may be equal although the instructions come from different lines of the program. The number of a collective's channel is
a name, too. That of a message is not, because it says which send and recv belong together.
"""

from collections.abc import Callable, Hashable, Mapping

from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.schema import InstructionProto

_NAMES = ("name", "id", "operand_ids", "called_computation_ids", "control_predecessor_ids", "metadata")
_MESSAGES = frozenset(("send", "send-done", "recv", "recv-done"))


class Contents(dict[Instruction, Hashable]):
    """Maps instructions to their content, each found at its first lookup."""

    def __init__(self) -> None:
        super().__init__()
        self._computations: dict[Computation, Hashable] = {}
        self._known: dict[Hashable, Hashable] = {}  # equal contents become one object, which is compared fast

    def once[T](self, instruction: Instruction, known: dict[Hashable, T], make: Callable[[Instruction], T]) -> T:
        """`make(instruction)`; for fusions, from `known` if a fusion with equal content is there."""
        if instruction.opcode != "fusion":
            return make(instruction)
        content = self[instruction]
        if content not in known:
            known[content] = make(instruction)
        return known[content]

    def __missing__(self, instruction: Instruction) -> Hashable:
        operands = (o.shape.SerializeToString(deterministic=True) for o in instruction.operands)
        found = self[instruction] = self._one((self._of(instruction, {}), *operands))
        return found

    def _of(self, instruction: Instruction, places: Mapping[Instruction, int]) -> tuple[Hashable, ...]:
        own = InstructionProto()
        own.CopyFrom(instruction.proto)
        for field in _NAMES:
            own.ClearField(field)
        if own.channel_id and instruction.opcode not in _MESSAGES:
            own.channel_id = 1
        called = map(self.of_computation, instruction.called)
        after = tuple(map(places.get, instruction.control_predecessors))
        return own.SerializeToString(deterministic=True), after, *map(places.get, instruction.operands), *called

    def of_computation(self, computation: Computation) -> Hashable:
        """The content of a computation: that of its instructions, in their order."""
        if computation not in self._computations:
            places = {instruction: place for place, instruction in enumerate(computation.instructions)}
            parts = tuple(self._of(instruction, places) for instruction in computation.instructions)
            self._computations[computation] = self._one((places.get(computation.root), *parts))
        return self._computations[computation]

    def _one(self, content: Hashable) -> Hashable:
        return self._known.setdefault(content, content)
