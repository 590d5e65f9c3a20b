"""Which instructions of a compiled step can run alone, and what they need for that.

An operator is an instruction of the scheduled GPU module, one for each key. It is replayed as XLA compiled it,
so all it needs is something to read. What it read in the step decides what that is:

  - a constant: the same constant;
  - an integer or a flag without dimensions, such as the layer of a dynamic-slice: zero, so that it is in range;
  - any other array: a flat `Buffer` of its element type and element count, which a bitcast gives the shape and
    the layout that the operator was compiled for.

    operators, refused = find_operators(compiled_module, key_of)
    operators[0].buffers        # (Buffer("bf16", 33554432, 67108864), ...)
    refused                     # (("recv.3", "it has side effects"),)

What XLA slices by the number of a loop's iteration, without reading an index (`dynamic_slice_config`), it slices
as in the first iteration where no loop runs. What cannot stand alone is refused with a reason; the rest goes on.
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
# Libraries and kernels that keep no state between calls. Others may, and nothing in HLO would say so.
_STATELESS = re.compile(r"__cu(blas|dnn|b)\$|__gpu\$|__triton|triton_kernel_call|mosaic_gpu|te_|cu_threefry")
# Of these, arrays of integers are lengths: of sequences, of a grouped product's groups.
_MEASURED_BY_NUMBERS = re.compile(r"__cudnn\$|__cublas\$lt\$grouped")
_HOST_MEMORY = 5


@dataclass(frozen=True, order=True)
class Buffer:
    """A flat array on one GPU.

    Attributes:
      element_type: HLO's name, such as "bf16" or "pred".
      elements: how many.
      bytes: follows from the two.
    """

    element_type: str
    elements: int
    bytes: int

    @classmethod
    def of(cls, array: Any) -> Buffer:
        """The buffer that an array of this shape can be read from."""
        return cls(shapes.type_name(array), shapes.element_count(array), shapes.byte_size(array))


@dataclass(frozen=True)
class Operator:
    """What one key stands for.

    Attributes:
      instruction: where the step has it: a fusion, a custom call, a collective; of an async pair the start.
    """

    key: Key
    instruction: Instruction

    @property
    def core(self) -> Instruction:
        """What runs: the instruction itself, or what an async pair is wrapped around."""
        return _inside(self.instruction)

    @property
    def is_collective(self) -> bool:
        return find_collective(self.core) is not None

    @property
    def gpus(self) -> int:
        """So many that all devices of a collective's groups are there."""
        found = find_collective(self.instruction)
        return 1 + max((device for group in (found.groups if found else ()) for device in group), default=0)

    @cached_property
    def operands(self) -> tuple[Instruction, ...]:
        """What the step gives to each operand of `core`."""
        return _given(self.instruction)

    @cached_property
    def inputs(self) -> tuple[Instruction, ...]:
        """`operands`, each once."""
        return tuple(dict.fromkeys(self.operands))

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that it reads, one for each array that is neither a constant nor an index."""
        arrays = (leaf for value in self.inputs if not is_constant(value) for leaf in leaves(value.shape))
        return tuple(Buffer.of(array) for array in arrays if not is_index(array))


@dataclass(frozen=True)
class Template:
    """An operator brought into another module, for instances to be copied from; nothing calls it.

    Attributes:
      computation: the inputs as parameters, and what runs as the root.
      copied: of which arrays of each input an instance needs a copy of its own: it writes over them, or they
        lie in a memory of their own.
      config, context: of an async start around it: its backend configuration, and what stands in its shape
        after operands and result.
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
    """The operators of a compiled step, and what cannot be isolated.

    Args:
      module: as XLA compiled and scheduled it.
      key_of: the key of an instruction, of async pairs the start; None if it costs nothing.

    Returns:
      One operator for each key, in the order in which the entry computation and what it calls first run them;
      and the name of the first instruction of each key that has none, with the reason.

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
    """A template of `operator` in another module than the step's, whose library calls have these workspaces."""
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
    """The shape of the workspace, by `call_signature`, of each library call that `LibraryCalls` made known.

    XLA keeps cuDNN's graphs by the call with its workspace. That of a step compiled without a GPU is empty.
    """
    calls = (i for i in placeholder.instructions if i.opcode == "custom-call" and shapes.is_tuple(i.shape))
    return {call_signature(call): call.shape.tuple_shapes[-1] for call in calls}


def call_signature(call: Instruction) -> str:
    """What tells library calls apart: all but the workspace, the last of the results."""
    arrays = [o.shape for o in call.operands] + list(call.shape.tuple_shapes[:-1])
    return " ".join((call.opcode, call.proto.custom_call_target, *map(shapes.text, arrays)))


def arguments_of(placeholder: Computation) -> dict[Buffer, list[Instruction]]:
    """The parameters that operators can read from, by what they hold."""
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
    """Whether an operator that reads `value` gets the same value again."""
    return value.opcode == "constant" and not shapes.is_tuple(value.shape)


def is_index(array: Any) -> bool:
    """Whether it may say where in another array to read or write."""
    return not array.dimensions and array.element_type in _INTEGERS


def _is_integers(array: Any) -> bool:
    return bool(array.dimensions) and array.element_type in _INTEGERS


def memory_space(array: Any) -> int:
    """0: device memory; others have a meaning of their own, such as memory that is registered with NCCL."""
    return array.layout.memory_space


def content(instruction: Instruction) -> Iterator[bytes]:
    """All that tells what an instruction does."""
    for inner in _with_called(instruction):
        yield inner.proto.SerializeToString(deterministic=True)


def _launching(entry: Computation) -> Iterator[Instruction]:
    """What launches kernels, conditions of loops among it, in the order in which it runs; each computation once."""
    for instruction, _ in instructions(entry, once(lambda control: control.called)):
        if instruction.opcode not in CONTROL_FLOW | FREE_OPCODES and not is_done(instruction):
            yield instruction


def _inside(instruction: Instruction) -> Instruction:
    return instruction.called[0].root if instruction.opcode == "async-start" else instruction


def _given(instruction: Instruction) -> tuple[Instruction, ...]:
    """What is given to each operand of what runs."""
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
            return "the lengths that it reads decide what memory it touches"
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
    """Configuration and context of an async start around `operator`, as XLA writes them."""
    instruction = operator.instruction
    if is_start(instruction):
        return instruction.proto.backend_config, tuple(instruction.shape.tuple_shapes[2:])
    if not operator.is_collective:
        return b"", (shapes.scalar(shapes.U32),)
    config = json.loads(instruction.proto.backend_config or b"{}")
    config.setdefault("collective_backend_config", {})["is_sync"] = False
    return json.dumps(config).encode(), ()


def _bring(module: HloModule, original: Computation) -> Computation:
    """A copy of a computation of another module, with all that it calls."""
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
