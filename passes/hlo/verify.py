"""The checks that every pass's input and output must meet; each failure names the instruction.

XLA verifies modules too, but inside the compiler, where a failure ends the user's job. Here a module that
does not hold is dropped and the one before it used.
"""

from dhelix.passes.errors import DhelixError
from dhelix.passes.hlo import shapes
from dhelix.passes.hlo.module import Computation, HloModule, Instruction


class HloVerifyError(DhelixError):
    """The module is not well formed."""


def verify(module: HloModule) -> None:
    """Raises HloVerifyError naming the first instruction that breaks a rule. Linear in the module."""
    names: set[str] = set()
    known: set[Computation] = set()
    for computation in module.computations:
        _unique(names, computation.name, computation.name)
        _check_computation(computation, names, known)
        known.add(computation)
    if module.entry not in known:
        raise HloVerifyError(f"entry computation {module.entry.name} is not in the module")
    for computation, sequence in module.schedule.items():
        verify_sequence(computation, sequence)


def verify_sequence(computation: Computation, sequence: list[Instruction]) -> None:
    """A schedule is a permutation of the instructions; operands and control predecessors come first."""
    done: set[Instruction] = set()
    for instruction in sequence:
        for needed in (*instruction.operands, *instruction.control_predecessors):
            if needed not in done:
                raise HloVerifyError(
                    f"schedule of {computation.name}: {instruction.name} runs before {needed.name}, "
                    "which it needs"
                )
        if instruction in done or instruction.computation is not computation:
            raise HloVerifyError(f"schedule of {computation.name} holds {instruction.name} twice or wrongly")
        done.add(instruction)
    if len(done) != len(computation.instructions):
        missing = next(i for i in computation.instructions if i not in done)
        raise HloVerifyError(f"schedule of {computation.name} lacks {missing.name}")


def same_signature(a: HloModule, b: HloModule) -> bool:
    """Whether two modules take and return the same shapes."""
    before, after = a.entry.parameters, b.entry.parameters
    return (
        len(before) == len(after)
        and all(shapes.same(x.shape, y.shape) for x, y in zip(before, after, strict=True))
        and shapes.same(a.entry.root.shape, b.entry.root.shape)
    )


def _check_computation(computation: Computation, names: set[str], known: set[Computation]) -> None:
    seen: set[Instruction] = set()
    parameters = 0
    for instruction in computation.instructions:
        _unique(names, instruction.name, computation.name)
        for operand in instruction.operands:
            if operand not in seen:
                raise _error(
                    instruction, f"reads {operand.name}, which is not before it in {computation.name}"
                )
        for called in instruction.called:
            if called not in known:
                raise _error(
                    instruction, f"calls {called.name}, which does not stand before {computation.name}"
                )
        check = _CHECKS.get(instruction.opcode)
        if check is not None:
            check(instruction)
        parameters += instruction.opcode == "parameter"
        seen.add(instruction)
    for instruction in computation.instructions:
        for predecessor in instruction.control_predecessors:
            if predecessor not in seen:
                raise _error(
                    instruction, f"has control predecessor {predecessor.name} of another computation"
                )
    if computation.root not in seen:
        raise HloVerifyError(f"root of {computation.name} is not one of its instructions")
    numbers = [p.proto.parameter_number for p in computation.parameters]
    if numbers != list(range(parameters)):
        raise HloVerifyError(f"parameters of {computation.name} are numbered {numbers}")


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
    if len(instruction.called) != 2 or len(instruction.operands) != 1:
        raise _error(instruction, "needs one operand, a body and a condition")
    body, condition = instruction.called
    _expect(instruction, instruction.operands[0].shape, instruction.shape, "its initial state")
    for computation in (body, condition):
        if len(computation.parameters) != 1:
            raise _error(instruction, f"{computation.name} must have one parameter")
        _expect(
            instruction,
            computation.parameters[0].shape,
            instruction.shape,
            f"the parameter of {computation.name}",
        )
    _expect(instruction, body.root.shape, instruction.shape, f"the result of {body.name}")
    if condition.root.shape.element_type != shapes.PRED:
        raise _error(instruction, f"condition {condition.name} returns no predicate")


def _check_call(instruction: Instruction) -> None:
    parameters = instruction.called[0].parameters
    if len(parameters) != len(instruction.operands):
        raise _error(
            instruction, f"gives {len(instruction.operands)} arguments for {len(parameters)} parameters"
        )
    for operand, parameter in zip(instruction.operands, parameters, strict=True):
        _expect(instruction, operand.shape, parameter.shape, f"operand {operand.name}")


def _check_barrier(instruction: Instruction) -> None:
    _expect(instruction, instruction.operands[0].shape, instruction.shape, "its operand")


def _expect(instruction: Instruction, found: object, wanted: object, what: str) -> None:
    if not shapes.same(found, wanted):
        raise _error(instruction, f"{what} is {shapes.text(found)} where {shapes.text(wanted)} is needed")


def _unique(names: set[str], name: str, where: str) -> None:
    if name in names:
        raise HloVerifyError(f"{name} in {where}: the name is taken")
    names.add(name)


def _error(instruction: Instruction, message: str) -> HloVerifyError:
    return HloVerifyError(f"{instruction.name} ({instruction.opcode}) {message}")


_CHECKS = {
    "get-tuple-element": _check_element,
    "tuple": _check_tuple,
    "while": _check_while,
    "call": _check_call,
    "fusion": _check_call,
    "opt-barrier": _check_barrier,
}
