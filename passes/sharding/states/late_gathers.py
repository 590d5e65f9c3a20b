"""Moves the all-gather of a parameter to where its elements are used: into the loops over micro-batches and layers.

    w = all-gather(p)                                        for each micro-batch:
    for each micro-batch:                                        for l: x = layer(x, all-gather(p[l]))
        for l: x = layer(x, w[l])                      ->        for l: dx = backward(dx, all-gather(p[l]))
        for l: dx = backward(dx, w[l])

A device then holds whole parameters of one layer at a time (ZeRO-3). What is used outside of loops over layers, such as
an embedding, is gathered in each micro-batch.

JAX keeps converted parameters of all layers for the backward pass, if a layer converts them. A loop then writes shards
into this stack, and backward gathers from it.

Why it is legal: slices of other dimensions, reshapes, transposes, conversions, loops and barriers only pass elements
on, so they commute with an all-gather. All devices run the same iterations, and so gather in the same order. A
conversion to a wider type comes after the all-gather, and one to a narrower type before.
Cost: forward and backward of each micro-batch gather again; `passes/sharding/step_times.py` predicts the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.hlo import Builder, Computation, Instruction
from dhelix.passes.hlo.stacks import is_empty, starts_at_zero
from dhelix.passes.sharding.states.moves import TAKES, Users, divide, divide_taken, is_wider, moved_dimension

_MOVES = frozenset("convert copy reshape transpose".split())

type Readers = tuple[Instruction, ...]
type Gather = Callable[[Instruction, int], Instruction]


@dataclass(frozen=True)
class _Step:
    """A reader that passes a value on.

    Attributes:
      shapes: the shapes in which the value stands, each with the split dimension.
      passed: the values that the reader makes of it, each with the split dimension and the readers of the value.
      taking: the reader, if its attributes have sizes of the value, and the split dimension.
      filled: the start of a loop that writes the value into an empty stack, the element, and the split dimension.
    """

    shapes: Sequence[tuple[Any, int]]
    passed: Sequence[tuple[Instruction, int, Readers]]
    taking: tuple[Instruction, int] | None = None
    filled: tuple[Instruction, int, int] | None = None


class LateGathers:
    """Moves the all-gathers of one computation. The ways of different parameters do not meet, so users stay known.

    Attributes:
      local: whether shapes are those of a device, as in a shard_map. If not, they are global, and stay.
    """

    def __init__(self, local: bool = True) -> None:
        self.local = local
        self._users = Users()
        self._changed: dict[Computation, None] = {}
        self._loops: dict[Computation, Instruction] = {}  # the loops of bodies

    def move(self, shards: Instruction, readers: Iterable[Instruction], split: tuple[int, int], gather: Gather) -> None:
        """Gives `shards` to readers that expect the whole array. Gathers where a reader computes with it.

        Call `finish` after the last parameter.

        Args:
          split: the dimension of `shards` that is split, and into how many parts.
          gather: appends the all-gather of an instruction along a dimension.
        """
        self._pass_on(shards, tuple(readers), split, gather)

    def finish(self) -> None:
        """Orders the instructions of what `move` has changed."""
        for computation in self._changed:
            computation.sort()

    def _pass_on(self, value: Instruction, readers: Readers, split: tuple[int, int], gather: Gather) -> None:
        dimension, parts = split
        steps = {reader: self._step(reader, value, dimension, parts) for reader in readers}
        if any(step is None for step in steps.values()):
            whole = gather(value, dimension)
            self._changed[value.computation] = None
            steps = {reader: step for reader, step in steps.items() if step is not None and self._keeps(reader)}
            for reader in [reader for reader in readers if reader not in steps]:
                reader.operands = [whole if operand is value else operand for operand in reader.operands]
        for step in filter(None, steps.values()):
            if self.local:
                self._divide(step, parts)
            for passed, at, after in step.passed:
                self._pass_on(passed, after, (at, parts), gather)

    def _divide(self, step: _Step, parts: int) -> None:
        for shape, at in step.shapes:
            divide(shape, at, parts)
        if step.taking is not None:
            divide_taken(*step.taking, parts)
        if step.filled is not None:
            start, element, at = step.filled
            empty = start.operands[element]
            start.operands[element] = Builder(start.computation).copy(empty, empty.operands)
            divide(start.operands[element].shape, at, parts)
            self._changed[start.computation] = None

    def _keeps(self, reader: Instruction) -> bool:
        """Whether `reader` and the moves after it only write a value into a stack."""
        while reader.opcode != "dynamic-update-slice":
            after = self._of(reader)
            if len(after) != 1 or reader.opcode not in _MOVES:
                return False
            (reader,) = after
        return True

    def _step(self, reader: Instruction, value: Instruction, dimension: int, parts: int) -> _Step | None:
        """How `reader` passes `value` on; None if it needs the value whole."""
        places = [k for k, operand in enumerate(reader.operands) if operand is value]
        if reader is reader.computation.root or (reader.opcode == "convert" and is_wider(reader)):
            return None
        if reader.opcode == "tuple":
            return self._into_loops(reader, places, dimension)
        if reader.opcode == "dynamic-update-slice":
            return self._into_stack(reader, dimension, parts) if places == [1] else None
        whole = list(value.shape.dimensions)
        whole[dimension] *= parts if self.local else 1
        at = moved_dimension(reader, whole, dimension, parts) if places == [0] else None
        if at is None:
            return None
        taking = (reader, dimension) if reader.opcode in TAKES else None
        return _Step([(reader.shape, at)], [(reader, at, self._of(reader))], taking)

    def _into_loops(self, start: Instruction, places: Sequence[int], dimension: int) -> _Step | None:
        """A tuple with which loops or barriers start; None if anything else reads it, or a loop changes the value."""
        holders, held, passed = self._of(start), [start], list[tuple[Instruction, int, Readers]]()
        for holder in holders:
            loop = holder.opcode == "while"
            inside = [called.parameters[0] for called in holder.called] if loop else []
            if loop and not all(_carries(holder.called[0], k) for k in places):
                return None
            reads = [read for owner in (holder, *inside) for read in self._of(owner)]
            if not (loop or holder.opcode == "opt-barrier") or any(r.opcode != "get-tuple-element" for r in reads):
                return None
            held += [holder, *inside, *([holder.called[0].root] if loop else [])]
            if loop:
                self._loops[holder.called[0]] = holder
            for read in reads:
                if read.tuple_index in places:
                    carried = [user for user in self._of(read) if user is user.computation.root and _carries_it(read)]
                    after = tuple(user for user in self._of(read) if user not in carried)
                    passed.append((read, dimension, after))
        where = [(owner.shape.tuple_shapes[k], dimension) for owner in held for k in places]
        return _Step([*where, *((read.shape, dimension) for read, _, _ in passed)], passed)

    def _into_stack(self, write: Instruction, dimension: int, parts: int) -> _Step | None:
        """An empty stack into which a loop writes the value of each iteration; None if the loop does anything else."""
        body, read, loop = write.computation, write.operands[0], self._loops.get(write.computation)
        if loop is None or read.operands != body.parameters or self._of(read) != (write,):
            return None
        k, start, condition = read.tuple_index, loop.operands[0], loop.called[1]
        index = write.operands[2 + dimension]
        alone = self._of(write) == (body.root,) and body.root.operands[k] is write and self._of(start) == (loop,)
        if not alone or not starts_at_zero([index]) or not is_empty(start.operands[k]):
            return None
        size = write.operands[1].shape.dimensions[dimension] * (parts if self.local else 1)
        reads = [r for owner in (loop, condition.parameters[0]) for r in self._of(owner) if r.tuple_index == k]
        if size != write.shape.dimensions[dimension] or any(r.opcode != "get-tuple-element" for r in self._of(loop)):
            return None
        held = [o.shape.tuple_shapes[k] for o in (start, loop, *body.parameters, *condition.parameters, body.root)]
        where = [(shape, dimension) for shape in (*held, read.shape, write.shape, *(r.shape for r in reads))]
        return _Step(where, [(r, dimension, self._of(r)) for r in reads], filled=(start, k, dimension))

    def _of(self, value: Instruction) -> Readers:
        return tuple(self._users.of(value))


def _carries(body: Computation, element: int) -> bool:
    """Whether a loop passes an element of its state on unchanged."""
    value = body.root.operands[element] if body.root.opcode == "tuple" else body.root
    passes = value.opcode == "get-tuple-element" and value.tuple_index == element
    return passes and value.operands == body.parameters and body.root.operands.count(value) == 1


def _carries_it(read: Instruction) -> bool:
    """Whether the body of a loop passes the element on that `read` reads, and `read` is what it passes on."""
    return read.operands == read.computation.parameters and read.computation.root.operands[read.tuple_index] is read
