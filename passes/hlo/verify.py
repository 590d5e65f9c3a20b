"""Verifies the input and the output of every pass. Each error names the instruction at fault.

XLA verifies modules too, but a failure inside the compiler ends the user's job. If a pass makes an invalid module,
dhelix drops that module and uses the module before the pass.
"""

from collections.abc import Callable

from dhelix.errors import DhelixError
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.hlo.module import Computation, HloModule, Instruction


class HloVerifyError(DhelixError):
    """The module is not well formed."""


def verify(module: HloModule, may_share: bool = False) -> None:
    """Checks the whole module, in time linear in its size.

    Args:
      may_share: whether several loops or fusions may call the same computation. Inside XLA they may do so between the
        partitioner and the pass that flattens the call graph.

    Raises:
      HloVerifyError: the module breaks a rule. The message names the first instruction or computation at fault.
    """
    computation_names: set[str] = set()  # an instruction and a computation may have the same name in XLA
    names: set[str] = set()
    known: set[Computation] = set()
    owners: dict[Computation, Instruction] = {}
    for computation in module.computations:
        if computation.name in computation_names:
            raise HloVerifyError(f"computation {computation.name}: the name is taken")
        computation_names.add(computation.name)
        _check_computation(computation, names, known, None if may_share else owners)
        known.add(computation)
    if module.entry not in known:
        raise HloVerifyError(f"entry computation {module.entry.name} is not in the module")
    for computation, sequence in module.schedule.items():
        verify_sequence(computation, sequence)
    if module.is_scheduled:
        _check_coverage(module)


def verify_sequence(computation: Computation, sequence: list[Instruction]) -> None:
    """Checks that a schedule holds each instruction exactly once, after its operands and control predecessors."""
    members = set(computation.instructions)
    done: set[Instruction] = set()
    for instruction in sequence:
        if instruction not in members:
            raise HloVerifyError(f"schedule of {computation.name} holds {instruction.name}, which is not in it")
        if instruction in done:
            raise HloVerifyError(f"schedule of {computation.name} holds {instruction.name} twice")
        for needed in (*instruction.operands, *instruction.control_predecessors):
            if needed not in done:
                raise HloVerifyError(
                    f"schedule of {computation.name}: {instruction.name} runs before {needed.name}, which it needs"
                )
        done.add(instruction)
    if len(done) != len(members):
        missing = next(i for i in computation.instructions if i not in done)
        raise HloVerifyError(f"schedule of {computation.name} lacks {missing.name}")


def _check_coverage(module: HloModule) -> None:
    """Checks that the entry computation, and every loop, branch and callee that it reaches, have a schedule."""
    pending: list[tuple[Computation, Instruction | None]] = [(module.entry, None)]
    done: set[Computation] = set()
    while pending:
        computation, caller = pending.pop()
        if computation in done:
            continue
        done.add(computation)
        if computation not in module.schedule:
            who = f"{caller.name} ({caller.opcode})" if caller else "the module"
            raise HloVerifyError(f"{who} runs {computation.name}, which has no schedule in a scheduled module")
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                pending.extend((called, instruction) for called in instruction.called)


def same_signature(a: HloModule, b: HloModule) -> bool:
    """Whether two modules have the same parameter shapes and the same result shape."""
    before, after = a.entry.parameters, b.entry.parameters
    return (
        len(before) == len(after)
        and all(shapes.same(x.shape, y.shape) for x, y in zip(before, after, strict=True))
        and shapes.same(a.entry.root.shape, b.entry.root.shape)
    )


def _check_computation(
    computation: Computation,
    names: set[str],
    known: set[Computation],
    owners: dict[Computation, Instruction] | None,
) -> None:
    """Checks one computation.

    `owners` maps a computation to the only loop or fusion that may call it. It is None if several loops or fusions may
    call one computation.
    """
    late = f"which is not before it in {computation.name}"
    seen: set[Instruction] = set()
    for instruction in computation.instructions:
        if instruction in seen or instruction.computation is not computation:
            raise _error(instruction, f"is in {computation.name} twice or belongs to another computation")
        if instruction.name in names:
            raise _error(instruction, f"in {computation.name}: the name is taken")
        names.add(instruction.name)
        for operand in instruction.operands:
            if operand not in seen:
                raise _error(instruction, f"reads {operand.name}, {late}")
        for needed in instruction.control_predecessors:
            if needed not in seen:
                raise _error(instruction, f"must follow {needed.name}, {late}")
        for called in instruction.called:
            if called not in known:
                raise _error(instruction, f"calls {called.name}, which is not before {computation.name}")
            if owners is None or instruction.opcode not in _OWNERS:
                continue
            owner = owners.setdefault(called, instruction)
            if owner is not instruction:
                raise _error(instruction, f"shares {called.name} with {owner.name}; it needs a copy")
        if len(instruction.operands) < _LEAST.get(instruction.opcode, 0):
            raise _error(
                instruction, f"has {len(instruction.operands)} operands but needs at least {_LEAST[instruction.opcode]}"
            )
        if instruction.opcode in _CHECKS:
            _check_instruction(instruction, *_CHECKS[instruction.opcode])
        seen.add(instruction)
    if computation.root not in seen:
        raise HloVerifyError(f"root of {computation.name} is not one of its instructions")
    numbers = [p.proto.parameter_number for p in computation.parameters]
    if numbers != list(range(len(numbers))):
        raise HloVerifyError(f"parameters of {computation.name} are numbered {numbers}")


def _check_instruction(
    instruction: Instruction, operands: int | None, called: int | None, check: Callable[[Instruction], None]
) -> None:
    if operands is not None and len(instruction.operands) != operands:
        raise _error(instruction, f"has {len(instruction.operands)} operands, not {operands}")
    if called is not None and len(instruction.called) != called:
        raise _error(instruction, f"calls {len(instruction.called)} computations, not {called}")
    check(instruction)


def _check_element(instruction: Instruction) -> None:
    source = instruction.operands[0].shape
    index = instruction.tuple_index
    if not 0 <= index < len(source.tuple_shapes):
        raise _error(instruction, f"reads element {index} of a tuple of {len(source.tuple_shapes)}")
    _expect(instruction, source.tuple_shapes[index], instruction.shape, "its tuple element")


def _check_tuple(instruction: Instruction) -> None:
    if len(instruction.shape.tuple_shapes) != len(instruction.operands):
        raise _error(instruction, f"has {len(instruction.operands)} operands for another tuple shape")
    for operand, shape in zip(instruction.operands, instruction.shape.tuple_shapes, strict=True):
        _expect(instruction, operand.shape, shape, f"operand {operand.name}")


def _check_while(instruction: Instruction) -> None:
    body, condition = instruction.called
    _expect(instruction, instruction.operands[0].shape, instruction.shape, "its initial state")
    for computation in (body, condition):
        _check_passed(instruction, instruction.operands, computation)
    _expect(instruction, body.root.shape, instruction.shape, f"the result of {body.name}")
    if condition.root.shape.element_type != shapes.PRED or condition.root.shape.dimensions:
        raise _error(instruction, f"condition {condition.name} returns no predicate")


def _check_call(instruction: Instruction) -> None:
    (callee,) = instruction.called
    _check_passed(instruction, instruction.operands, callee)
    _expect(instruction, callee.root.shape, instruction.shape, f"the result of {callee.name}")


def _check_conditional(instruction: Instruction) -> None:
    arguments = instruction.operands[1:]
    if not arguments or len(arguments) != len(instruction.called):
        raise _error(instruction, f"has {len(arguments)} arguments for {len(instruction.called)} branches")
    for argument, branch in zip(arguments, instruction.called, strict=True):
        _check_passed(instruction, [argument], branch)
        _expect(instruction, branch.root.shape, instruction.shape, f"the result of {branch.name}")


def _check_passed(instruction: Instruction, arguments: list[Instruction], callee: Computation) -> None:
    parameters = callee.parameters
    if len(parameters) != len(arguments):
        raise _error(instruction, f"gives {len(arguments)} arguments for {len(parameters)} parameters of {callee.name}")
    for argument, parameter in zip(arguments, parameters, strict=True):
        _expect(instruction, argument.shape, parameter.shape, f"{argument.name} for {callee.name}")


def _check_dot(instruction: Instruction) -> None:
    of, (lhs, rhs, *_) = instruction.proto.dot_dimension_numbers, instruction.operands
    for side, numbers in (
        (lhs, (*of.lhs_contracting_dimensions, *of.lhs_batch_dimensions)),
        (rhs, (*of.rhs_contracting_dimensions, *of.rhs_batch_dimensions)),
    ):
        if any(not 0 <= number < len(side.shape.dimensions) for number in numbers):
            raise _error(instruction, f"contracts dimensions {list(numbers)} of {shapes.text(side.shape)}")


def _check_barrier(instruction: Instruction) -> None:
    _expect(instruction, instruction.operands[0].shape, instruction.shape, "its operand")


def _expect(instruction: Instruction, found: object, wanted: object, what: str) -> None:
    if not shapes.same(found, wanted):
        raise _error(instruction, f"{what} is {shapes.text(found)} where {shapes.text(wanted)} is needed")


def _error(instruction: Instruction, message: str) -> HloVerifyError:
    return HloVerifyError(f"{instruction.name} ({instruction.opcode}) {message}")


_PAIRS = ("all-gather", "all-reduce", "collective-permute", "copy", "send", "recv", "async")
# opcode -> least number of operands
_LEAST = {
    **{"dot": 2, "dynamic-update-slice": 2, "scatter": 3, "async-update": 1},
    **{f"{opcode}-done": 1 for opcode in _PAIRS},
    **dict.fromkeys(("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute"), 1),
    **dict.fromkeys(("collective-broadcast", "ragged-all-to-all", "send", "copy", "copy-start"), 1),
    **dict.fromkeys(("all-gather-start", "all-reduce-start", "collective-permute-start"), 1),
}
_OWNERS = ("while", "fusion")  # opcodes whose called computations belong to one instruction

# opcode -> number of operands, number of called computations (None: any), further check
_CHECKS: dict[str, tuple[int | None, int | None, Callable[[Instruction], None]]] = {
    "get-tuple-element": (1, 0, _check_element),
    "tuple": (None, 0, _check_tuple),
    "while": (1, 2, _check_while),
    "call": (None, 1, _check_call),
    "fusion": (None, 1, _check_call),
    "conditional": (None, None, _check_conditional),
    "dot": (None, 0, _check_dot),
    "opt-barrier": (1, 0, _check_barrier),
}
