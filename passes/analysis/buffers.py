"""Finds which values of a scheduled computation share a buffer, which order this requires, and the peak memory.

XLA has inserted copies before the stage POST_SCHEDULER. So values of one buffer never live at the same time *in XLA's
own order*, but no dependency enforces this. Values share a buffer
  - through instructions that copy no data: bitcast, tuple, get-tuple-element, barriers, ends of async pairs;
  - through in-place updates: dynamic-update-slice and scatter (alone or at the root of a fusion), custom calls and
    async starts with declared aliasing, and loops, which update their initial state;
  - through a loop's back edge: element k of the body's parameter and of its root;
  - through donation: a parameter of the entry and the output that is aliased to it.

An instruction that writes a buffer must therefore stay after all earlier and before all later accesses of the buffer.
`order_edges` returns edges that enforce this. Their number is linear in the number of accesses. All edges point forward
in the given sequence, so edges and data flow together have no cycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW

_RENAMES = frozenset("bitcast opt-barrier async-update add-dependency domain".split())
_NO_ACCESS = _RENAMES | frozenset("parameter constant tuple get-tuple-element after-all".split())
_IN_PLACE = frozenset("dynamic-update-slice scatter".split())


@dataclass(frozen=True)
class Access:
    """Numbers of the buffers that an instruction reads and writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Buffers:
    """The numbered buffers of one computation. `is_body` says whether the computation is the body of a `while`.

    Attributes:
      is_body: whether the computation is the body of a loop.
      pinned: buffers of parameters and constants. They live all the time, whatever the order.
      live_out: buffers of the result.
    """

    def __init__(self, computation: Computation, is_body: bool = False) -> None:
        self.computation, self.is_body = computation, is_body
        self._parent: list[int] = []
        self._size: list[int] = []
        self._leaves: dict[Instruction, list[int]] = {}
        pinned: list[int] = []
        for instruction in computation.instructions:
            leaves = self._leaves[instruction] = self._define(instruction)
            if instruction.opcode in ("parameter", "constant"):
                pinned += leaves
        if is_body:
            self._unite_back_edge()
        elif computation is computation.module.entry:
            self._unite_donated()
        self.pinned = {self._find(b) for b in pinned}
        self.live_out = {self._find(b) for b in self._leaves[computation.root]}

    def leaves(self, instruction: Instruction) -> list[int]:
        """The buffers of the arrays in the result of `instruction`, in the order of its shape."""
        return [self._find(b) for b in self._leaves[instruction]]

    def size(self, buffer: int) -> int:
        return self._sizes[buffer]

    @cached_property
    def _sizes(self) -> list[int]:
        sizes = [0] * len(self._parent)
        for number, size in enumerate(self._size):
            root = self._find(number)
            sizes[root] = max(sizes[root], size)
        return sizes

    @cached_property
    def accesses(self) -> dict[Instruction, Access]:
        """Buffers that each instruction reads and writes. Both ends of an async pair have the accesses of the start."""
        found = {}
        for instruction in self.computation.instructions:
            if instruction.opcode not in _NO_ACCESS:
                source = start_of(instruction) if is_done(instruction) else instruction
                read = (b for o in source.operands for b in self.leaves(o))
                written = (b for n, b in enumerate(self.leaves(source)) if not _hands_on(source, n))
                found[instruction] = Access(tuple(dict.fromkeys(read)), tuple(dict.fromkeys(written)))
        return found

    @cached_property
    def touches(self) -> dict[Instruction, list[int]]:
        """Buffers that each instruction reads or writes, except pinned buffers."""
        return {
            i: [b for b in dict.fromkeys((*a.reads, *a.writes)) if b not in self.pinned]
            for i, a in self.accesses.items()
        }

    @cached_property
    def calling(self) -> list[Instruction]:
        """Instructions that run other computations."""
        return [i for i in self.computation.instructions if i.opcode in CONTROL_FLOW]

    @cached_property
    def touch_counts(self) -> dict[int, int]:
        """Number of instructions that read or write each buffer; one more for buffers of the computation's result."""
        counts = dict.fromkeys(self.live_out, 1)
        for touched in self.touches.values():
            for buffer in touched:
                counts[buffer] = counts.get(buffer, 0) + 1
        return counts

    def order_edges(self, sequence: Sequence[Instruction]) -> list[tuple[Instruction, Instruction]]:
        """Pairs (before, after) of instructions that must keep their order because they access one buffer."""
        writers: dict[int, int] = {}
        for access in self.accesses.values():
            for buffer in access.writes:
                writers[buffer] = writers.get(buffer, 0) + 1
        shared = {b for b, n in writers.items() if n > 1 or b in self.pinned}
        last: dict[int, Instruction] = {}
        readers: dict[int, list[Instruction]] = {}
        edges: dict[tuple[Instruction, Instruction], None] = {}
        for instruction in sequence:
            access = self.accesses.get(instruction)
            if access is None:
                continue
            for buffer in access.reads:
                if buffer in shared:
                    if buffer in last:
                        edges[last[buffer], instruction] = None
                    readers.setdefault(buffer, []).append(instruction)
            for buffer in access.writes:
                if buffer in shared:
                    for before in (*readers.pop(buffer, ()), *([last[buffer]] if buffer in last else ())):
                        edges[before, instruction] = None
                    last[buffer] = instruction
        return [(a, b) for a, b in edges if a is not b]

    def _find(self, number: int) -> int:
        root = number
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[number] != root:
            self._parent[number], number = root, self._parent[number]
        return root

    def _unite(self, a: int, b: int) -> None:
        a, b = sorted((self._find(a), self._find(b)))
        self._parent[b] = a

    def _new(self, shape: Any) -> list[int]:
        """A fresh buffer for each array of `shape`."""
        if shapes.is_tuple(shape):
            return [b for s in shape.tuple_shapes for b in self._new(s)]
        self._parent.append(len(self._parent))
        self._size.append(shapes.byte_size(shape))
        return [len(self._parent) - 1]

    def _define(self, instruction: Instruction) -> list[int]:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "tuple":
            return [b for o in operands for b in self._leaves[o]]
        if opcode == "get-tuple-element":
            offset = leaf_offset(operands[0].shape, [instruction.tuple_index])
            return self._leaves[operands[0]][offset : offset + leaf_count(instruction.shape)]
        if opcode in _RENAMES or opcode == "while":
            return list(self._leaves[operands[0]])
        if opcode in ("recv-done", "send-done"):  # the operand is (data, context, token), also if a loop returns it
            leaves = self._leaves[operands[0]]
            return [*leaves[:-2], leaves[-1]] if opcode == "recv-done" else leaves[-1:]
        if is_done(instruction):
            start = start_of(instruction)
            offset = _result_offset(start)
            return self._leaves[start][offset : offset + leaf_count(instruction.shape)]
        if is_start(instruction):
            leaves = self._define_start(instruction)
        else:
            leaves = self._new(instruction.shape)
        if opcode == "send":  # a send reads its data in place
            given = self._leaves[operands[0]]
            leaves = [*given, *leaves[len(given) :]]
        if opcode in ("call", "conditional"):
            self._unite_alike(leaves, [b for o in operands for b in self._leaves[o]])
        for output, operand, offset in _in_place(instruction):
            self._unite(leaves[output], self._leaves[operands[operand]][offset])
        return leaves

    def _define_start(self, start: Instruction) -> list[int]:
        """The buffers of an async start. The parts of its shape that repeat operands have the operands' buffers."""
        given = [b for o in start.operands for b in self._leaves[o]]
        leaves = self._new(start.shape)
        offset = _result_offset(start)
        if offset:
            return given + leaves[len(given) :]
        if start.opcode == "copy-start":
            return [leaves[0], *given, *leaves[2:]]
        return given  # all-reduce-start works in place

    def _unite_alike(self, results: list[int], given: list[int]) -> None:
        """Makes results and arguments of equal size share a buffer. A callee may return or update an argument."""
        of_size = {self._size[b]: b for b in results}
        for buffer in (*results, *given):
            if self._size[buffer] in of_size:
                self._unite(of_size[self._size[buffer]], buffer)

    def _unite_back_edge(self) -> None:
        state = self._leaves[self.computation.parameters[0]]
        for a, b in zip(state, self._leaves[self.computation.root], strict=True):
            self._unite(a, b)

    def _unite_donated(self) -> None:
        computation = self.computation
        parameters = computation.parameters
        for entry in computation.module.proto.input_output_alias.entries:
            parameter = parameters[entry.parameter_number]
            given = leaf_offset(parameter.shape, entry.parameter_shape_index)
            result = leaf_offset(computation.root.shape, entry.output_shape_index)
            self._unite(self._leaves[parameter][given], self._leaves[computation.root][result])


class Memory:
    """Estimates the peak memory of a module's computations in bytes, callees included.

    The peak excludes the module's arguments, whose bytes are in `arguments`. It also excludes the gaps between buffers,
    so the compiled program needs slightly more.
    """

    def __init__(self, module: HloModule) -> None:
        bodies = {i.called[0] for c in module.computations for i in c.instructions if i.opcode == "while"}
        self.buffers = {c: Buffers(c, c in bodies) for c in module.schedule}
        self.arguments = sum(shapes.byte_size(parameter.shape) for parameter in module.entry.parameters)
        self._peaks: dict[Computation, int] = {}

    def needed(self, module: HloModule) -> int:
        """Bytes that the module needs in the order of its schedule, arguments included."""
        return self.arguments + self.peak(module.entry, module.schedule[module.entry])

    def forget(self) -> None:
        """Drops cached peaks. Call this method after a change of the module's schedule."""
        self._peaks.clear()

    def peak(self, computation: Computation, sequence: Sequence[Instruction]) -> int:
        """Peak bytes of `computation` in the order `sequence`, without the entry's arguments."""
        live = LiveSet(self, computation)
        return max(map(live.place, sequence), default=0)

    def beside(self, computation: Computation) -> int:
        """Bytes that live outside `computation` while it runs: the maximum over its calls."""
        entry = computation.module.entry
        if computation is entry:
            return 0
        much = 1 << 60  # puts the peak at a call of `computation`
        self._peaks = {computation: much}
        peak = self.peak(entry, computation.module.schedule[entry])
        self.forget()
        return max(peak - much, 0)

    def inner(self, computation: Computation) -> dict[Instruction, int]:
        """For each instruction that runs other computations: the peak bytes of the callee that needs most."""
        calling = self.buffers[computation].calling
        return {i: max((self._called_peak(c) for c in i.called), default=0) for i in calling}

    def _called_peak(self, computation: Computation) -> int:
        if computation not in self._peaks:
            sequence = computation.module.schedule.get(computation)
            self._peaks[computation] = 0 if sequence is None else self.peak(computation, sequence)
        return self._peaks[computation]


class LiveSet:
    """Counts the live bytes while a caller places a computation's instructions one by one, in any legal order."""

    def __init__(self, memory: Memory, computation: Computation) -> None:
        buffers = memory.buffers[computation]
        self._size = buffers.size
        self._touches = buffers.touches
        self._left = dict(buffers.touch_counts)
        self._inner = memory.inner(computation)
        self._born: set[int] = set()
        self.bytes = 0

    def needed(self, instruction: Instruction) -> int:
        """Bytes that would live while `instruction` runs if it were placed next."""
        total = self.bytes + self._inner.get(instruction, 0)
        for buffer in self._touches.get(instruction, ()):
            if buffer not in self._born:
                total += self._size(buffer)
        return total

    def after(self, instruction: Instruction) -> int:
        """Bytes that would live after `instruction` if it were placed next."""
        total = self.bytes
        for buffer in self._touches.get(instruction, ()):
            born, dies = buffer in self._born, self._left[buffer] == 1
            total += self._size(buffer) * (int(not born) - int(dies))
        return total

    def place(self, instruction: Instruction) -> int:
        """Places `instruction` next. Returns the bytes that live while it runs."""
        freed = 0
        for buffer in self._touches.get(instruction, ()):
            if buffer not in self._born:
                self._born.add(buffer)
                self.bytes += self._size(buffer)
            self._left[buffer] -= 1
            if not self._left[buffer]:
                freed += self._size(buffer)
        needed = self.bytes + self._inner.get(instruction, 0)
        self.bytes -= freed
        return needed


def leaf_count(shape: Any) -> int:
    """Number of arrays in a shape."""
    return sum(map(leaf_count, shape.tuple_shapes)) if shapes.is_tuple(shape) else 1


def leaf_offset(shape: Any, index: Sequence[int]) -> int:
    """Number of arrays before the part of `shape` at `index` (tuple indices, outermost first)."""
    offset = 0
    for n in index:
        offset += sum(map(leaf_count, shape.tuple_shapes[:n]))
        shape = shape.tuple_shapes[n]
    return offset


def _result_offset(start: Instruction) -> int:
    """Position of the result among the arrays of a start's shape."""
    if start.opcode in ("all-reduce-start", "copy-start"):
        return 0
    return sum(leaf_count(o.shape) for o in start.operands)


def _in_place(instruction: Instruction) -> list[tuple[int, int, int]]:
    """Result arrays that overwrite operand arrays, as (result array, operand number, array of the operand)."""
    declared = [
        (
            leaf_offset(instruction.shape, alias.output_shape_index),
            alias.operand_index,
            leaf_offset(instruction.operands[alias.operand_index].shape, alias.operand_shape_index),
        )
        for alias in instruction.proto.output_operand_aliasing
    ]
    opcode = instruction.opcode
    if opcode in _IN_PLACE:
        return [*declared, *((n, n, 0) for n in range(leaf_count(instruction.shape)))]
    if opcode == "async-start":
        inside = instruction.called[0].root
        offset = _result_offset(instruction)
        through = [
            (offset + output, inside.operands[operand].proto.parameter_number, leaf)
            for output, operand, leaf in _in_place(inside)
            if inside.operands[operand].opcode == "parameter"
        ]
        return declared + through
    if opcode == "fusion":
        return declared + _fused_in_place(instruction.called[0])
    return declared


def is_update(instruction: Instruction) -> bool:
    """Whether `instruction` is a dynamic-update-slice, or a fusion whose first result updates an operand in place."""
    return instruction.opcode in ("dynamic-update-slice", "fusion") and 0 in (n for n, _, _ in _in_place(instruction))


def _fused_in_place(fused: Computation) -> list[tuple[int, int, int]]:
    outputs = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    found = []
    for number, output in enumerate(outputs):
        update = _through_renames(output)
        if update.opcode in _IN_PLACE:
            source = _through_renames(update.operands[0])
            if source.opcode == "parameter":
                found.append((number, source.proto.parameter_number, 0))
    return found


def _through_renames(value: Instruction) -> Instruction:
    while value.opcode in ("bitcast", "reshape", "copy") and value.operands[0].shape.element_type == (
        value.shape.element_type
    ):
        value = value.operands[0]
    return value


def _hands_on(instruction: Instruction, leaf: int) -> bool:
    """Whether result array `leaf` is an unwritten operand: loop-invariant state, or an operand that a start repeats."""
    if instruction.opcode == "send":
        return leaf < leaf_count(instruction.operands[0].shape)
    if is_start(instruction):
        return leaf < _result_offset(instruction) or (instruction.opcode == "copy-start" and leaf == 1)
    if instruction.opcode != "while":
        return False
    body = instruction.called[0]
    if body.root.opcode != "tuple" or leaf_count(instruction.shape) != len(body.root.operands):
        return False
    value = body.root.operands[leaf]
    reads_state = value.opcode == "get-tuple-element" and value.operands[0].opcode == "parameter"
    return reads_state and value.tuple_index == leaf
