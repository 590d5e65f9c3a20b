"""Makes large arrays of one number where they are read, instead of carrying them through loops.

Before:                                              After:
    fill = broadcast(-1e9)       [1, heads, s, s]
    while layers (fill, ...):                            while layers (...):
        shard_map (fill, ...):                               shard_map (...):
            while hops (fill, ...):                              while hops (...):
                select(mask, scores, fill)                           select(mask, scores, broadcast(-1e9))

A scan hands on what its body closes over, and JAX closes over such arrays where a mask is applied. In the plain step
one of them lives at a time, since forward and backward layers run one after the other; two strands have both at once,
and XLA makes one array, which lives all the time, of those of the first forward and the last backward pass.

Contract
    Consumes  programs with two strands.
    Makes     in bodies of loops and shard_maps, a broadcast in the place of what enters as an array of one number, is
              not changed on the way, and has at least `least` bytes.
    Leaves    everything else. What nothing reads any more, XLA takes out of the loops.

Why it is legal: all elements of the array are the constant, wherever they lie.
Cost: none; a broadcast of a constant is part of the kernel that reads it. No paper.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.names import strand_loops
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.edit import TO_GLOBAL, TO_LOCAL, drop_dead, replace_uses

_RENAMES = frozenset("broadcast reshape transpose copy slice".split())


@dataclass(frozen=True)
class ConstantSinking:
    """Sinks constants.

    Attributes:
      least: bytes of an array that is worth it, of all devices together.
    """

    least: int = 1 << 20

    name = "constant-sinking"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        if not strand_loops(module):
            return False
        callers = graph.callers(module)
        entering = [i for c in module.computations for i in c.instructions if _enters(i, callers)]
        numbers = {i: _number(i, callers) for i in entering if shapes.byte_size(i.shape) >= self.least}
        sunk = {i: number for i, number in numbers.items() if number is not None}
        for value, number in sunk.items():
            builder = Builder(value.computation)
            made = builder.make("broadcast", value.shape, [builder.copy(number, [])])
            made.proto.metadata.CopyFrom(value.proto.metadata)
            _replace_but_in_root(value, made)
        for computation in dict.fromkeys(value.computation for value in sunk):
            computation.sort()
            drop_dead(computation)
        if sunk:
            size = sum(shapes.byte_size(value.shape) for value in sunk)
            context.note("arrays of one number are made where they are read", arrays=len(sunk), bytes=size)
        return bool(sunk)


def _enters(value: Instruction, callers: dict[Computation, list[Instruction]]) -> bool:
    """Whether `value` is an array that a loop's body or a called computation gets."""
    if shapes.is_tuple(value.shape) or not shapes.element_count(value.shape) > 1:
        return False
    if value.opcode == "get-tuple-element":
        return value.operands[0].opcode == "parameter" and bool(_loop_of(value.computation, callers))
    return value.opcode == "parameter" and any(call.opcode == "call" for call in callers[value.computation])


def _loop_of(body: Computation, callers: dict[Computation, list[Instruction]]) -> Instruction | None:
    loops = [i for i in callers[body] if i.opcode == "while" and i.called[0] is body]
    return loops[0] if len(callers[body]) == 1 and loops else None


def _number(value: Instruction, callers: dict[Computation, list[Instruction]]) -> Instruction | None:
    """The scalar constant that every element of `value` is, if any."""
    for _ in range(100):  # loops in loops, and calls in them
        source, place = value.operands[0] if value.operands else value, value.tuple_index
        if value.opcode == "constant":
            return value if not shapes.element_count(value.shape) > 1 else None
        if value.opcode in _RENAMES:
            value = source
        elif value.opcode == "parameter":
            calls = callers[value.computation]
            if len(calls) != 1 or calls[0].opcode != "call":
                return None
            value = calls[0].operands[value.proto.parameter_number]
        elif value.opcode == "call":
            value = value.called[0].root
        elif value.opcode != "get-tuple-element":
            return None
        elif source.opcode == "custom-call" and source.proto.custom_call_target in (TO_LOCAL, TO_GLOBAL):
            value = source.operands[place]
        elif source.opcode == "call" and source.called[0].root.opcode == "tuple":
            value = source.called[0].root.operands[place]
        else:
            found = _through_loop(value, callers)
            if found is None:
                return None
            value = found
    return None


def _through_loop(read: Instruction, callers: dict[Computation, list[Instruction]]) -> Instruction | None:
    """What an element of a loop's state was before the loop, where the loop does not change it."""
    source = read.operands[0]
    loop = _loop_of(read.computation, callers) if source.opcode == "parameter" else source
    if loop is None or loop.opcode != "while":
        return None
    start, handed_on = loop.operands[0], loop.called[0].root
    if start.opcode != "tuple" or handed_on.opcode != "tuple":
        return None
    kept = handed_on.operands[read.tuple_index]
    same = kept.opcode == "get-tuple-element" and kept.operands[0].opcode == "parameter"
    return start.operands[read.tuple_index] if same and kept.tuple_index == read.tuple_index else None


def _replace_but_in_root(value: Instruction, made: Instruction) -> None:
    """The loop goes on carrying it, unread."""
    root = value.computation.root
    handed_on = list(root.operands)
    replace_uses(value.computation, value, made)
    if root.opcode == "tuple":
        root.operands = [value if old is value else new for old, new in zip(handed_on, root.operands, strict=True)]
