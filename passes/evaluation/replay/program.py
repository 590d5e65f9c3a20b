"""The program that measures: operators of a compiled step, alone and in pairs, again and again.

Matches: a placeholder, a jitted function of flat buffers that does nothing. Makes of it, after scheduling, a
program that runs the items of a `Program` one after the other, repeat by repeat, as XLA compiled them; nothing
of the placeholder stays but its signature:

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
order. What writes over an operand gets a fresh copy of it before the item starts; handing results on from
repeat to repeat would save that copy, and keep a buffer for each such item alive throughout. Memory: the
arguments, and the results of one item at a time.

Times come from a profiler trace: it names the instruction that a kernel belongs to, `parse_name` says which
instance that is. DHelix section 4.2 measures pairs so, offline, as (P) of its dynamic program.
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
_STARTED = ("fusion", "custom-call")  # what XLA takes in an async start, beside collectives and calls
_REDUCIBLE = frozenset(("all-gather", "all-reduce", "reduce-scatter"))  # others mean their groups otherwise
_STREAM = "_xla_stream_annotation"  # a number here takes the place of XLA's round-robin over streams


@dataclass(frozen=True)
class Item:
    """What is measured as one: an operator alone, or two at once, of which `first` is launched first."""

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
        """How many buffers of each kind it reads; no two operands share one."""
        return Counter(buffer for operator in self.operators for buffer in operator.buffers)


@dataclass(frozen=True)
class Program:
    """Items, and how often each of them runs in one execution.

    `marks`: a tiny all-reduce stands before each instance and before its copies, over the groups of an all-gather,
    all-reduce or reduce-scatter if there is one. What CUDA graphs launch, or NCCL gives to copy engines, carries no
    name in a trace; by the mark before it, it is known whose it is.

    Raises DhelixError: nothing to run.
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
        if groups and sum(b.bytes * n for b, n in together.items()) <= limit:
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
            for part in content(operator.instruction):
                digest.update(part)
        digest.update(b"|")
    digest.update(f"{program.repeats}{' with marks' * program.marks}".encode())
    return f"replay_{digest.hexdigest()[:DIGITS]}"


def instance_name(item: int, side: str, repeat: int) -> str:
    return f"replay_{item}_{side}_{repeat}"


def parse_name(name: str) -> tuple[int, str, int] | None:
    """Item, side and repeat of an instruction.

    The side is `first`, `second`, `copy` for what must not be counted, or `mark`: an item begins here.

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
        result = module.entry.root.shape
        if given != list(self.program.buffers) or not module.is_scheduled or result.element_type != shapes.F32:
            raise PassRefusal(
                "this is not the program's placeholder: a scheduled function of one flat array for each of"
                " `program.buffers`, in order (jit with keep_unused=True), that returns an array of float32"
            )
        writer = _Writer(module, self._marking())
        for repeat in range(self.program.repeats):
            for number, item in enumerate(self.program.items):
                writer.write(number, item, repeat)
        writer.finish(result)
        context.note("operators put in", items=len(self.program.items), repeats=self.program.repeats)
        return True

    def _marking(self) -> Instruction | None:
        """A collective whose groups a mark takes over."""
        cores = (operator.core for item in self.program.items for operator in item.operators)
        return next((c for c in cores if c.opcode in _REDUCIBLE), None) if self.program.marks else None


@dataclass(frozen=True)
class _Instance:
    """A template with values for its parameters, about to be launched under `name`."""

    template: Template
    inputs: tuple[Instruction, ...]
    name: str


class _Writer:
    """Replaces the entry computation by items, in the order in which they are to run."""

    def __init__(self, module: HloModule, marking: Instruction | None) -> None:
        module.reserve_names()
        self.marking = marking  # whose devices take part in marks; None: there are none
        self.module, self.entry = module, module.entry
        self.builder = Builder(module.entry)
        self.workspaces = library_workspaces(module.entry)
        self.entry.instructions = list(self.entry.parameters)
        self.sequence = list(self.entry.instructions)
        self.arguments = arguments_of(self.entry)
        self.templates: dict[Operator, Template] = {}
        self.shared: dict[Hashable, Instruction] = {}  # views and constants, which all instances may read
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
                self._done(self._start(first))  # as in the step; XLA makes it synchronous
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
        """Ends the computation, with zeros of the shape `result`."""
        self.entry.root = self._zeros(result, "replay_result")
        self.module.schedule[self.entry] = self.sequence

    # Launching

    def _run(self, instance: _Instance) -> None:
        """On the main stream."""
        core = instance.template.core
        values = dict(zip(instance.template.computation.parameters, instance.inputs, strict=True))
        copy = self.builder.copy(core, [values[o] for o in core.operands], copy_called(core))
        self._launch(copy, instance.name)

    def _mark(self, name: str) -> None:
        """A tiny all-reduce: on the main stream, in no CUDA graph, and all GPUs begin together after it."""
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
        mark.proto.opcode = "all-reduce"
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
        """On a stream of its own, of the kind that XLA gives to what it starts so."""
        template = instance.template
        body = copy_computation(template.computation)
        body.root.proto.name = instance.name
        if body.root.opcode in KINDS:
            body.root.proto.ClearField("backend_config")  # it stands at the start
        elif body.root.opcode not in _STARTED:
            body = _calling(body)
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

    def _separate(self) -> None:
        """Something that is neither a collective nor free in XLA's eyes, and yet launches nothing."""
        self._launch(self.builder.make("after-all", Shape(element_type=shapes.TOKEN)), "replay_separator")

    def _launch(self, instruction: Instruction, name: str) -> Instruction:
        """Names an instruction and puts it after all that was launched before it."""
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
        """`operator` with its inputs, read from arguments that are `free`; copies are called `copy`."""
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
        """Something to read in place of the part of `source` that has this shape."""
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
    """A computation that calls `computation`, and so can be started where the bare instruction cannot."""
    module = computation.module
    outer = Builder(module.new_computation("calling"))
    parameters = [outer.parameter(p.proto.parameter_number, p.shape) for p in computation.parameters]
    outer.finish(outer.make("call", computation.root.shape, parameters, called=[computation]))
    module.schedule[outer.computation] = list(outer.computation.instructions)
    return outer.computation
