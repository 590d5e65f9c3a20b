"""The memory of a step over time: how much lives after each instruction, what lives at the peak, and what is residual.

A residual is a buffer that the forward pass writes and the backward pass reads. Residuals are what rematerialisation
and offloading act on. A scanned program stacks the residuals of all layers in one buffer, which its loops carry. So the
search for who writes and reads a buffer enters loops.

The numbers follow from the schedule and from which values share a buffer (`passes/analysis/buffers.py`). They leave out
the gaps between buffers, so XLA's own number is slightly larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.launch.shown.instruction_words import Words, part_of
from dhelix.passes.analysis.buffers import Buffers, LiveSet, Memory
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.analysis.source import source_of
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW

_FORWARD, _BACKWARD = ("forward", "beta"), ("backward", "alpha")
_LEAST = 1 << 20
"""Smaller buffers are no residuals worth drawing. Looking for who reads them would take long."""


@dataclass(frozen=True)
class Point:
    """The bytes that live while an instruction of the entry computation runs, arguments included."""

    instruction: str
    bytes: int


@dataclass(frozen=True)
class Living:
    """A buffer that lives at the peak.

    Attributes:
      instruction: the first instruction that writes it, or the argument.
      what: what this instruction does.
      shape: of its result; for a loop, of the largest array that it carries in this buffer.
      residual: whether the forward pass writes it and the backward pass reads it.
    """

    instruction: str
    what: str
    shape: str
    source: str
    bytes: int
    residual: bool


@dataclass(frozen=True)
class MemoryOverTime:
    """The memory of one device.

    Attributes:
      arguments: bytes of the program's arguments, which live all the time.
      points: in the order of the schedule. Loops and calls are one point each, with what they need inside.
      peak: the point with the most bytes.
      inside: how much of the peak belongs to the inside of a loop or call that runs there.
      living: buffers at the peak, largest first. Arguments are not among them, but those that are updated in place.
    """

    arguments: int
    points: tuple[Point, ...]
    peak: Point
    inside: int
    living: tuple[Living, ...]

    @property
    def residuals(self) -> int:
        """Bytes of the residuals that live at the peak."""
        return sum(living.bytes for living in self.living if living.residual)


def memory_over_time(module: HloModule, words: Words) -> MemoryOverTime:
    """Follows a scheduled module through its entry computation."""
    memory, entry = Memory(module), module.entry
    sequence = module.schedule[entry]
    live = LiveSet(memory, entry)
    points = [Point(i.name, memory.arguments + live.place(i)) for i in sequence]
    number = max(range(len(points)), key=lambda n: points[n].bytes)
    inside = memory.inner(entry).get(sequence[number], 0)
    living = sorted(_living(entry, memory, number, words), key=lambda one: (-one.bytes, one.instruction))
    return MemoryOverTime(memory.arguments, tuple(points), points[number], inside, tuple(living))


@dataclass(frozen=True)
class Moment:
    """The bytes that live while an instruction runs, arguments included, and how many of them are residuals."""

    bytes: int
    residuals: int


def moments(module: HloModule) -> dict[str, Moment]:
    """For each instruction of a step, also inside loops, what lives while it runs.

    A loop's iterations are alike. What a loop carries counts outside of it. A computation with several callers has what
    lives at the one where most lives. Takes time linear in the module's size, as `executions` does.
    """
    memory, found = Memory(module), dict[str, Moment]()
    beside = {module.entry: Moment(memory.arguments, 0)}
    for computation in reversed(module.computations):  # callers first
        if computation not in beside or computation not in memory.buffers:
            continue
        for instruction, now in _moments(memory, computation, beside[computation]):
            found[instruction.name] = now
            for called in instruction.called if instruction.opcode in CONTROL_FLOW else ():
                beside[called] = max(now, beside.get(called, now), key=lambda moment: moment.bytes)
    return found


def _moments(memory: Memory, computation: Computation, beside: Moment) -> Iterator[tuple[Instruction, Moment]]:
    """Goes through a computation. Around it, `beside` lives."""
    sequence, inner = sequence_of(computation), memory.inner(computation)
    live, residuals = LiveSet(memory, computation), _residuals(memory, computation, sequence)
    for position, instruction in enumerate(sequence):
        own = live.place(instruction) - inner.get(instruction, 0)
        yield instruction, Moment(beside.bytes + own, beside.residuals + residuals[position])


def _residuals(memory: Memory, computation: Computation, sequence: Sequence[Instruction]) -> list[int]:
    """The bytes of the computation's own residuals that live while each instruction runs."""
    buffers, changes = memory.buffers[computation], [0] * (len(sequence) + 1)
    for buffer, positions in _touching(buffers, sequence).items():
        if buffers.size(buffer) >= _LEAST and _is_residual(memory, buffers, buffer, [sequence[n] for n in positions]):
            changes[positions[0]] += buffers.size(buffer)
            changes[len(sequence) if buffer in buffers.live_out else positions[-1] + 1] -= buffers.size(buffer)
    return list(itertools.accumulate(changes[:-1]))


def _touching(buffers: Buffers, sequence: Sequence[Instruction]) -> dict[int, list[int]]:
    """The positions of the instructions that touch each buffer."""
    found: dict[int, list[int]] = {}
    for position, instruction in enumerate(sequence):
        for buffer in buffers.touches.get(instruction, ()):
            found.setdefault(buffer, []).append(position)
    return found


def _is_residual(memory: Memory, buffers: Buffers, buffer: int, touching: Sequence[Instruction]) -> bool:
    written, read = _parts(memory, buffers, buffer, touching)
    return not written.isdisjoint(_FORWARD) and not read.isdisjoint(_BACKWARD)


def _living(entry: Computation, memory: Memory, peak: int, words: Words) -> Iterator[Living]:
    """The buffers that are written before or at the position `peak` of the schedule and read at it or later."""
    sequence, buffers = entry.module.schedule[entry], memory.buffers[entry]
    for buffer, positions in _touching(buffers, sequence).items():
        end = len(sequence) if buffer in buffers.live_out else positions[-1]
        if not positions[0] <= peak <= end or not buffers.size(buffer):
            continue
        maker = sequence[positions[0]]
        yield Living(
            maker.name,
            words[maker] if maker.opcode not in CONTROL_FLOW else maker.opcode,
            _shape(maker, buffers, buffer),
            source_of(maker),
            buffers.size(buffer),
            _is_residual(memory, buffers, buffer, [sequence[n] for n in positions]),
        )


def _parts(memory: Memory, buffers: Buffers, buffer: int, touching: Sequence[Instruction]) -> tuple[set[str], set[str]]:
    """The parts of the step that write a buffer, and those that read it, also inside loops.

    Args:
      buffers: those of the computation that `buffer` and the instructions `touching` it are in.
    """
    written: set[str] = set()
    read: set[str] = set()
    for instruction in touching:
        if instruction.opcode == "while":
            body = instruction.called[0]
            inner = memory.buffers[body]
            carried = inner.leaves(body.parameters[0])
            for leaf in {carried[n] for n, outer in enumerate(buffers.leaves(instruction)) if outer == buffer}:
                uses = [i for i in sequence_of(body) if leaf in _touched(inner, i)]
                for found, more in zip((written, read), _parts(memory, inner, leaf, uses), strict=True):
                    found |= more
        elif (access := buffers.accesses.get(instruction)) is not None:
            part = part_of(instruction)
            written |= {part} if buffer in access.writes else set()
            read |= {part} if buffer in access.reads and buffer not in access.writes else set()
    return written, read


def _touched(buffers: Buffers, instruction: Instruction) -> tuple[int, ...]:
    access = buffers.accesses.get(instruction)
    return (*access.reads, *access.writes) if access is not None else ()


def _shape(maker: Instruction, buffers: Buffers, buffer: int) -> str:
    leaves: list[str] = []

    def collect(shape: object) -> None:
        inner = shape.tuple_shapes if shapes.is_tuple(shape) else ()  # type: ignore[attr-defined]
        if inner:
            for part in inner:
                collect(part)
        else:
            leaves.append(shapes.text(shape))

    collect(maker.shape)
    of: Mapping[int, str] = dict(zip(reversed(buffers.leaves(maker)), reversed(leaves), strict=False))
    return of.get(buffer, shapes.text(maker.shape))
