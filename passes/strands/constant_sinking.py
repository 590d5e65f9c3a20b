"""Rebuilds large constant-filled arrays where they are read, so that loops need not carry them.

Before:                                              After:
    fill = broadcast(-1e9)       [1, heads, s, s]
    while layers (fill, ...):                            while layers (...):
        shard_map (fill, ...):                               shard_map (...):
            while hops (fill, ...):                              while hops (...):
                select(mask, scores, fill)                           select(mask, scores, broadcast(-1e9))

A scan carries the arrays that its body closes over. If the body applies a mask, one of these arrays is like `fill`.
Without strands, one fill array is alive at a time, because forward and backward layers run one after the other. With
two strands, the first forward pass and the last backward pass both need a fill array. XLA makes both read a single
array, which then stays alive for the whole step.

Contract
    Consumes  programs with two strands.
    Makes     a broadcast inside loop bodies and shard_maps. The broadcast replaces an array that enters the loop body
              or shard_map. This array holds one number in all elements, is loop-invariant, and has at least `least`
              bytes.
    Leaves    everything else. XLA later removes loop state that nothing reads any more.

Why it is legal: every element of the array equals the constant, however the array is sharded.
Cost: none; a broadcast of a constant becomes part of the kernel that reads it. This pass is not based on a paper.
"""

from dataclasses import dataclass

from dhelix.passes.analysis.names import strand_loops
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.edit import TO_GLOBAL, TO_LOCAL, drop_dead, replace_uses

_RENAMES = frozenset("broadcast reshape transpose copy slice".split())


@dataclass(frozen=True)
class ConstantSinking:
    """Rebuilds constant-filled arrays inside the loop bodies and shard_maps that read them.

    Attributes:
      least: size in bytes of the smallest array that is rebuilt. Outside of shard_maps, this is the size of the whole
        array on all devices together. Inside a shard_map, it is the size on one device.
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
            context.note("arrays filled with a constant are made where they are read", arrays=len(sunk), bytes=size)
        return bool(sunk)


def _enters(value: Instruction, callers: dict[Computation, list[Instruction]]) -> bool:
    """Whether `value` is an array of several elements that enters a loop body or a called computation."""
    if shapes.is_tuple(value.shape) or not shapes.element_count(value.shape) > 1:
        return False
    if value.opcode == "get-tuple-element":
        return value.operands[0].opcode == "parameter" and bool(_loop_of(value.computation, callers))
    return value.opcode == "parameter" and any(call.opcode == "call" for call in callers[value.computation])


def _loop_of(body: Computation, callers: dict[Computation, list[Instruction]]) -> Instruction | None:
    loops = [i for i in callers[body] if i.opcode == "while" and i.called[0] is body]
    return loops[0] if len(callers[body]) == 1 and loops else None


def _number(value: Instruction, callers: dict[Computation, list[Instruction]]) -> Instruction | None:
    """The scalar constant that fills `value`; None if it is not proved that one constant fills `value`."""
    for _ in range(100):  # bounds the walk outward through nested loops and calls
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
    """The initial value of the loop-state element that `read` reads; None if the loop may change the element."""
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
    """Replaces all uses of `value` except in the root: the loop still carries the element, but nothing reads it."""
    root = value.computation.root
    handed_on = list(root.operands)
    replace_uses(value.computation, value, made)
    if root.opcode == "tuple":
        root.operands = [value if old is value else new for old, new in zip(handed_on, root.operands, strict=True)]
