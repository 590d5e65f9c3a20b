"""Sums gradients over replicas once, after the last micro-batch, under automatic sharding.

Before, with the batch split over "dp", as the partitioner reads it:      After:
    acc = zeros[L, ...]                                                       acc = zeros[L, R, ...]   R split over "dp"
    for each micro-batch:                                                     for each micro-batch:
        for l: acc[l] += all-reduce(own part of g(l))                             for l: acc[l, own] += own part of g(l)
    step(acc)                                                                 step(all-reduce(acc))

In a shard_map, the program writes its own all-reduces; `late_reductions` moves these.

Contract
    Consumes  accumulators of two strands (`accumulators.py`). The gradients that are added to them are sums over
              replicas (`partial_sums.py`) or results of all-reduces. `parts.py` rewrites the sums as parts. The passes
              `strand_duplication` and `gradient_accumulation` must run before this pass.
    Makes     accumulators with one more dimension R, which holds one part per replica. R is split over the axes that
              the gradients are summed over, except axes that already split the accumulator. After the last loop, the
              parts are summed over R, in the type in which the program sums over replicas (float32 instead of float16).
    Leaves    other gradients, with a note. Examples are gradients that custom calls make, or that are read between
              micro-batches. XLA may still move their all-reduces out of loops. The pass also leaves programs with
              several Shardy meshes, and programs that were lowered for GSPMD, if their tile assignments form no mesh.

Why it is legal: at all times the parts add up to the accumulator. The initial zeros add up to zero, and each sum is
added part by part. Only the order of additions changes: over micro-batches first, over replicas last. Sharding never
changes the values. Propagation (`passes/analysis/propagation.py`) only decides which sums are worth a rewrite.
Cost: no memory. Without the rewrite, each device holds the whole accumulator. With it, each device holds one part of
the same size. A step does one all-reduce per accumulator, instead of one per micro-batch. XLA's pass
while-loop-all-reduce-code-motion does the same for simple loops. But it adds one accumulator for each loop from which
it moves an all-reduce. This takes much memory if loops are nested, as in strands.
The DHelix paper does not describe this rewrite. Megatron's hand-written gradient accumulation does the same.
"""

from dataclasses import dataclass, replace

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import strand_loops
from dhelix.passes.analysis.propagation import UNKNOWN, Propagated, propagate
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.constraints import Axes, leaves_open
from dhelix.passes.hlo.edit import drop_dead
from dhelix.passes.hlo.manual_computation import is_manual
from dhelix.passes.strands.gradients.accumulators import Accumulator, Readers, Use, accumulator
from dhelix.passes.strands.gradients.late_reductions import Reduced, move_behind, reduced
from dhelix.passes.strands.gradients.partial_sums import Partial, PartialSums
from dhelix.passes.strands.gradients.parts import Parts


@dataclass(frozen=True)
class ReplicaSums:
    """This pass has no options."""

    name = "replica-sums"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        loops = strand_loops(module)
        by_hand = _by_hand(module)
        automatic = any(loop.computation not in by_hand for loop in loops)
        known = _propagated(module, context) if automatic else UNKNOWN
        changed = False
        for loop in loops:
            found: list[tuple[Accumulator, Partial]] = []
            late: list[tuple[Accumulator, list[Reduced]]] = []
            readers = Readers(module)
            accumulators = _accumulators(loop, readers)
            carried = {element for one in accumulators for element in one.elements}
            sums, parts = PartialSums(known, readers, carried), dict[Axes, Parts]()
            reasons: dict[str, int] = {}
            places: dict[str, object] = {}
            for one in accumulators:
                try:
                    if collectives := reduced(one):
                        late.append((_checked(one), collectives))
                    elif loop.computation not in by_hand and (partial := _partial(one, sums)).axes:
                        found.append((_checked(one), partial))
                except PassRefusal as refusal:
                    reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
                    places.setdefault(refusal.reason, refusal.place)
            for one, collectives in late:
                move_behind(one, collectives)
            for one, partial in found:
                parts.setdefault(partial.axes, Parts(sums, partial.axes)).open(one, partial)
            _note(found, loop, context)
            if late:
                context.note("all-reduces of gradients moved behind the last micro-batch", loop, accumulators=len(late))
            context.left_alone(reasons, places)
            changed |= bool(found or late)
        for computation in module.computations if changed else ():
            computation.sort()
            drop_dead(computation)
        return changed


def _accumulators(loop: Instruction, readers: Readers) -> list[Accumulator]:
    """The accumulators of `loop`, in the order of its state elements.

    Each accumulator is listed once, even if several elements carry it. An accumulator that is added to another
    accumulator is a part of the other one, so it is left out.
    """
    found = (accumulator(loop, element, readers) for element in range(len(loop.shape.tuple_shapes)))
    every = [one for one in found if one is not None]
    taken: dict[Use, Accumulator] = {}
    for one in sorted(every, key=lambda one: -len(one.elements)):
        others = {taken[element] for element in one.elements if element in taken}
        if not others:
            taken.update(dict.fromkeys(one.elements, one))
        elif len(others) > 1 or not all(element in taken for element in one.elements):
            for other in others:
                other.refusal = PassRefusal("sums of gradients are added to each other in several ways", loop)
    kept = set(taken.values())
    return [one for one in every if one in kept]


def _checked(one: Accumulator) -> Accumulator:
    if one.refusal is not None:
        raise one.refusal
    return one


def _propagated(module: HloModule, context: PassContext) -> Propagated:
    try:
        return propagate(module)
    except PassRefusal as refusal:
        context.note(f"left alone: {refusal.reason}", refusal.instruction)
        return UNKNOWN


def _by_hand(module: HloModule) -> set[Computation]:
    """The bodies of shard_maps, and all computations that these bodies call."""
    found: set[Computation] = set()
    for call in [i for c in module.computations for i in c.instructions if i.opcode == "call" and is_manual(i)]:
        found.update(called for i in graph.walk(call.called[0]) for called in i.called)
        found.update(call.called)
    return found


def _partial(one: Accumulator, sums: PartialSums) -> Partial:
    """The accumulator `one` as a sum over mesh axes of more than one device.

    Raises PassRefusal if it is no such sum, or if the program itself keeps the sum open (`unreduced`) after the loop.
    """
    behind = graph.descendants(one.home, [reader for reader, _ in one.ends])
    if any(leaves_open(value) for value in behind):
        raise PassRefusal(
            "the program itself leaves a sum over replicas open after the last micro-batch", one.home.root
        )
    try:
        found = sums.of_accumulator(one)
    except PassRefusal:
        if one.refusal is None:
            raise
        return Partial((), None)  # `one` is no sum, and it is read in each micro-batch, so it is no gradient
    return replace(found, axes=tuple(axis for axis in found.axes if sums.known.axes[axis] > 1))


def _note(found: list[tuple[Accumulator, Partial]], loop: Instruction, context: PassContext) -> None:
    for axes in dict.fromkeys(partial.axes for _, partial in found):
        these = [one for one, own in found if own.axes == axes]
        size = sum(shapes.byte_size(state.shape.tuple_shapes[k]) for one in these for state, k in [*one.elements][:1])
        said = {"axes": list(axes), "accumulators": len(these), "bytes": size}
        context.note("gradients are summed over replicas once per step", loop, **said)
