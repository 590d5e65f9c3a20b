"""Reduces a layer's gradients over data-parallel replicas while the backward pass of the preceding layer runs.

Before, with L layers and M micro-batches:          After:
    for l in L-1 ... 0:                                 grads[L-1] += backward of layer L-1
        grads[l] += backward of layer l                 for l in L-2 ... 0:
    mean = all-reduce(grads / M)                            grads[l] += backward of layer l
                                                            grads[l+1] = all-reduce(grads[l+1] / M)
                                                        grads[0] = all-reduce(grads[0] / M)

Contract
    Consumes  an all-reduce or reduce-scatter of a stack of gradients, which a loop over layers writes. The stack has
              one slot per layer (along dimension 0). The loop writes each slot once, and only the slot's own
              accumulation reads it. Between loop and collective there are only elementwise operations with scalars.
              Calls in the loop's body are already inlined (`strand_duplication`). Under automatic sharding, the program
              has no all-reduce yet, but a sum over replicas (the pass `replica_sums`), which the partitioner turns into
              an all-reduce.
    Makes     the same reduction of each slot, one iteration after the slot is written. The loop's first iteration moves
              in front of the loop, and the last reduction comes after the loop. Sums over replicas get a stack of their
              own. The results of reduce-scatters take the start of their slots, and a slice reads them.
    Leaves    loops in which both strands run, because the other strand's compute hides the reduction there; stacks with
              less than `least` bytes per layer; groups of one device; all-reduces of another shape or type than the
              stack's. With a note, it also leaves loops in which the time that compute would hide is less than three
              times the extra cost of smaller messages (according to `model`).

Why it is legal: a slot is final after the iteration that writes it. The pass knows the slot of each iteration, because
the values of the loop's counter follow from constants (`hlo/loops.py`). For the same reason, all devices reduce the
slots in the same order. The all-reduce and the operations before it act on each element alone. Only the order of
additions may change, because NCCL's order depends on an element's position in the buffer.

Cost: one all-reduce per layer instead of one for all layers, so the latency counts once per layer. The program contains
the loop's body once more. Sums over replicas need one more stack; nothing else needs more memory. Gain: in the last
backward pass, compute can hide the reductions of all layers but one. The DHelix paper does not treat data-parallel
communication. Megatron and DDP overlap it in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.analysis.names import LAYERS, REPLICAS
from dhelix.passes.communication.exchange import UNMEASURED
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import mesh_size
from dhelix.passes.hlo.edit import drop_dead, replace_uses
from dhelix.passes.hlo.graph import descendants, tied
from dhelix.passes.hlo.loop_state import add_element, split
from dhelix.passes.hlo.stacks import one_slot, slot_at, slots_changed
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey

_ELEMENTWISE = frozenset("add subtract multiply divide convert".split())
_WORTH = 3.0  # required ratio of hidden time to the extra cost of smaller messages; this cost is known only roughly

type Users = dict[Instruction, list[Instruction]]
type Scalar = Callable[[Instruction], Instruction]


@dataclass(frozen=True)
class GradientReduction:
    """Reduces gradients layer by layer.

    Attributes:
      model: costs that decide whether a loop is changed. Without a model (None), `costs_decide` decides.
      least: minimal bytes of a layer's gradient; latency dominates smaller messages.
      costs_decide: only matters without a model. If True, no loop is changed. If False, every loop is changed in which
        the pass can reduce gradients.
    """

    model: CostModel | None = None
    least: int = 1 << 20
    costs_decide: bool = False

    name = "gradient-reduction"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        changed, unmeasured = False, self.costs_decide and self.model is None
        for computation in list(module.computations):
            loops = [i for i in computation.instructions if i.opcode == "while"]
            for loop in [i for i in loops if not i.name.startswith(LAYERS)]:
                found = _reductions(loop, self.least)
                if found and (unmeasured or not _pays(loop, found, self.model)):
                    reason = (
                        UNMEASURED if unmeasured else "reducing gradients layer by layer costs more time than it hides"
                    )
                    context.left_alone({reason: len(found)})
                elif found:
                    changed |= _reduce_if_split(loop, found, context)
        return changed


@dataclass(frozen=True)
class _Reduction:
    """The reduction `collective(steps(stack))`, where the stack is an element of the loop's state.

    Attributes:
      element: index of the stack in the loop's state.
      result: the stack after the loop.
      write: the instruction in the body that writes a slot.
      slots: slot numbers in the order of writing.
      steps: elementwise instructions from the stack to the collective, in order.
      collective: the all-reduce, or the sum over replicas.
    """

    element: int
    result: Instruction
    write: Instruction
    slots: list[int]
    steps: tuple[Instruction, ...]
    collective: Instruction

    @property
    def over_replicas(self) -> bool:
        """Whether the collective is a sum over a dimension of the stack."""
        return self.collective.opcode == "reduce"

    @property
    def in_place(self) -> bool:
        """Whether the stack holds the reduced slots. The shard of a reduce-scatter takes the start of its slot."""
        return not self.over_replicas

    @property
    def replicas(self) -> int:
        """Number of replicas of a sum over replicas."""
        return self.result.shape.dimensions[1]


def _reductions(loop: Instruction, least: int) -> list[_Reduction]:
    try:
        whole = WhileLoop(loop)
    except PassRefusal:
        return []
    users = loop.computation.users()
    results = users[loop]
    ordered = tied(loop.computation)
    counted = (whole.trip_count or 0) > 1 and whole.induction_index is not None
    if not counted or loop in ordered or any(r.opcode != "get-tuple-element" for r in results):
        return []
    after = descendants(loop.computation, [loop])
    found = []
    for result in results:
        read = [r for r in results if users[r] or r is loop.computation.root]
        alone = [r.tuple_index for r in read].count(result.tuple_index) == 1
        is_stack = len(result.shape.dimensions) > 0
        reached = _collective_of(result, users, after, least) if alone and is_stack else None
        slots = _written(whole, result.tuple_index) if reached else None
        if slots and reached and ordered.isdisjoint((*reached[0], reached[1])):
            write = whole.body.root.operands[result.tuple_index]
            found.append(_Reduction(result.tuple_index, result, write, slots, *reached))
    return found


def _written(loop: WhileLoop, element: int) -> list[int] | None:
    """The slots of a stack in the order in which the loop writes them.

    None unless the loop writes each slot once and whole, and reads in each iteration only the slot that it writes.
    """
    if slots_changed(loop, element) is None:
        return None
    write = loop.body.root.operands[element]
    table = loop.index_table(write.operands[2])
    users = loop.body.users()
    reads = [u for r, k in loop.reads.items() if k == element for u in users[r] if u is not write]
    if table is None or any(loop.index_table(read.operands[1]) != table for read in reads):
        return None
    return table if sorted(table) == list(range(write.shape.dimensions[0])) else None


def _collective_of(
    result: Instruction, users: Users, after: set[Instruction], least: int
) -> tuple[tuple[Instruction, ...], Instruction] | None:
    """The elementwise steps on a stack, and the reduction after them.

    None if no such reduction of at least `least` bytes per slot follows, or if anything else reads these values.
    """
    steps: list[Instruction] = []
    value = result
    while len(users[value]) == 1 and value is not value.computation.root:
        user = users[value][0]
        if user.opcode == "all-reduce":
            groups = device_groups(user)
            slot = shapes.byte_size(user.shape) // result.shape.dimensions[0]
            alike = user.operands == [value] and shapes.same(user.shape, result.shape)
            worth = slot >= least and max(map(len, groups), default=2) > 1
            return (tuple(steps), user) if alike and worth else None
        if user.opcode == "reduce-scatter" and user.operands == [value]:
            slot = shapes.byte_size(value.shape) // value.shape.dimensions[0]
            return (tuple(steps), user) if slot >= least and list(user.proto.dimensions) != [0] else None
        if user.opcode == "reduce" and user.name.startswith(f"{REPLICAS}."):
            slot = shapes.byte_size(user.shape) // user.shape.dimensions[0]
            return (tuple(steps), user) if slot >= least else None
        if user.opcode not in _ELEMENTWISE or not all(o is value or _is_scalar(o, after) for o in user.operands):
            return None
        steps.append(user)
        value = user
    return None


def _is_scalar(value: Instruction, after: set[Instruction]) -> bool:
    """Whether `value` broadcasts one number that does not depend on the loop."""
    return value.opcode == "broadcast" and not value.proto.dimensions and value not in after


def _pays(loop: Instruction, found: list[_Reduction], model: CostModel | None) -> bool:
    """Whether compute hides more time than `_WORTH` times the extra cost of smaller messages. True without a model."""
    if model is None:
        return True
    costs = model.costs()
    hardware = costs.hardware
    layers, between_nodes = len(found[0].slots), set[bool]()
    in_one = in_parts = 0.0
    for one in found:
        key = _replicas_key(one, hardware) if one.over_replicas else costs.operator_keys[one.collective]
        if isinstance(key, CollectiveKey):
            between_nodes.add(key.nodes > 1)
            in_one += model.estimator.solo(key).seconds
            in_parts += model.estimator.solo(replace(key, bytes=key.bytes // layers)).seconds
    body = [costs[i] for i in loop.called[0].instructions]
    compute = sum(cost.seconds for cost in body if cost.lane is Lane.COMPUTE)
    waits = in_one
    if found[0].over_replicas:  # not partitioned yet: shapes are global
        devices, replicas = mesh_size(loop.computation.module), found[0].replicas
        compute /= devices
        state = shapes.byte_size(loop.computation.root.shape) * replicas / devices
        waits -= 2 * state / hardware.memory_bandwidth  # the optimizer's reads and writes hide this much
    of_compute, of_collective = hardware.rates(between_nodes == {True})
    beside = min((layers - 1) * min(in_parts / of_collective, compute / of_compute), waits)
    return beside * (of_compute + of_collective - 1.0) > _WORTH * (layers * in_parts - in_one)


def _replicas_key(one: _Reduction, hardware: Hardware) -> CollectiveKey:
    """The key of the all-reduce that the partitioner makes from a sum over replicas.

    Assumes that all other mesh axes split the stack, and that they are the minor axes of the mesh. (Usually they are,
    because they communicate more.)
    """
    others = max(mesh_size(one.collective.computation.module) // one.replicas, 1)
    per_node = max(min(one.replicas, hardware.gpus_per_node // others), 1)
    size = shapes.byte_size(one.collective.shape) // others
    return CollectiveKey("all-reduce", size, per_node, max(one.replicas // per_node, 1), others)


def _reduce_if_split(loop: Instruction, found: list[_Reduction], context: PassContext) -> bool:
    try:
        _, rest = split(loop, 1, (loop.name, loop.name))
    except PassRefusal as refusal:
        context.left_alone({refusal.reason: len(found)})
        return False
    moved = sum(shapes.byte_size(one.collective.shape) for one in found)
    context.note("gradients reduced layer by layer", loop, stacks=len(found), bytes=moved)
    _reduce(loop.computation, rest, found)
    return True


def _reduce(computation: Computation, rest: Instruction, found: list[_Reduction]) -> None:
    """Moves the reductions into `rest`, the loop without its first iteration. The last reduction comes after `rest`."""
    previous: dict[Instruction, Instruction] = {}  # index of an iteration -> index of the previous iteration
    for one in found:
        index = one.write.operands[2]
        if index not in previous:
            first = Builder(computation).scalar(one.slots[0], index.shape.element_type)
            previous[index] = add_element(rest, first)
            rest.called[0].root.operands[-1] = index
    sums = [_reduce_inside(rest, one, previous[one.write.operands[2]]) for one in found]
    for one, stack in zip(found, sums, strict=True):
        _reduce_last(computation, one, stack)
    for changed in (rest.called[0], computation):
        drop_dead(changed)
        changed.sort()


def _reduce_inside(loop: Instruction, one: _Reduction, previous: Instruction) -> Instruction | None:
    """Makes the body reduce the previous iteration's slot.

    A barrier makes the body read that slot before it writes to the stack. Otherwise, XLA would copy the stack.

    Returns:
      The stack of sums after the loop; None if the stack of gradients holds them.
    """
    body = loop.called[0]
    builder, users = Builder(body), body.users()
    reads = [read for read, k in WhileLoop(loop).reads.items() if k == one.element]
    place = [previous, *one.write.operands[3:]]
    slot, held = builder.barrier([slot_at(builder, reads[0], place), reads[0]])
    for read in reads:
        for user in users[read]:
            user.operands = [held if o is read else o for o in user.operands]

    def scalar(value: Instruction) -> Instruction:
        return builder.copy(value, []) if value.opcode == "constant" else add_element(loop, value)

    reduced = _reduced(builder, one, slot, scalar)
    if one.in_place:
        body.root.operands[one.element] = builder.copy(one.write, [one.write, reduced, *place])
        return None
    sums = add_element(loop, _empty(Builder(loop.computation), one.collective))
    place = place[: len(sums.shape.dimensions)]
    body.root.operands[-1] = builder.make("dynamic-update-slice", sums.shape, [sums, reduced, *place])
    return Builder(loop.computation).element(loop, len(loop.shape.tuple_shapes) - 1)


def _empty(builder: Builder, like: Instruction) -> Instruction:
    """A stack of zeros; every slot will be overwritten."""
    return builder.make("broadcast", like.shape, [builder.number(0.0, like.shape.element_type)])


def _reduce_last(computation: Computation, one: _Reduction, sums: Instruction | None) -> None:
    builder = Builder(computation)
    zero = [builder.scalar(0, o.shape.element_type) for o in one.write.operands[3:]]
    place = [builder.scalar(one.slots[-1], one.write.operands[2].shape.element_type), *zero]
    reduced = _reduced(builder, one, slot_at(builder, one.result, place), lambda value: value)
    if sums is not None:
        place = place[: len(sums.shape.dimensions)]
    stack = one.result if sums is None else sums
    written = builder.make("dynamic-update-slice", stack.shape, [stack, reduced, *place])
    if one.collective.opcode == "reduce-scatter":
        ranges = [{"start": 0, "limit": size, "stride": 1} for size in one.collective.shape.dimensions]
        written = builder.make("slice", one.collective.shape, [written], slice_dimensions=ranges)
    replace_uses(computation, one.collective, written)


def _reduced(builder: Builder, one: _Reduction, slot: Instruction, scalar: Scalar) -> Instruction:
    """Applies the steps and the collective to one slot. `scalar` makes a scalar available where `builder` builds."""
    known: dict[Instruction, Instruction] = {one.result: slot}
    for step in (*one.steps, one.collective):
        for operand in step.operands:
            if operand not in known:
                number = scalar(operand.operands[0] if operand.opcode == "broadcast" else operand)
                known[operand] = number
                if operand.opcode == "broadcast":
                    known[operand] = builder.make("broadcast", one_slot(operand.shape), [number])
        known[step] = builder.copy(step, [known[o] for o in step.operands])
        known[step].proto.shape.CopyFrom(one_slot(step.shape))
    return known[one.collective]
