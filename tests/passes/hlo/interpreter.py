"""A small interpreter of HLO over 32-bit integers, which returns a module's results and its effects in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dhelix.passes.hlo import Computation, Instruction

EFFECT = "effect"  # target of custom calls with a side effect; they return their operand
Value = Any  # an array, or a tuple of values
Trace = list[bytes]

_ARITHMETIC: dict[str, Callable[..., Value]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "negate": np.negative,
    "select": np.where,
    "copy": np.copy,
}


def run(computation: Computation, arguments: Sequence[Value]) -> tuple[Value, Trace]:
    """The result of `computation`, and the operands of its effects in order.

    Instructions run in the order in which they are listed. Raises KeyError if one is listed before its operand.
    """
    trace: Trace = []
    return _run(computation, arguments, trace), trace


def _run(computation: Computation, arguments: Sequence[Value], trace: Trace) -> Value:
    values: dict[Instruction, Value] = {}
    for instruction in computation.instructions:
        for needed in instruction.control_predecessors:
            values[needed]
        if instruction.opcode == "parameter":
            values[instruction] = arguments[instruction.proto.parameter_number]
        else:
            values[instruction] = _apply(instruction, [values[o] for o in instruction.operands], trace)
    return values[computation.root]


def _apply(instruction: Instruction, operands: list[Value], trace: Trace) -> Value:
    opcode = instruction.opcode
    if opcode in _ARITHMETIC:
        with np.errstate(over="ignore"):
            return _ARITHMETIC[opcode](*operands)
    if opcode == "constant":
        return np.int32(instruction.proto.literal.s32s[0])
    if opcode == "broadcast":
        return np.broadcast_to(operands[0], tuple(instruction.shape.dimensions))
    if opcode == "compare":
        direction = instruction.proto.comparison_direction
        assert direction in ("LT", "GT")
        return operands[0] < operands[1] if direction == "LT" else operands[0] > operands[1]
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "opt-barrier":
        return operands[0]
    if opcode == "get-tuple-element":
        return operands[0][instruction.tuple_index]
    if opcode == "dynamic-slice":
        return operands[0][_slot(operands[0], operands[1])]
    if opcode == "dynamic-update-slice":
        changed = operands[0].copy()
        changed[_slot(changed, operands[2])] = operands[1]
        return changed
    if opcode == "call":
        return _run(instruction.called[0], operands, trace)
    if opcode == "while":
        body, condition = instruction.called
        state = operands[0]
        while _run(condition, [state], trace):
            state = _run(body, [state], trace)
        return state
    if opcode == "reshape":
        return operands[0].reshape(tuple(instruction.shape.dimensions))
    assert instruction.proto.custom_call_target == EFFECT, opcode
    trace.append(operands[0].tobytes())
    return operands[0]


def same(a: Value, b: Value) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)


def _slot(stack: Value, index: Value) -> slice:
    """One slot of a stack. Asserts that the index is in range, which XLA would not report."""
    assert 0 <= index < len(stack)
    return slice(index, index + 1)
