"""`while` loops: state, invariants, trip counts, and scalar integers that follow from the loop counter.

Trip counts are proved, never guessed: the part of the state that the loop condition depends on is executed
with XLA's integer semantics, from its constant initial values. That covers any counter that `lax.scan`,
`fori_loop` or `while_loop` can make of constants, up or down, by any step; a loop that depends on anything
else has no proved trip count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dhelix.passes.errors import PassRefusal
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.module import Computation, Instruction

_MAX_TRIPS = 1_000_000
_WIDTH = {shapes.S32: (32, True), shapes.U32: (32, False), shapes.S64: (64, True), shapes.U64: (64, False)}
_LITERAL = {
    shapes.PRED: "preds",
    shapes.S32: "s32s",
    shapes.S64: "s64s",
    shapes.U32: "u32s",
    shapes.U64: "u64s",
}
_COMPARE = {
    "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b, "NE": lambda a, b: a != b,
}  # fmt: skip
_BINARY = {
    "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
    "minimum": min, "maximum": max, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


class Unknown(Exception):
    """The value is not a scalar integer that follows from what is given."""


@dataclass(frozen=True)
class WhileLoop:
    """A `while` over a tuple. Raises PassRefusal when it is not of that form (every JAX loop is)."""

    instruction: Instruction

    def __post_init__(self) -> None:
        loop = self.instruction
        parameters = self.body.parameters
        if (
            loop.opcode != "while"
            or not shapes.is_tuple(loop.shape)
            or len(parameters) != 1
            or self.body.root.opcode != "tuple"
            or any(
                parameters[0] in i.operands and i.opcode != "get-tuple-element"
                for i in self.body.instructions
            )
        ):
            raise PassRefusal("the loop does not carry a tuple that its body takes apart and rebuilds", loop)

    @property
    def body(self) -> Computation:
        return self.instruction.called[0]

    @property
    def condition(self) -> Computation:
        return self.instruction.called[1]

    @property
    def size(self) -> int:
        """Number of elements of the loop state."""
        return len(self.instruction.shape.tuple_shapes)

    @cached_property
    def reads(self) -> dict[Instruction, int]:
        """The body's reads of its state: `get-tuple-element` -> index."""
        return {i: i.tuple_index for i in self.body.instructions if _reads_parameter(i)}

    @cached_property
    def invariants(self) -> frozenset[int]:
        """State elements that the body hands on as they are."""
        return frozenset(n for n, value in enumerate(self.body.root.operands) if self.reads.get(value) == n)

    def initial(self, index: int) -> Instruction | None:
        """The initial value of a state element where it can be named."""
        start = self.instruction.operands[0]
        return start.operands[index] if start.opcode == "tuple" else None

    @cached_property
    def condition_indices(self) -> frozenset[int]:
        """State elements that the condition reads."""
        live = [self.condition.root]
        seen: set[Instruction] = set()
        found = set()
        while live:
            instruction = live.pop()
            if instruction in seen:
                continue
            seen.add(instruction)
            if _reads_parameter(instruction):
                found.add(instruction.tuple_index)
            live.extend(instruction.operands)
        return frozenset(found)

    @cached_property
    def trip_count(self) -> int | None:
        """How often the body runs, where that follows from constants; else None."""
        counters = self.counters
        return None if counters is None else len(counters)

    @cached_property
    def counters(self) -> list[dict[int, int]] | None:
        """For each iteration, the values of the state elements that decide the trip count, at its start."""
        try:
            state = {k: self._initial_value(k) for k in self.condition_indices}
            history: list[dict[int, int]] = []
            while evaluate(self.condition.root, state):
                if len(history) == _MAX_TRIPS:
                    return None
                history.append(state)
                state = {k: evaluate(self.body.root.operands[k], state) for k in state}
        except Unknown:
            return None
        return history

    def _initial_value(self, index: int) -> int:
        value = self.initial(index)
        if value is None:
            raise Unknown
        return evaluate(value, {})

    def index_table(self, value: Instruction) -> list[int] | None:
        """`value`, a scalar of the body, in each iteration, where the loop counter decides it; else None."""
        if self.counters is None:
            return None
        try:
            return [evaluate(value, state) for state in self.counters]
        except Unknown:
            return None


def _reads_parameter(instruction: Instruction) -> bool:
    return instruction.opcode == "get-tuple-element" and instruction.operands[0].opcode == "parameter"


def evaluate(value: Instruction, state: Mapping[int, int]) -> int:
    """A scalar integer or predicate, given the known elements of the loop state. Raises Unknown."""
    memo: dict[Instruction, int] = {}
    stack = [value]
    while stack:
        top = stack[-1]
        if top in memo:
            stack.pop()
        elif _reads_parameter(top):
            if top.tuple_index not in state:
                raise Unknown
            memo[top] = state[top.tuple_index]
        else:
            waiting = [o for o in top.operands if o not in memo]
            if waiting:
                if len(stack) > 10_000 or top.opcode not in _EVALUABLE:
                    raise Unknown
                stack.extend(waiting)
            else:
                memo[top] = _apply(top, [memo[o] for o in top.operands])
    return memo[value]


_EVALUABLE = frozenset(_BINARY) | {
    "compare", "select", "clamp", "negate", "convert", "copy", "reshape", "bitcast", "not", "constant",
    "call",
}  # fmt: skip


def _apply(instruction: Instruction, operands: list[int]) -> int:
    shape, opcode = instruction.shape, instruction.opcode
    if shape.element_type not in _LITERAL or shapes.element_count(shape) != 1:
        raise Unknown
    if opcode == "constant":
        values = getattr(instruction.proto.literal, _LITERAL[shape.element_type])
        if len(values) != 1:
            raise Unknown
        return int(values[0])
    if opcode in _BINARY:
        result = _BINARY[opcode](*operands)
    elif opcode == "compare":
        return int(_COMPARE[instruction.proto.comparison_direction](*operands))
    elif opcode == "select":
        result = operands[1] if operands[0] else operands[2]
    elif opcode == "clamp":
        result = min(max(operands[1], operands[0]), operands[2])
    elif opcode == "negate":
        result = -operands[0]
    elif opcode == "not" and shape.element_type == shapes.PRED:
        return 1 - operands[0]
    elif opcode in ("convert", "copy", "reshape", "bitcast"):
        result = operands[0]
    elif opcode == "call":
        result = _call(instruction, operands)
    else:
        raise Unknown
    return _wrap(result, shape.element_type)


def _call(instruction: Instruction, operands: list[int]) -> int:
    callee = instruction.called[0]
    values = dict(zip(callee.parameters, operands, strict=True))
    for inner in callee.instructions:
        if inner not in values:
            if any(o not in values for o in inner.operands):
                raise Unknown
            values[inner] = _apply(inner, [values[o] for o in inner.operands])
    return values[callee.root]


def _wrap(value: int, element_type: int) -> int:
    """Two's complement of XLA's fixed-width integers; predicates are 0 or 1."""
    if element_type == shapes.PRED:
        return int(bool(value))
    bits, signed = _WIDTH[element_type]
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value
