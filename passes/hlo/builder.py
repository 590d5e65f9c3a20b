"""Builds new instructions and copies of existing ones."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from dhelix.passes.hlo import schema, shapes
from dhelix.passes.hlo.module import NEW, Computation, HloModule, Instruction


class Builder:
    """Appends instructions with unique names to one computation. `HloModule.to_bytes` gives them ids."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.module: HloModule = computation.module

    def make(
        self,
        opcode: str,
        shape: Any,
        operands: Iterable[Instruction] = (),
        name: str | None = None,
        called: Iterable[Computation] = (),
        **attributes: Any,
    ) -> Instruction:
        proto = schema.InstructionProto(
            name=self.module.unique_name(name or opcode), opcode=opcode, id=NEW, **attributes
        )
        proto.shape.CopyFrom(shape)
        return self._append(proto, operands, called)

    def copy(
        self,
        original: Instruction,
        operands: Iterable[Instruction],
        called: Iterable[Computation] | None = None,
    ) -> Instruction:
        """Appends a copy of `original` with other operands. The copy has no control predecessors."""
        proto = schema.InstructionProto()
        proto.CopyFrom(original.proto)
        proto.name = self.module.unique_name(original.name)
        proto.id = NEW
        del proto.control_predecessor_ids[:]
        return self._append(proto, operands, original.called if called is None else called)

    def _append(self, proto: Any, operands: Iterable[Instruction], called: Iterable[Computation]) -> Instruction:
        instruction = Instruction(proto, self.computation)
        instruction.operands = list(operands)
        instruction.called = list(called)
        self.computation.instructions.append(instruction)
        return instruction

    def parameter(self, number: int, shape: Any, name: str = "parameter") -> Instruction:
        return self.make("parameter", shape, name=name, parameter_number=number)

    def element(self, source: Instruction, index: int) -> Instruction:
        """Element `index` of a tuple. If `source` is a `tuple` instruction, returns the operand at `index`."""
        if source.opcode == "tuple":
            return source.operands[index]
        return self.make("get-tuple-element", source.shape.tuple_shapes[index], [source], tuple_index=index)

    def tuple(self, elements: Sequence[Instruction], name: str = "tuple") -> Instruction:
        return self.make("tuple", shapes.tuple_of(e.shape for e in elements), elements, name=name)

    def while_loop(
        self, initial: Instruction, body: Computation, condition: Computation, like: Instruction, name: str
    ) -> Instruction:
        """A loop that starts from `initial`, with the metadata and frontend attributes of `like`.

        The loop does not take over what the compiler recorded about `like`, such as its trip count and shardings.
        """
        loop = self.make("while", initial.shape, [initial], name=name, called=[body, condition])
        loop.proto.metadata.CopyFrom(like.proto.metadata)
        self.add_attributes(loop, like)
        return loop

    def add_attributes(self, instruction: Instruction, like: Instruction) -> None:
        """Adds those frontend attributes of `like` (see `attributes`) that `instruction` lacks."""
        own = instruction.proto.frontend_attributes.map
        for key, value in sorted(attributes(like).items()):
            if key not in own:
                own[key] = value

    def scalar(self, value: int | bool, element_type: int) -> Instruction:
        field = {
            shapes.PRED: "preds",
            shapes.S32: "s32s",
            shapes.S64: "s64s",
            shapes.U32: "u32s",
            shapes.U64: "u64s",
        }
        constant = self.make("constant", shapes.scalar(element_type))
        constant.proto.literal.shape.CopyFrom(constant.shape)
        getattr(constant.proto.literal, field[element_type]).append(value)
        return constant

    def number(self, value: float, element_type: int) -> Instruction:
        """A floating-point constant of type F32, F64, F16 (rounded) or BF16 (truncated)."""
        constant = self.make("constant", shapes.scalar(element_type))
        literal = constant.proto.literal
        literal.shape.CopyFrom(constant.shape)
        match element_type:
            case shapes.F32:
                literal.f32s.append(value)
            case shapes.F64:
                literal.f64s.append(value)
            case shapes.F16:
                literal.f16s = struct.pack("<e", value)
            case shapes.BF16:
                literal.bf16s = struct.pack("<f", value)[2:]
            case _:
                raise ValueError(f"no constant of type {element_type}")
        return constant

    def binary(self, opcode: str, a: Instruction, b: Instruction) -> Instruction:
        return self.make(opcode, a.shape, [a, b])

    def with_dimension_at(self, value: Instruction, old: int, new: int) -> Instruction:
        """Moves one dimension of `value` from `old` to `new`. The other dimensions keep their order."""
        if old == new:
            return value
        sizes = list(value.shape.dimensions)
        order = [d for d in range(len(sizes)) if d != old]
        order.insert(new, old)
        shape = shapes.array(value.shape.element_type, [sizes[d] for d in order])
        crossed = sizes[min(old, new) : max(old, new) + 1]
        del crossed[0 if old < new else -1]
        if all(size == 1 for size in crossed):
            return self.make("reshape", shape, [value])
        return self.make("transpose", shape, [value], dimensions=order)

    def barrier(self, values: Sequence[Instruction]) -> list[Instruction]:
        """Puts one optimization barrier on `values`: no result is available before all values are."""
        group = self.tuple(values)
        fence = self.make("opt-barrier", group.shape, [group])
        return [self.element(fence, n) for n in range(len(values))]

    def finish(self, root: Instruction) -> Computation:
        self.computation.root = root
        return self.computation


def attributes(instruction: Instruction) -> dict[str, str]:
    """Frontend attributes that `jax.experimental.xla_metadata` and others wrote on an instruction.

    Leaves out Shardy's attributes, because they fit only the instruction's own shape.
    """
    found = dict(instruction.proto.frontend_attributes.map)
    return {key: value for key, value in found.items() if not key.startswith("xla.sdy.")}
