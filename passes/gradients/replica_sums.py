"""Leaves gradients' sums over replicas open until the last micro-batch, under automatic sharding.

Before, with the batch split over "dp", as the partitioner reads it:      After:
    acc = zeros[L, ...]                                                       acc = zeros[L, R, ...]   R split over "dp"
    for each micro-batch:                                                     for each micro-batch:
        for l: acc[l] += all-reduce(own part of g(l))                             for l: acc[l, own] += own part of g(l)
    step(acc)                                                                 step(all-reduce(acc))

In a shard_map, where the program writes its all-reduces, these move (`late_reductions`).

Contract
    Consumes  accumulators of two strands (`accumulators.py`) to which only such gradients are added as `partial_sums`
              can write in parts, or as all-reduces give. `strand_duplication` and `gradient_accumulation` ran before.
    Makes     accumulators with one more dimension R, one part a replica, split over the axes that the gradients are
              summed over and the accumulator is not split over. Behind the last loop stands their sum over R, in the
              type in which the program summed over replicas.
    Leaves    gradients of which that is not so (made by loops or custom calls, or read between micro-batches), with the
              reason: they are left to XLA's own motion of all-reduces out of loops. Programs with several
              Shardy meshes, and those lowered for GSPMD of whose tiles no mesh can be made, with the reason.

Why it is legal: an accumulator is the sum of its parts throughout: zeros are, and a sum is added to part by part. Only
the order of additions changes: over micro-batches first, over replicas last. Where values lie never changes what is
computed; propagation (`passes/analysis/propagation.py`) says only what pays.
Cost: nothing in memory, since each device holds one part of the size of the whole. One all-reduce of each accumulator a
step, not one a micro-batch. XLA's while-loop-all-reduce-code-motion does so to simple loops, with an accumulator
more for each loop that it leaves: 5.0 GiB of temporaries became 8.5 where strands nest loops.
Not in DHelix; Megatron's gradient accumulation does it by hand.
"""

from dataclasses import dataclass
from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import strand_loops
from dhelix.passes.analysis.propagation import UNKNOWN, Propagated, propagate
from dhelix.passes.gradients.accumulators import Accumulator, Readers, Use, accumulator
from dhelix.passes.gradients.late_reductions import Reduced, move_behind, reduced
from dhelix.passes.gradients.partial_sums import Parts, partial_axes, sum_of_parts, summed_type, with_dimension
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.constraints import Axes, is_sharding_constraint, leaves_open
from dhelix.passes.hlo.edit import drop_dead, replace_uses
from dhelix.passes.hlo.manual_computation import is_manual
from dhelix.passes.hlo.stacks import zeros_behind
from dhelix.passes.manager import PassContext, Stage

_FIRST_INDEX = {"dynamic-slice": 1, "dynamic-update-slice": 2}


@dataclass(frozen=True)
class ReplicaSums:
    """No options."""

    name = "replica-sums"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        loops = strand_loops(module)
        by_hand = _by_hand(module)
        automatic = any(loop.computation not in by_hand for loop in loops)
        known = _propagated(module, context) if automatic else UNKNOWN
        changed = False
        for loop in loops:
            found: list[tuple[Accumulator, Axes]] = []
            late: list[tuple[Accumulator, list[Reduced]]] = []
            readers = Readers(module)
            reasons: dict[str, int] = {}
            taken: set[Use] = set()
            for element in range(len(loop.shape.tuple_shapes)):
                if (loop, element) in taken:
                    continue  # of an accumulator that goes through several elements
                try:
                    one = accumulator(loop, element, readers)
                    taken.update(one.elements if one is not None else ())
                    if one is not None and (collectives := reduced(one)):
                        late.append((one, collectives))
                    elif one is not None and loop.computation not in by_hand and (axes := _open_axes(one, known)):
                        found.append((one, axes))
                except PassRefusal as refusal:
                    reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
            for one, collectives in late:
                move_behind(one, collectives)
            for one, axes in found:
                _open(one, Parts(known, axes))
            _note(found, loop, context)
            if late:
                context.note("all-reduces of gradients stand behind the last micro-batch", loop, accumulators=len(late))
            context.left_alone(reasons)
            changed |= bool(found or late)
        for computation in module.computations if changed else ():
            computation.sort()
            drop_dead(computation)
        return changed


def _propagated(module: HloModule, context: PassContext) -> Propagated:
    try:
        return propagate(module)
    except PassRefusal as refusal:
        context.note(f"left alone: {refusal.reason}", refusal.instruction)
        return UNKNOWN


def _by_hand(module: HloModule) -> set[Computation]:
    """Computations of one device's parts: of shard_maps, and what these call."""
    found: set[Computation] = set()
    for call in [i for c in module.computations for i in c.instructions if i.opcode == "call" and is_manual(i)]:
        found.update(called for i in graph.walk(call.called[0]) for called in i.called)
        found.update(call.called)
    return found


def _open_axes(one: Accumulator, known: Propagated) -> Axes:
    """The axes over which all that is added is a sum, and over which the accumulator is not split.

    Raises PassRefusal where the program has a type for what becomes of the sum while it is open (`unreduced`).
    """
    behind = graph.descendants(one.home, [reader for reader, _ in one.ends])
    if any(leaves_open(value) for value in behind):
        raise PassRefusal(
            "the program itself keeps a sum over replicas open behind the last micro-batch", one.home.root
        )
    reached: dict[Instruction, Axes] = {}
    axes = set(known.axes)
    for reader, number in one.added:
        axes &= set(partial_axes(reader.operands[number], known, reached))
    for value in one.values:
        for dimension in known.of(value) or ():
            axes -= set(dimension)
    return tuple(axis for axis in known.axes if axis in axes and known.axes[axis] > 1)


def _note(found: list[tuple[Accumulator, Axes]], loop: Instruction, context: PassContext) -> None:
    for axes in dict.fromkeys(axes for _, axes in found):
        these = [one for one, own in found if own == axes]
        size = sum(shapes.byte_size(state.shape.tuple_shapes[k]) for one in these for state, k in [*one.elements][:1])
        said = {"axes": list(axes), "accumulators": len(these), "bytes": size}
        context.note("gradients are summed over replicas once a step", loop, **said)


def _open(one: Accumulator, parts: Parts) -> None:
    """Rewrites an accumulator: (1) what is added, (2) what holds it, (3) zeros, (4) what reads the sum."""
    at = 1 if one.is_stack else 0
    summed_in = summed_type([reader.operands[number] for reader, number in one.added])
    added = [(use, _in_place(parts, use[0].operands[use[1]], at)) for use in one.added]  # (1)
    _give(added)
    for state, element in one.elements:  # (2)
        for owner in (state, state.called[0].parameters[0], state.called[1].parameters[0]):
            _widen(owner.shape.tuple_shapes[element], at, parts.count)
        for owner in (state.operands[0], state.called[0].root):
            _widen(owner.shape.tuple_shapes[element], at, parts.count)
    for value in one.values:
        _widen(value.shape, at, parts.count)
        if value.opcode in _FIRST_INDEX:
            first = _FIRST_INDEX[value.opcode]
            zero = Builder(value.computation).scalar(0, value.operands[first].shape.element_type)
            value.operands.insert(first + at, zero)
        if value.opcode == "dynamic-slice":
            value.proto.dynamic_slice_sizes.insert(at, parts.count)
    for value in one.values:  # what they say of the sum, those of `parts` say of the parts
        if is_sharding_constraint(value) and not zeros_behind(value):
            replace_uses(value.computation, value, value.operands[0])
    zeros = [(use, zeros_behind(use[0].operands[use[1]])) for use in one.zeros]
    _give([(use, parts.zeros(found, at)) for use, found in zeros if found is not None])  # (3)
    sums: dict[Instruction, Instruction] = {}
    for reader, number in one.ends:  # (4)
        value = reader.operands[number]
        if value not in sums:
            sums[value] = sum_of_parts(value, at, summed_in)
        reader.operands[number] = sums[value]


def _give(values: list[tuple[Use, Instruction]]) -> None:
    for (reader, number), value in values:
        reader.operands[number] = value


def _in_place(parts: Parts, value: Instruction, at: int) -> Instruction:
    """`value` in parts, with the replicas' dimension behind that of a single slot where it goes into a stack."""
    made = parts.of(value)
    if not at:
        return made
    builder = Builder(value.computation)
    return builder.make("reshape", with_dimension(value.shape, at, parts.count), [made])


def _widen(shape: Any, at: int, count: int) -> None:
    shape.CopyFrom(with_dimension(shape, at, count))
