"""The program that measures: operators of a compiled step, alone and in pairs, again and again.

Matches: a placeholder, a jitted function of flat buffers that does nothing. Makes of it, after scheduling, a
program that runs the items of a `Program` one after the other, repeat by repeat, as XLA compiled them:

    ENTRY main(p0: bf16[8388608], p1: bf16[33554432]) -> f32[1] {
      replay_0_first_0 = ... fusion(bitcast of p1)                           item 0: an operator alone
      replay_1_first_0-start = ... async-start(bitcast of p0)                item 1: a collective, then compute
      replay_1_second_0 = ... custom-call(bitcast of p1, ...)
      replay_1_first_0-done = ... async-done(replay_1_first_0-start)
      replay_0_first_1 = ...                                                 the next repeat

How two run at once (XLA gives streams to async pairs, in `execution_stream_assignment.cc`; a start waits for
what its stream of origin has been given so far, a done makes that stream wait):

  - a collective first: its pair has a stream of its own, the second side stands between start and done;
  - compute first: it is wrapped in a pair too, which sends it to a further compute stream; the second side
    stays on the main stream if it computes, else it is a pair between whose ends the first one's end stands,
    as XLA makes a pair synchronous when nothing stands between its start and its done;
  - two collectives: the second gets a stream beside the first one's, or they would run in turn.

An item begins when the one before is done: all its ends are waited for, and control dependencies keep the
order. What writes over an operand gets a fresh copy of it before the item starts. Memory: the arguments, and
the results of one item at a time.

Times come from a profiler trace: it names the instruction that a kernel belongs to, `parse_name` says which
instance that is. DHelix section 4.2 measures pairs so, offline, as (P) of its dynamic program.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.buffers import Buffers
from dhelix.passes.collectives import KINDS, is_start
from dhelix.passes.fingerprint import DIGITS
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, Shape, shapes
from dhelix.passes.hlo.edit import copy_called, copy_computation
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.replay_operators import Buffer, Operator, is_index, leaves, memory_space

_NAME = re.compile(r"(?<![A-Za-z0-9_])replay_(\d+)_(first|second|copy)_(\d+)")
_STREAM = "_xla_stream_annotation"  # a number here takes the place of XLA's round-robin over streams


@dataclass(frozen=True)
class Item:
    """What is measured as one: an operator alone, or two at once, of which `first` is launched first."""

    first: Operator
    second: Operator | None = None

    @property
    def operators(self) -> tuple[Operator, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    @cached_property
    def buffers(self) -> Counter[Buffer]:
        """How many buffers of each kind it reads; no two operands share one."""
        return Counter(buffer for operator in self.operators for buffer in operator.buffers)


@dataclass(frozen=True)
class Program:
    """Items, and how often each of them runs in one execution.

    Raises DhelixError: nothing to run.
    """

    items: tuple[Item, ...]
    repeats: int

    def __post_init__(self) -> None:
        if not self.items or self.repeats < 1:
            raise DhelixError("a replay needs at least one item and one repeat")

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The arguments of the placeholder, in order. All items share them."""
        needed: Counter[Buffer] = Counter()
        for item in self.items:
            needed |= item.buffers
        return tuple(sorted(needed.elements()))

    @property
    def argument_bytes(self) -> int:
        """On one GPU."""
        return sum(buffer.bytes for buffer in self.buffers)


def split(items: Sequence[Item], limit: int) -> tuple[tuple[Item, ...], ...]:
    """Runs of items whose arguments together take at most `limit` bytes on one GPU.

    An item that needs more by itself stands alone.
    """
    groups: list[list[Item]] = []
    needed: Counter[Buffer] = Counter()
    for item in items:
        together = needed | item.buffers
        if groups and _bytes(together) <= limit:
            groups[-1].append(item)
            needed = together
        else:
            groups.append([item])
            needed = item.buffers
    return tuple(map(tuple, groups))


def placeholder_name(program: Program) -> str:
    """A name for the placeholder that is another one for another program, so that caches tell them apart."""
    digest = hashlib.sha256()
    for item in program.items:
        for operator in item.operators:
            digest.update(f"{operator.key};".encode())
            for part in _content(operator.instruction):
                digest.update(part)
        digest.update(b"|")
    digest.update(str(program.repeats).encode())
    return f"replay_{digest.hexdigest()[:DIGITS]}"


def instance_name(item: int, side: str, repeat: int) -> str:
    return f"replay_{item}_{side}_{repeat}"


def parse_name(name: str) -> tuple[int, str, int] | None:
    """Item, side (`first`, `second`, or `copy` for what must not be counted) and repeat of an instruction.

    Takes what XLA makes of names (`replay_3_first_0.1`, `.remat`), either end of a pair, and a trace's
    `outer::inner`. None for instructions that are no part of the measuring.
    """
    found = _NAME.findall(name)
    if not found:
        return None
    item, side, repeat = found[-1]
    return int(item), side, int(repeat)


@dataclass(frozen=True)
class OperatorReplay:
    """Puts the items of `program` into the placeholder, whose arguments are `program.buffers`."""

    program: Program

    name = "operator-replay"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        given = [Buffer.of(p.shape) for p in module.entry.parameters]
        if given != list(self.program.buffers) or not module.is_scheduled:
            raise PassRefusal(
                "this is not the program's placeholder: give it one flat array for each of `program.buffers`,"
                " in order, and jit it with keep_unused=True"
            )
        writer = _Writer(module)
        for repeat in range(self.program.repeats):
            for number, item in enumerate(self.program.items):
                writer.write(number, item, repeat)
        writer.finish()
        context.note("operators put in", items=len(self.program.items), repeats=self.program.repeats)
        return True


@dataclass(frozen=True)
class _Template:
    """An operator brought into the placeholder's module, for instances to be copied from; runs nowhere.

    Attributes:
      computation: the inputs as parameters, and what runs as the root.
      copied: for each input, which of its arrays an instance needs a copy of its own of.
      config: backend configuration of an async start around it.
      context: what stands in the shape of such a start after operands and result.
    """

    computation: Computation
    copied: tuple[tuple[bool, ...], ...]
    config: bytes
    context: tuple[Any, ...]

    @property
    def core(self) -> Instruction:
        return self.computation.root


@dataclass(frozen=True)
class _Instance:
    """A template with values for its parameters, about to be launched under `name`."""

    template: _Template
    inputs: tuple[Instruction, ...]
    name: str


class _Writer:
    """Appends items to the entry computation, in the order in which they are to run."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.entry = module.entry
        self.builder = Builder(module.entry)
        self.sequence = [i for i in module.schedule[module.entry] if i is not module.entry.root]
        self.arguments: dict[Buffer, list[Instruction]] = {}
        for parameter in self.entry.parameters:
            self.arguments.setdefault(Buffer.of(parameter.shape), []).append(parameter)
        self.templates: dict[Operator, _Template] = {}
        self.shared: dict[Hashable, Instruction] = {}  # values that any instance may read
        self.names: Counter[str] = Counter()
        self.last: Instruction | None = None

    def write(self, number: int, item: Item, repeat: int) -> None:
        free = {buffer: iter(arguments) for buffer, arguments in self.arguments.items()}
        copy = instance_name(number, "copy", repeat)
        first, *rest = [
            self._instance(operator, instance_name(number, side, repeat), free, copy)
            for operator, side in zip(item.operators, ("first", "second"), strict=False)
        ]
        if item.second is None:
            self._alone(first, item.first)
            return
        second = rest[0]
        if item.first.is_collective and item.second.is_collective:
            starts = [self._start(first, stream=0), self._start(second, stream=1)]
            self._place_marker()
        elif item.second.is_collective:
            starts = [self._start(first), self._start(second)]
        else:
            starts = [self._start(first)]
            self._run(second)
        for start in starts:
            self._done(start)

    def finish(self) -> None:
        root = self.entry.root
        if self.last is not None:
            root.control_predecessors = [*root.control_predecessors, self.last]
        self.module.schedule[self.entry] = [*self.sequence, root]

    # Launching

    def _alone(self, instance: _Instance, operator: Operator) -> None:
        """A collective that the step starts and awaits does so here; XLA then makes it synchronous."""
        if operator.is_collective and is_start(operator.instruction):
            self._done(self._start(instance))
        else:
            self._run(instance)

    def _run(self, instance: _Instance) -> None:
        core = instance.template.core
        values = dict(zip(instance.template.computation.parameters, instance.inputs, strict=True))
        copy = self.builder.copy(core, [values[o] for o in core.operands], copy_called(core))
        self._launch(copy, instance.name)

    def _start(self, instance: _Instance, stream: int | None = None) -> Instruction:
        template = instance.template
        body = copy_computation(template.computation)
        body.root.proto.name = instance.name
        if body.root.opcode in KINDS:
            body.root.proto.ClearField("backend_config")  # it stands at the start
        operands = shapes.tuple_of(value.shape for value in instance.inputs)
        shape = shapes.tuple_of([operands, body.root.shape, *template.context])
        start = self.builder.make("async-start", shape, instance.inputs, called=[body])
        start.proto.backend_config = template.config
        if stream is not None:
            start.proto.frontend_attributes.map[_STREAM] = str(stream)
        return self._launch(start, f"{instance.name}-start")

    def _done(self, start: Instruction) -> None:
        done = self.builder.make("async-done", start.shape.tuple_shapes[1], [start])
        self._launch(done, f"{start.name.removesuffix('-start')}-done")

    def _place_marker(self) -> None:
        """Launches nothing, but is no collective: XLA makes pairs synchronous that have nothing else between."""
        marker = self.builder.make("after-all", Shape(element_type=shapes.TOKEN))
        self._launch(marker, marker.name)

    def _launch(self, instruction: Instruction, name: str) -> Instruction:
        """Names what does something, and puts it after all before it."""
        same = self.names[name]
        self.names[name] += 1
        instruction.proto.name = f"{name}.{same}" if same else name
        instruction.control_predecessors = [] if self.last is None else [self.last]
        self.last = instruction
        return self._place(instruction)

    def _place(self, instruction: Instruction) -> Instruction:
        self.sequence.append(instruction)
        return instruction

    # Inputs

    def _instance(
        self, operator: Operator, name: str, free: Mapping[Buffer, Iterator[Instruction]], copy: str
    ) -> _Instance:
        if operator not in self.templates:
            self.templates[operator] = _template(self.module, operator)
        template = self.templates[operator]
        inputs = tuple(
            self._input(source, iter(copied), free, copy)
            for source, copied in zip(operator.inputs, template.copied, strict=True)
        )
        return _Instance(template, inputs, name)

    def _input(
        self,
        source: Instruction,
        copied: Iterator[bool],
        free: Mapping[Buffer, Iterator[Instruction]],
        copy: str,
    ) -> Instruction:
        """Something to read in place of `source`, built from what is `free`; copies are called `copy`."""

        def build(shape: Any) -> Instruction:
            if shapes.is_tuple(shape):
                return self._place(self.builder.tuple([build(s) for s in shape.tuple_shapes]))
            if source.opcode == "constant":
                value = self._constant(source)
            elif is_index(shape):
                value = self._zero(shape)
            else:
                value = self._view(next(free[Buffer.of(shape)]), shape)
            return self._copy(value, shape, copy) if next(copied) else value

        return build(source.shape)

    def _copy(self, value: Instruction, shape: Any, name: str) -> Instruction:
        return self._launch(self.builder.make("copy", shape, [value]), name)

    def _view(self, argument: Instruction, shape: Any) -> Instruction:
        """`argument` in another shape and layout, in device memory."""
        plain = Shape()
        plain.CopyFrom(shape)
        if memory_space(shape):
            plain.layout.DiscardUnknownFields()
        key = (argument, plain.SerializeToString(deterministic=True))
        if key not in self.shared:
            self.shared[key] = self._place(self.builder.make("bitcast", plain, [argument]))
        return self.shared[key]

    def _constant(self, source: Instruction) -> Instruction:
        if source not in self.shared:
            copy = self.builder.copy(source, [], ())
            copy.proto.ClearField("metadata")
            self.shared[source] = self._place(copy)
        return self.shared[source]

    def _zero(self, shape: Any) -> Instruction:
        key = ("zero", shape.element_type)
        if key not in self.shared:
            self.shared[key] = self._place(self.builder.scalar(0, shape.element_type))
        return self.shared[key]


def _template(module: HloModule, operator: Operator) -> _Template:
    core = operator.core
    computation = module.new_computation("replayed")
    builder = Builder(computation)
    parameters = {s: builder.parameter(n, s.shape) for n, s in enumerate(operator.inputs)}
    called = [_bring(module, c) for c in core.called]
    root = builder.copy(core, [parameters[o] for o in operator.operands], called)
    root.proto.ClearField("metadata")
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
    return _Template(computation, copied, *_start_like(operator))


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


def _content(instruction: Instruction) -> Iterator[bytes]:
    """All that an instruction does."""
    yield instruction.proto.SerializeToString(deterministic=True)
    for called in instruction.called:
        for inner in called.instructions:
            yield from _content(inner)


def _bytes(buffers: Counter[Buffer]) -> int:
    return sum(buffer.bytes * count for buffer, count in buffers.items())
