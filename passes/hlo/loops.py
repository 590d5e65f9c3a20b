"""`while` loops: state, invariants, trip counts, and scalar integers that follow from the loop counter.

A trip count is *proved* if it follows from constants; it is never guessed. `WhileLoop.counters` takes the part of the
loop state that the loop condition depends on. From the constant initial values of this part, it computes the values in
each iteration, with XLA's integer semantics. These values are the loop's *proved counters*. This covers any counter
that `lax.scan`, `fori_loop` or `while_loop` makes from constants, up or down, with any step. A loop whose condition
depends on anything else has no proved trip count. Where the body adds a constant to a counter that is compared with a
constant, `trip_count` divides. So it is known for loops of any length.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.module import Computation, Instruction

_MAX_TRIPS = 20_000  # bounds the evaluation time; real loops over micro-batches or layers are far shorter
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
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_BINARY = {
    "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
    "divide": lambda a, b: _divide(a, b), "remainder": lambda a, b: a - b * _divide(a, b),
    "minimum": min, "maximum": max, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


class Unknown(Exception):
    """A value is no scalar integer, or does not follow from the given values."""


def _divide(a: int, b: int) -> int:
    """Divides towards zero, as XLA does."""
    if b == 0:
        raise Unknown
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@dataclass(frozen=True)
class WhileLoop:
    """A `while` whose state is a tuple.

    Raises PassRefusal for other loops, such as JAX's loops over a single array.
    """

    instruction: Instruction

    def __post_init__(self) -> None:
        loop = self.instruction
        parameters = self.body.parameters if loop.opcode == "while" else []
        if (
            not shapes.is_tuple(loop.shape)
            or len(parameters) != 1
            or self.body.root.opcode != "tuple"
            or any(parameters[0] in i.operands and i.opcode != "get-tuple-element" for i in self.body.instructions)
        ):
            raise PassRefusal("the loop does not carry a tuple that its body reads by element and rebuilds", loop)

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
        """Maps each `get-tuple-element` that reads the state in the body to the index of the state element."""
        return {i: i.tuple_index for i in self.body.instructions if _reads_parameter(i)}

    @cached_property
    def invariants(self) -> frozenset[int]:
        """State elements that the body returns unchanged."""
        return frozenset(n for n, value in enumerate(self.body.root.operands) if self.reads.get(value) == n)

    def initial(self, index: int) -> Instruction | None:
        """The initial value of a state element; None if the initial state is not a `tuple` instruction."""
        start = self.instruction.operands[0]
        return start.operands[index] if start.opcode == "tuple" else None

    @cached_property
    def condition_indices(self) -> frozenset[int]:
        """State elements that the condition reads."""
        return frozenset(_indices_read([self.condition.root]))

    @cached_property
    def deciding_indices(self) -> frozenset[int]:
        """State elements that decide the trip count.

        These are the elements that the condition reads, and all elements that they depend on.
        """
        return self._sources([self.condition.root])

    @cached_property
    def induction_index(self) -> int | None:
        """The loop counter: the only deciding state element that changes; None if several or none change."""
        changing = self.deciding_indices - self.invariants
        return min(changing) if len(changing) == 1 else None

    @cached_property
    def trip_count(self) -> int | None:
        """How often the body runs; None if the number does not follow from constants."""
        counted = self._divided()
        if counted is not None:
            return counted
        return None if self.counters is None else len(self.counters)

    def _divided(self) -> int | None:
        """The trip count if the condition compares counters with a constant step; None if the loop is not like this.

        The condition may be several comparisons, joined by `and`. The first one that fails ends the loop.
        """
        try:
            state = {k: self._initial_value(k) for k in sorted(self.deciding_indices)}
            fixed = {k: value for k, value in state.items() if k in self.invariants}
            tests = [
                _compared(test, self.deciding_indices - self.invariants, fixed) for test in _joined(self.condition)
            ]
            steps = {index: _added(_operation(self.body.root.operands[index]), index, fixed) for index, *_ in tests}
            count = min(_trips(state[index], steps[index], limit, direction) for index, limit, direction in tests)
        except Unknown:
            return None
        for index, step in steps.items():
            last, kind = state[index] + count * step, self.instruction.shape.tuple_shapes[index].element_type
            if _wrap(last, kind) != last:
                return None
        return count

    @cached_property
    def counters(self) -> list[dict[int, int]] | None:
        """For each iteration, the values of the deciding elements at its start; None if they are not proved.

        `deciding_indices` lists the deciding elements.
        """
        try:
            state = {k: self._initial_value(k) for k in sorted(self.deciding_indices)}
            history: list[dict[int, int]] = []
            while evaluate(self.condition.root, state):
                history.append(state)
                state = {k: evaluate(self.body.root.operands[k], state) for k in state}
                if len(history) == _MAX_TRIPS or state == history[-1]:  # a loop with an unchanged state never ends
                    return None
        except Unknown:
            return None
        return history

    def _initial_value(self, index: int) -> int:
        value = self.initial(index)
        if value is None:
            raise Unknown
        return evaluate(value, {})

    def index_table(self, value: Instruction) -> list[int] | None:
        """For each iteration, the value of the body's scalar `value`; None if it does not follow from constants."""
        if self.counters is None:
            return None
        needed = self._sources([value])
        try:
            state = {k: self._initial_value(k) for k in sorted(needed - self.deciding_indices)}
            table = []
            for deciding in self.counters:
                known = state | deciding
                table.append(evaluate(value, known))
                state = {k: evaluate(self.body.root.operands[k], known) for k in state}
        except Unknown:
            return None
        return table

    def _sources(self, values: Iterable[Instruction]) -> frozenset[int]:
        """State elements that `values` depend on, over any number of iterations."""
        found: set[int] = set()
        reached = _indices_read(values)
        while reached != found:
            found = reached
            reached = found | _indices_read(self.body.root.operands[k] for k in found)
        return frozenset(found)


def proved_trip_count(loop: Instruction) -> int | None:
    """Trip count of a `while`; None if it is not proved or `WhileLoop` does not accept the loop."""
    try:
        return WhileLoop(loop).trip_count
    except PassRefusal:
        return None


def _indices_read(values: Iterable[Instruction]) -> set[int]:
    """State elements that `values` depend on within one iteration."""
    pending = list(values)
    seen: set[Instruction] = set()
    found: set[int] = set()
    while pending:
        top = pending.pop()
        if top not in seen:
            seen.add(top)
            pending.extend(top.operands)
            if _reads_parameter(top):
                found.add(top.tuple_index)
    return found


_COPIES = ("copy", "reshape", "bitcast")


def _operation(value: Instruction) -> tuple[Instruction, list[Instruction]] | None:
    """The operation that makes a value, and its operands. It may be the only one of a call or a fusion."""
    while value.opcode in _COPIES:
        value = value.operands[0]
    if value.opcode not in ("call", "fusion"):
        return value, value.operands
    callee = value.called[0]
    if not all(operand.opcode == "parameter" for operand in callee.root.operands):
        return None
    return callee.root, [value.operands[operand.proto.parameter_number] for operand in callee.root.operands]


def _joined(condition: Computation) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """The comparisons that must all hold for another iteration. Raises Unknown if there is anything else."""
    pending = [condition.root]
    while pending:
        found = _operation(pending.pop())
        if found is None or found[0].opcode not in ("and", "compare"):
            raise Unknown
        if found[0].opcode == "compare":
            yield found
        else:
            pending.extend(found[1])


def _counter(value: Instruction) -> int | None:
    """The index of the state element that `value` is, or None."""
    while value.opcode in _COPIES:
        value = value.operands[0]
    return value.tuple_index if _reads_parameter(value) else None


def _compared(
    test: tuple[Instruction, list[Instruction]], counters: Collection[int], fixed: Mapping[int, int]
) -> tuple[int, int, str]:
    """The counter that is compared, with what, and the direction of the comparison with the counter on the left."""
    comparison, (left, right) = test
    direction = comparison.proto.comparison_direction
    if (index := _counter(left)) in counters and index is not None:
        return index, evaluate(right, fixed), direction
    if (index := _counter(right)) in counters and index is not None:
        return index, evaluate(left, fixed), _MIRRORED[direction]
    raise Unknown


def _added(change: tuple[Instruction, list[Instruction]] | None, index: int, fixed: Mapping[int, int]) -> int:
    """What the body adds to the counter."""
    if change is None or change[0].opcode not in ("add", "subtract"):
        raise Unknown
    left, right = change[1]
    if _counter(left) == index:
        return evaluate(right, fixed) * (1 if change[0].opcode == "add" else -1)
    if _counter(right) == index and change[0].opcode == "add":
        return evaluate(left, fixed)
    raise Unknown


def _trips(start: int, step: int, limit: int, direction: str) -> int:
    """How often a loop runs whose counter moves from `start` by `step` while it compares so with `limit`.

    Raises Unknown if the comparison holds for ever, or until the counter wraps around.
    """
    if not _COMPARE[direction](start, limit):
        return 0
    if direction == "EQ" and step:
        return 1
    way = limit - start + {"LE": 1, "GE": -1}.get(direction, 0)
    if way * step <= 0 or (direction == "NE" and way % step):
        raise Unknown
    return -(-abs(way) // abs(step))


def _reads_parameter(instruction: Instruction) -> bool:
    return instruction.opcode == "get-tuple-element" and instruction.operands[0].opcode == "parameter"


def evaluate(value: Instruction, state: Mapping[int, int], known: Mapping[Instruction, int] | None = None) -> int:
    """Evaluates a scalar integer or predicate.

    Args:
      state: values of elements of the loop state.
      known: values of other instructions.

    Raises:
      Unknown: the value does not follow from `state` and `known`.
    """
    memo: dict[Instruction, int] = dict(known or {})
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
                if len(stack) > 10_000 or not (top.opcode in _EVALUABLE or is_sharding_constraint(top)):
                    raise Unknown
                stack.extend(waiting)
            else:
                memo[top] = _apply(top, [memo[o] for o in top.operands])
    return memo[value]


_EVALUABLE = frozenset(_BINARY) | {
    "compare", "select", "clamp", "negate", "convert", "copy", "reshape", "bitcast", "not", "constant",
    "call", "fusion",
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
    elif opcode in ("convert", "copy", "reshape", "bitcast") or is_sharding_constraint(instruction):
        result = operands[0]
    elif opcode in ("call", "fusion"):
        callee = instruction.called[0]
        result = evaluate(callee.root, {}, dict(zip(callee.parameters, operands, strict=True)))
    else:
        raise Unknown
    return _wrap(result, shape.element_type)


def _wrap(value: int, element_type: int) -> int:
    """Wraps a number to one of XLA's fixed-width two's complement integers. A predicate becomes 0 or 1."""
    if element_type == shapes.PRED:
        return int(bool(value))
    bits, signed = _WIDTH[element_type]
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value
