"""Writes the measuring program: it runs operators of a compiled step, alone and in pairs, several times.

The pass consumes a placeholder: a scheduled, jitted function of flat buffers that does nothing. The items of a
`Program` replace its instructions. They run one after the other, repeat by repeat, as XLA compiled them. Only the
signature stays:

    ENTRY main(p0: bf16[8388608], p1: bf16[33554432]) -> f32[1] {
      replay_0_first_0 = ... fusion(bitcast of p1)                           item 0: an operator alone
      replay_1_first_0-start = ... async-start(bitcast of p0)                item 1: a collective, then compute
      replay_1_second_0 = ... custom-call(bitcast of p1, ...)
      replay_1_first_0-done = ... async-done(replay_1_first_0-start)
      replay_0_first_1 = ...                                                 the next repeat

XLA assigns streams to async pairs (`execution_stream_assignment.cc`). A start waits for the work launched so far on the
stream that issues it. A done makes that stream wait for the pair. So two operators run at once like this:

  - A collective first: its pair has its own stream. The second operator is between the pair's start and done.
  - Compute first: an async pair sends it to a further compute stream. A second compute operator stays on the main
    stream. A second collective is a pair, too. The first pair's done is between the second pair's start and done,
    because XLA makes a pair synchronous if nothing is in between.
  - Two collectives: they get different streams. On one stream, they would run one after the other.

An item begins when the previous item is done: the program waits for all dones of an item, and control dependencies keep
the order. An operator that overwrites an operand gets a fresh copy of this operand before its item starts. (Results
passed from repeat to repeat would save the copy, but keep a buffer of each such item live.) The pass raises PassRefusal
if the module is not the placeholder.

The pass is legal because the placeholder computes nothing. It needs memory for the arguments and one item's results.
Times come from a profiler trace, which names the instruction of each kernel; `parse_name` maps that name to the
instance. DHelix section 4.2 (arXiv 2411.15871) measures pairs offline in the same way, for the costs P in its dynamic
program.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.collectives import KINDS, is_start
from dhelix.passes.analysis.streams import put_on_stream
from dhelix.passes.evaluation.replay.operators import (
    Buffer,
    Operator,
    Template,
    arguments_of,
    bring,
    content,
    is_constant,
    is_index,
    library_workspaces,
    memory_space,
)
from dhelix.passes.framework.fingerprint import DIGITS
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, Shape, shapes
from dhelix.passes.hlo.edit import copy_called, copy_computation

_NAME = re.compile(r"(?<![A-Za-z0-9_])replay_(\d+)_(first|second|copy|mark)_(\d+)")
_STARTED = ("fusion", "custom-call")  # XLA also accepts these in an async start, besides collectives and calls
_REDUCIBLE = frozenset(("all-gather", "all-reduce", "reduce-scatter"))  # other kinds interpret groups differently


@dataclass(frozen=True)
class Item:
    """One measurement: an operator alone, or two operators at once. `first` is launched first."""

    first: Operator
    second: Operator | None = None

    @property
    def operators(self) -> tuple[Operator, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def gpus(self) -> int:
        return max(operator.gpus for operator in self.operators)

    @cached_property
    def buffers(self) -> Counter[Buffer]:
        """How many buffers of each kind the item reads. Each operand has its own buffer."""
        return Counter(buffer for operator in self.operators for buffer in operator.buffers)


@dataclass(frozen=True)
class Program:
    """Items to measure. Raises DhelixError if there is nothing to run.

    Attributes:
      repeats: how often one execution runs each item.
      marks: whether a tiny all-reduce runs before each instance and before its copies. It needs the groups of an
        all-gather, all-reduce or reduce-scatter of the program. Kernels in CUDA graphs and copy-engine work of NCCL
        have no names in a trace; the mark before them identifies their instance.
    """

    items: tuple[Item, ...]
    repeats: int
    marks: bool = False

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
        """Bytes of all arguments on one GPU."""
        return sum(buffer.bytes for buffer in self.buffers)


def split(items: Sequence[Item], limit: int) -> tuple[tuple[Item, ...], ...]:
    """Splits `items` into groups. The arguments of a group take at most `limit` bytes on one GPU.

    An item that alone needs more gets its own group.
    """
    groups: list[list[Item]] = []
    needed: Counter[Buffer] = Counter()
    for item in items:
        together = needed | item.buffers
        if groups and sum(b.bytes * n for b, n in together.items()) <= limit:
            groups[-1].append(item)
            needed = together
        else:
            groups.append([item])
            needed = item.buffers
    return tuple(map(tuple, groups))


def placeholder_name(program: Program) -> str:
    """A name for the placeholder that differs between programs, so that caches tell them apart."""
    digest = hashlib.sha256()
    for item in program.items:
        for operator in item.operators:
            digest.update(f"{operator.key};".encode())
            for part in content(operator.instruction):
                digest.update(part)
        digest.update(b"|")
    digest.update(f"{program.repeats}{' with marks' * program.marks}".encode())
    return f"replay_{digest.hexdigest()[:DIGITS]}"


def instance_name(item: int, side: str, repeat: int) -> str:
    return f"replay_{item}_{side}_{repeat}"


def parse_name(name: str) -> tuple[int, str, int] | None:
    """Returns the item, side and repeat of an instruction; None if it belongs to no measurement.

    The side is `first`, `second`, `copy` (must not be counted) or `mark` (an item begins here).
    XLA may have added to the name (`replay_3_first_0.1`, `.remat`). It may be the name of a start or a done, or
    `outer::inner` from a trace.
    """
    found = _NAME.findall(name)
    if not found:
        return None
    item, side, repeat = found[-1]
    return int(item), side, int(repeat)


@dataclass(frozen=True)
class OperatorReplay:
    """Replaces the placeholder, whose arguments are `program.buffers`, by the items of `program`."""

    program: Program

    name = "operator-replay"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        given = [Buffer.of(p.shape) for p in module.entry.parameters]
        result = module.entry.root.shape
        if given != list(self.program.buffers) or not module.is_scheduled or result.element_type != shapes.F32:
            raise PassRefusal(
                "the module is not the program's placeholder, a scheduled function of one flat array for each of"
                " `program.buffers`, in order (jit with keep_unused=True), that returns an array of float32"
            )
        writer = _Writer(module, self._marking())
        for repeat in range(self.program.repeats):
            for number, item in enumerate(self.program.items):
                writer.write(number, item, repeat)
        writer.finish(result)
        context.note("operators inserted", items=len(self.program.items), repeats=self.program.repeats)
        return True

    def _marking(self) -> Instruction | None:
        """A collective whose groups the marks use; None if there are no marks."""
        cores = (operator.core for item in self.program.items for operator in item.operators)
        return next((c for c in cores if c.opcode in _REDUCIBLE), None) if self.program.marks else None


@dataclass(frozen=True)
class _Instance:
    """A template with values for its parameters, to be launched under `name`."""

    template: Template
    inputs: tuple[Instruction, ...]
    name: str


class _Writer:
    """Replaces the instructions of the entry computation by items, in execution order."""

    def __init__(self, module: HloModule, marking: Instruction | None) -> None:
        module.reserve_names()
        self.marking = marking  # marks use its groups; None: no marks
        self.module, self.entry = module, module.entry
        self.builder = Builder(module.entry)
        self.workspaces = library_workspaces(module.entry)
        self.entry.instructions = list(self.entry.parameters)
        self.sequence = list(self.entry.instructions)
        self.arguments = arguments_of(self.entry)
        self.templates: dict[Operator, Template] = {}
        self.shared: dict[Hashable, Instruction] = {}  # views and constants that all instances may read
        self.names: Counter[str] = Counter()
        self.last: Instruction | None = None

    def write(self, number: int, item: Item, repeat: int) -> None:
        """Appends one repeat of an item."""
        free = {buffer: iter(arguments) for buffer, arguments in self.arguments.items()}
        copy = instance_name(number, "copy", repeat)
        if self.marking is not None:
            self._mark(f"{copy}.mark")
        first = self._instance(item.first, instance_name(number, "first", repeat), free, copy)
        second = item.second and self._instance(item.second, instance_name(number, "second", repeat), free, copy)
        if self.marking is not None:
            self._mark(instance_name(number, "mark", repeat))
        if item.second is None or second is None:
            if item.first.is_collective and is_start(item.first.instruction):
                self._done(self._start(first))  # a pair as in the step; XLA makes it synchronous
            else:
                self._run(first)
            return
        if not item.second.is_collective:
            starts = [self._start(first)]
            self._run(second)
        elif not item.first.is_collective:
            starts = [self._start(first), self._start(second)]
        else:
            starts = [self._start(first, stream=0), self._start(second, stream=1)]
            self._separate()
        for start in starts:
            self._done(start)

    def finish(self, result: Any) -> None:
        """Ends the computation with zeros of the shape `result`."""
        self.entry.root = self._zeros(result, "replay_result")
        self.module.schedule[self.entry] = self.sequence

    # Launching

    def _run(self, instance: _Instance) -> None:
        """Launches an instance on the main stream."""
        core = instance.template.core
        values = dict(zip(instance.template.computation.parameters, instance.inputs, strict=True))
        copy = self.builder.copy(core, [values[o] for o in core.operands], copy_called(core))
        self._launch(copy, instance.name)

    def _mark(self, name: str) -> None:
        """Launches a tiny all-reduce on the main stream, outside CUDA graphs. After it, all GPUs begin together."""
        vector = Shape(element_type=shapes.F32, dimensions=[1])
        vector.layout.minor_to_major.append(0)
        if "mark" not in self.shared:
            self.shared["mark"] = self._zeros(vector, "replay_zero")
        assert self.marking is not None
        reduce = Builder(self.module.new_computation("mark"))
        scalar = shapes.scalar(shapes.F32)
        body = reduce.finish(reduce.binary("add", reduce.parameter(0, scalar), reduce.parameter(1, scalar)))
        self.module.schedule[body] = list(body.instructions)
        mark = self.builder.copy(self.marking, [self.shared["mark"]], [body])
        mark.opcode = "all-reduce"
        mark.proto.shape.CopyFrom(vector)
        for of_the_original in ("dimensions", "backend_config", "metadata", "frontend_attributes"):
            mark.proto.ClearField(of_the_original)
        self._launch(mark, name)

    def _zeros(self, shape: Any, name: str) -> Instruction:
        zeros = self._place(self.builder.make("constant", shape))
        zeros.proto.literal.shape.CopyFrom(shape)
        zeros.proto.literal.f32s.extend([0.0] * shapes.element_count(shape))
        return self._launch(self.builder.make("copy", shape, [zeros]), name)

    def _start(self, instance: _Instance, stream: int | None = None) -> Instruction:
        """Starts an instance on another stream: number `stream`, or the one that XLA chooses."""
        template = instance.template
        body = copy_computation(template.computation)
        body.root.proto.name = instance.name
        if body.root.opcode in KINDS:
            body.root.proto.ClearField("backend_config")  # the start has the configuration
        elif body.root.opcode not in _STARTED:
            body = _calling(body)
        operands = shapes.tuple_of(value.shape for value in instance.inputs)
        shape = shapes.tuple_of([operands, body.root.shape, *template.context])
        start = self.builder.make("async-start", shape, instance.inputs, called=[body])
        start.proto.backend_config = template.config
        if stream is not None:
            put_on_stream(start, stream)
        return self._launch(start, f"{instance.name}-start")

    def _done(self, start: Instruction) -> None:
        done = self.builder.make("async-done", start.shape.tuple_shapes[1], [start])
        self._launch(done, f"{start.name.removesuffix('-start')}-done")

    def _separate(self) -> None:
        """Adds an instruction that launches nothing. XLA counts it as work, so the pairs stay asynchronous."""
        self._launch(self.builder.make("after-all", Shape(element_type=shapes.TOKEN)), "replay_separator")

    def _launch(self, instruction: Instruction, name: str) -> Instruction:
        """Names an instruction and orders it after everything launched before it."""
        same = self.names[name]
        self.names[name] += 1
        instruction.proto.name = f"{name}.{same}" if same else name
        instruction.control_predecessors = [] if self.last is None else [self.last]
        self.last = instruction
        return self._place(instruction)

    def _place(self, instruction: Instruction) -> Instruction:
        self.sequence.append(instruction)
        return instruction

    # What instances read

    def _instance(
        self, operator: Operator, name: str, free: Mapping[Buffer, Iterator[Instruction]], copy: str
    ) -> _Instance:
        """An instance of `operator` that reads `free` arguments. Copies of overwritten inputs are named `copy`."""
        if operator not in self.templates:
            self.templates[operator] = bring(self.module, operator, self.workspaces)
        template = self.templates[operator]
        inputs = (
            self._input(source.shape, source, iter(copied), free, copy)
            for source, copied in zip(operator.inputs, template.copied, strict=True)
        )
        return _Instance(template, tuple(inputs), name)

    def _input(
        self,
        shape: Any,
        source: Instruction,
        copied: Iterator[bool],
        free: Mapping[Buffer, Iterator[Instruction]],
        copy: str,
    ) -> Instruction:
        """A value of the shape `shape` that replaces `source` or a part of it."""
        if shapes.is_tuple(shape):
            parts = [self._input(part, source, copied, free, copy) for part in shape.tuple_shapes]
            return self._place(self.builder.tuple(parts))
        if is_constant(source):
            value = self._constant(source)
        elif is_index(shape):
            value = self._zero(shape)
        else:
            value = self._view(next(free[Buffer.of(shape)]), shape)
        return self._launch(self.builder.make("copy", shape, [value]), copy) if next(copied) else value

    def _view(self, argument: Instruction, shape: Any) -> Instruction:
        """`argument` bitcast to another shape and layout, in device memory."""
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
            copy = self.builder.copy(source, [], [])
            copy.proto.ClearField("metadata")
            self.shared[source] = self._place(copy)
        return self.shared[source]

    def _zero(self, shape: Any) -> Instruction:
        key = ("zero", shape.element_type)
        if key not in self.shared:
            self.shared[key] = self._place(self.builder.scalar(0, shape.element_type))
        return self.shared[key]


def _calling(computation: Computation) -> Computation:
    """A computation that calls `computation`, for instructions that an async start cannot hold directly."""
    module = computation.module
    outer = Builder(module.new_computation("calling"))
    parameters = [outer.parameter(p.proto.parameter_number, p.shape) for p in computation.parameters]
    outer.finish(outer.make("call", computation.root.shape, parameters, called=[computation]))
    module.schedule[outer.computation] = list(outer.computation.instructions)
    return outer.computation
