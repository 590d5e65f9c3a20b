"""Finds the instructions of a compiled step that can run alone, and their inputs.

An operator is an instruction of the scheduled GPU module. There is one operator for each profile key. An operator is
replayed as XLA compiled it, so it needs only inputs. The inputs depend on what the operator reads in the step:

  - a constant: the same constant;
  - a scalar integer or flag, such as the layer index of a dynamic-slice: zero, which is in range;
  - any other array: a flat `Buffer` with its element type and element count. A bitcast gives the buffer the shape and
    layout that the operator was compiled for.

    operators, refused = find_operators(compiled_module, key_of)
    operators[0].buffers        # (Buffer("bf16", 33554432, 67108864), ...)
    refused                     # (("recv.3", "it has side effects"),)

XLA slices some operands by a loop's iteration number without reading an index (`dynamic_slice_config`). Without a loop,
XLA takes the slice of the first iteration. An instruction that cannot run alone is refused with a reason.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.analysis.buffers import Buffers
from dhelix.passes.analysis.collectives import find_collective, is_done, is_start
from dhelix.passes.analysis.execution import instructions, once
from dhelix.passes.evaluation.operator_keys import FREE_OPCODES
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.keys import Key

_INTEGERS = (shapes.PRED, shapes.S32, shapes.S64, shapes.U32, shapes.U64)
# Libraries and kernels that keep no state between calls. HLO does not say whether others do.
_STATELESS = re.compile(r"__cu(blas|dnn|b)\$|__gpu\$|__triton|triton_kernel_call|mosaic_gpu|te_|cu_threefry")
# Libraries whose integer arrays are lengths: of sequences, or of a grouped product's groups.
_MEASURED_BY_NUMBERS = re.compile(r"__cudnn\$|__cublas\$lt\$grouped")
_HOST_MEMORY = 5


@dataclass(frozen=True, order=True)
class Buffer:
    """A flat array on one GPU.

    Attributes:
      element_type: HLO's name, such as "bf16" or "pred".
      elements: number of elements.
      bytes: size in bytes, which follows from type and number of elements.
    """

    element_type: str
    elements: int
    bytes: int

    @classmethod
    def of(cls, array: Any) -> Buffer:
        """The buffer from which an array of this shape can be read."""
        return cls(shapes.type_name(array), shapes.element_count(array), shapes.byte_size(array))


@dataclass(frozen=True)
class Operator:
    """The operator that represents one key.

    Attributes:
      instruction: the step's instruction: a fusion, a custom call, a collective, or the start of an async pair.
    """

    key: Key
    instruction: Instruction

    @property
    def core(self) -> Instruction:
        """The instruction that does the work: `instruction` itself, or the one inside an async pair."""
        return _inside(self.instruction)

    @property
    def is_collective(self) -> bool:
        return find_collective(self.core) is not None

    @property
    def gpus(self) -> int:
        """Number of GPUs that a run needs: enough for all devices in a collective's groups."""
        found = find_collective(self.instruction)
        return 1 + max((device for group in (found.groups if found else ()) for device in group), default=0)

    @cached_property
    def operands(self) -> tuple[Instruction, ...]:
        """The step's value of each operand of `core`."""
        return _given(self.instruction)

    @cached_property
    def inputs(self) -> tuple[Instruction, ...]:
        """The distinct `operands`."""
        return tuple(dict.fromkeys(self.operands))

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the operator reads: one for each array that is neither a constant nor an index."""
        arrays = (leaf for value in self.inputs if not is_constant(value) for leaf in leaves(value.shape))
        return tuple(Buffer.of(array) for array in arrays if not is_index(array))


@dataclass(frozen=True)
class Template:
    """An operator copied into another module. Instances are copies of the template; nothing calls the template itself.

    Attributes:
      computation: the inputs as parameters, and the operator as the root.
      copied: for each array of each input, whether an instance needs its own copy. This is the case if the operator
        overwrites the array, or if the array is in another memory space.
      config: backend configuration of an async start around the operator.
      context: elements of this async start's shape after operands and result.
    """

    computation: Computation
    copied: tuple[tuple[bool, ...], ...]
    config: bytes
    context: tuple[Any, ...]

    @property
    def core(self) -> Instruction:
        return self.computation.root


def find_operators(
    module: HloModule, key_of: Callable[[Instruction], Key | None]
) -> tuple[tuple[Operator, ...], tuple[tuple[str, str], ...]]:
    """Finds the operators of a compiled step, and the instructions that cannot run alone.

    Args:
      module: the module as XLA compiled and scheduled it.
      key_of: gives the key of an instruction or of the start of an async pair; None if the instruction costs nothing.

    Returns:
      First, one operator for each key, in the order of first execution. Second, a pair for each key without an
      operator: the name of its first instruction, and the reason why this instruction cannot run alone. An instruction
      without a key that cannot run alone has a pair, too.

    Raises:
      DhelixError: the module is not scheduled.
    """
    if not module.is_scheduled:
        raise DhelixError(f"{module.name} has no schedule; give the compiled module, not the lowered one")
    found: dict[Key, Operator] = {}
    refused: dict[Key | str, tuple[str, str]] = {}
    for instruction in _launching(module.entry):
        reason = _why_not(instruction)
        key = key_of(instruction)
        if reason is not None:
            refused.setdefault(instruction.name if key is None else key, (instruction.name, reason))
        elif key is not None:
            found.setdefault(key, Operator(key, instruction))
    return tuple(found.values()), tuple(why for key, why in refused.items() if key not in found)


def bring(module: HloModule, operator: Operator, workspaces: Mapping[str, Any]) -> Template:
    """Makes a template of `operator` in `module`. `workspaces` comes from `library_workspaces`."""
    core = operator.core
    computation = module.new_computation("replayed")
    builder = Builder(computation)
    parameters = {s: builder.parameter(n, s.shape) for n, s in enumerate(operator.inputs)}
    called = [_bring(module, c) for c in core.called]
    root = builder.copy(core, [parameters[o] for o in operator.operands], called)
    root.proto.ClearField("metadata")
    if (workspace := workspaces.get(call_signature(root))) is not None:
        root.shape.tuple_shapes[-1].CopyFrom(workspace)
    module.schedule[builder.finish(root)] = list(computation.instructions)
    buffers = Buffers(computation)
    written = set(buffers.accesses[root].writes)
    copied = tuple(
        tuple(
            buffer in written or memory_space(array) != 0
            for buffer, array in zip(buffers.leaves(parameter), leaves(parameter.shape), strict=True)
        )
        for parameter in parameters.values()
    )
    return Template(computation, copied, *_start_like(operator))


def library_workspaces(placeholder: Computation) -> dict[str, Any]:
    """Maps `call_signature` to the shape of the workspace, for the library calls that `LibraryCalls` added.

    XLA looks up a cuDNN graph by the call, including the call's workspace. In a step compiled without a GPU, workspaces
    are empty.
    """
    calls = (i for i in placeholder.instructions if i.opcode == "custom-call" and shapes.is_tuple(i.shape))
    return {call_signature(call): call.shape.tuple_shapes[-1] for call in calls}


def call_signature(call: Instruction) -> str:
    """Text that identifies a library call: everything but the workspace, which is its last result."""
    arrays = [o.shape for o in call.operands] + list(call.shape.tuple_shapes[:-1])
    return " ".join((call.opcode, call.proto.custom_call_target, *map(shapes.text, arrays)))


def arguments_of(placeholder: Computation) -> dict[Buffer, list[Instruction]]:
    """Maps each kind of buffer to the placeholder's parameters of that kind."""
    arguments: dict[Buffer, list[Instruction]] = {}
    for parameter in placeholder.parameters:
        arguments.setdefault(Buffer.of(parameter.shape), []).append(parameter)
    return arguments


def leaves(shape: Any) -> Iterator[Any]:
    """The arrays of a shape, in order."""
    if shapes.is_tuple(shape):
        for element in shape.tuple_shapes:
            yield from leaves(element)
    else:
        yield shape


def is_constant(value: Instruction) -> bool:
    """Whether `value` is a constant array, so that a replay reads the same value."""
    return value.opcode == "constant" and not shapes.is_tuple(value.shape)


def is_index(array: Any) -> bool:
    """Whether the array is a scalar integer or flag, so it may index another array."""
    return not array.dimensions and array.element_type in _INTEGERS


def _is_integers(array: Any) -> bool:
    return bool(array.dimensions) and array.element_type in _INTEGERS


def memory_space(array: Any) -> int:
    """The memory space of an array. 0 is device memory; others are special, such as memory registered with NCCL."""
    return array.layout.memory_space


def content(instruction: Instruction) -> Iterator[bytes]:
    """Yields serialized forms of an instruction and of everything that it calls, for a digest."""
    for inner in _with_called(instruction):
        yield inner.proto.SerializeToString(deterministic=True)


def _launching(entry: Computation) -> Iterator[Instruction]:
    """Instructions that launch kernels, in execution order, also in loop conditions. Visits each computation once."""
    for instruction, _ in instructions(entry, once(lambda control: control.called)):
        if instruction.opcode not in CONTROL_FLOW | FREE_OPCODES and not is_done(instruction):
            yield instruction


def _inside(instruction: Instruction) -> Instruction:
    return instruction.called[0].root if instruction.opcode == "async-start" else instruction


def _given(instruction: Instruction) -> tuple[Instruction, ...]:
    """The step's value of each operand of `instruction`, or of the instruction inside an async pair."""
    core = _inside(instruction)
    if core is instruction:
        return tuple(core.operands)
    return tuple(instruction.operands[parameter.proto.parameter_number] for parameter in core.operands)


def _why_not(instruction: Instruction) -> str | None:
    """Why `instruction` cannot run alone, or None."""
    core = _inside(instruction)
    if any(has_side_effect(i) for i in (instruction, core)):
        return "it has side effects"
    if core is not instruction and any(
        i.opcode != "parameter" and i is not core for i in instruction.called[0].instructions
    ):
        return "it is an asynchronous computation of several instructions"
    if any(i.opcode in CONTROL_FLOW for i in _with_called(core)):
        return "it runs a loop, a call or a branch"
    if is_start(core):
        return f"{core.opcode} is not of the form async-start"
    if core.opcode == "ragged-all-to-all":
        return "its time depends on the sizes that it reads"
    for target in (i.proto.custom_call_target for i in _with_called(core)):
        if target and not _STATELESS.match(target):
            return f"custom call {target} may keep state of its own"
    if core.opcode == "custom-call" and _MEASURED_BY_NUMBERS.match(core.proto.custom_call_target):
        if any(v.opcode != "constant" and _is_integers(leaf) for v in _given(instruction) for leaf in leaves(v.shape)):
            return "the memory that it touches depends on lengths that it reads"
    arrays = [leaf for value in (core, *core.operands) for leaf in leaves(value.shape)]
    if any(array.element_type == shapes.TOKEN for array in arrays):
        return "it needs a token"
    if any(memory_space(array) == _HOST_MEMORY for array in arrays):
        return "it reads or writes host memory"
    return None


def _with_called(instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    for inner in itertools.chain.from_iterable(called.instructions for called in instruction.called):
        yield from _with_called(inner)


def _start_like(operator: Operator) -> tuple[bytes, tuple[Any, ...]]:
    """`Template.config` and `Template.context` of `operator`, as XLA writes them."""
    instruction = operator.instruction
    if is_start(instruction):
        return instruction.proto.backend_config, tuple(instruction.shape.tuple_shapes[2:])
    if not operator.is_collective:
        return b"", (shapes.scalar(shapes.U32),)
    config = json.loads(instruction.proto.backend_config or b"{}")
    config.setdefault("collective_backend_config", {})["is_sync"] = False
    return json.dumps(config).encode(), ()


def _bring(module: HloModule, original: Computation) -> Computation:
    """Copies a computation of another module, and everything that it calls, into `module`."""
    copy = module.new_computation(original.name)
    builder = Builder(copy)
    copies: dict[Instruction, Instruction] = {}
    for instruction in original.instructions:
        called = [_bring(module, c) for c in instruction.called]
        copies[instruction] = builder.copy(instruction, [copies[o] for o in instruction.operands], called)
        copies[instruction].proto.ClearField("metadata")
    schedule = original.module.schedule
    if original in schedule:
        module.schedule[copy] = [copies[i] for i in schedule[original]]
    return builder.finish(copies[original.root])
