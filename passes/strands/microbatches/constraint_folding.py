"""Removes redundant sharding constraints, so that other passes see what a program computes.

Before, as JAX lowers a step on a mesh of explicit axes:      After:
    start = constraint(broadcast(0), S)                           start = constraint(broadcast(0), S)
    while (stack = start, l = 0):                                 while (stack = start, l = 0):
        next  = constraint(constraint(l, -) + 1, -)                   next  = l + 1
        a     = constraint(reshape(dynamic-slice(stack, l)), S')      a     = reshape(dynamic-slice(stack, l))
        new   = constraint(dynamic-update-slice(stack, b, l), S)      new   = dynamic-update-slice(stack, b, l)

S and S' are shardings, and "-" is the sharding of a scalar. In such programs a constraint follows every operation. So
passes recognize no counter, stack of residuals or accumulator. `microbatch_loops.partitions` calls `fold_constraints`
before other passes run.

Contract
    Consumes  constraints that repeat the known sharding of their operand. The sharding of these values is known:
              - scalars, because they are never split, and results of other constraints
              - the result of a call, from the callee's root, and a parameter, if all calls give it one known sharding
              - a loop-carried value, from the initial value, if the loop only moves the carried value or adds to it
              - slices and updates of values with a known sharding
              - reshapes of such values that only add or remove dimensions of size 1
    Makes     the operand in place of the constraint.
    Leaves    all other constraints. Examples are constraints that gather weights before a product, that say where a
              product is summed, or that keep a sum over devices open (`unreduced`). If a constraint of the last kind
              were removed, the partitioner would sum over devices there.

Why it is legal: a constraint returns its operand. The partitioner propagates the known sharding along the same edges,
from the constraint that stays.
Cost: time linear in the number of instructions. No paper describes this pass, which undoes a pattern of JAX's lowering.
"""

from collections.abc import Collection
from dataclasses import replace

from dhelix.passes.hlo import Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.constraints import Split, is_sharding_constraint, stated
from dhelix.passes.hlo.edit import replace_all_uses


def fold_constraints(module: HloModule) -> int:
    """Removes the redundant constraints of `module`. Returns the number of removed constraints."""
    stay = {i for computation in module.computations for i in graph.tied(computation)}
    every = (i for computation in module.computations for i in computation.instructions)
    left = [i for i in every if is_sharding_constraint(i) and i not in stay]
    count = len(left)
    while left:
        shardings = _Shardings(module)
        known = {i for i in left if shardings.says_nothing_new(i)}
        if not known:
            break
        for computation in dict.fromkeys(i.computation for i in left if i in known):
            _take_away(computation, known)
        left = [i for i in left if i not in known]  # the removal may have made more constraints redundant
    return count - len(left)


def _take_away(computation: Computation, known: Collection[Instruction]) -> None:
    stands_for: dict[Instruction, Instruction] = {}
    for instruction in computation.instructions:  # operands first
        if instruction in known:
            operand = instruction.operands[0]
            stands_for[instruction] = stands_for.get(operand, operand)
    replace_all_uses(computation, stands_for)
    computation.instructions = [i for i in computation.instructions if i not in stands_for]


class _Shardings:
    """What earlier constraints say about the sharding of values."""

    def __init__(self, module: HloModule) -> None:
        self.callers = graph.callers(module)
        self.known: dict[Instruction, Split | None] = {}

    def says_nothing_new(self, constraint: Instruction) -> bool:
        """Whether the constraint is redundant."""
        if shapes.is_tuple(constraint.shape):
            return False
        said, operand = stated(constraint), self.of(constraint.operands[0])
        if _is_open(said) or _is_open(operand):
            return said == operand and is_sharding_constraint(constraint.operands[0])
        if not constraint.shape.dimensions:
            return True
        return said is not None and said in (operand, self._carried_as(constraint))

    def of(self, value: Instruction) -> Split | None:
        """The known split of `value`; None if the split is not known."""
        if value not in self.known:
            self.known[value] = None  # a cycle through a loop adds no knowledge
            self.known[value] = self._of(value)
        return self.known[value]

    def _of(self, value: Instruction) -> Split | None:
        if said := stated(value):
            return said
        match value.opcode:
            case "call":
                return self.of(value.called[0].root)
            case "parameter":
                place = value.proto.parameter_number
                calls = [call for call in self.callers[value.computation] if call.opcode == "call"]
                given = {self.of(call.operands[place]) for call in calls}
                return given.pop() if len(given) == 1 else None
            case "get-tuple-element":
                start = self._start(value.operands[0], value.tuple_index)
                return None if start is None else self.of(start)
            case "dynamic-update-slice":
                return self.of(value.operands[0])
            case "dynamic-slice" | "reshape":
                return _of_part(self.of(value.operands[0]), value)
        return None

    def _start(self, source: Instruction, index: int) -> Instruction | None:
        """The initial value of state element `index`, if `source` is a loop or its body's parameter.

        If `source` is a tuple, the element of that tuple. None in all other cases.
        """
        if source.opcode == "parameter":
            source = self._loop(source.computation) or source
        made = source.operands[0] if source.opcode == "while" else source
        return made.operands[index] if made.opcode == "tuple" else None

    def _loop(self, body: Computation) -> Instruction | None:
        return next((i for i in self.callers[body] if i.opcode == "while"), None)

    def _carried_as(self, value: Instruction) -> Split | None:
        """The known split of the loop-state element that `value` becomes, if the loop only adds to that element.

        None otherwise. For example, more than an addition reads a hidden state. So the hidden state keeps its
        constraint, which says where products are summed over devices. A sum also keeps its constraint if an added term
        is split differently, since either sharding could propagate to the sum.
        """
        body = value.computation
        if self._loop(body) is None or body.root.opcode != "tuple":
            return None
        places = [k for k, element in enumerate(body.root.operands) if element is value]
        if len(places) != 1 or any(value in i.operands for i in body.instructions if i is not body.root):
            return None
        reads = [i for i in body.instructions if i.opcode == "get-tuple-element" and i.tuple_index == places[0]]
        reads = [i for i in reads if i.operands[0] is body.parameters[0]]
        if sum(i.operands.count(read) for read in reads for i in body.instructions) > 1:
            return None
        start = self._start(body.parameters[0], places[0])
        known = None if start is None else self.of(start)
        added = [o for o in value.operands[0].operands if o not in reads]
        return known if all(self.of(o) in (None, known) for o in added) else None


def _is_open(known: Split | None) -> bool:
    return known is not None and known.is_open


def _of_part(source: Split | None, part: Instruction) -> Split | None:
    """The sharding of a slice, or of a reshape that adds or drops dimensions of size 1; None for other reshapes.

    A dimension that the slice shortens is not split.
    """
    if source is None:
        return None
    before, after = list(part.operands[0].shape.dimensions), list(part.shape.dimensions)
    whole, each = ((), False), list(zip(source.axes, source.free, strict=True))
    if part.opcode == "dynamic-slice":
        left = [known if a == b else whole for known, a, b in zip(each, before, after, strict=True)]
    elif [d for d in before if d != 1] != [d for d in after if d != 1]:
        return None
    else:
        kept = iter([known for known, d in zip(each, before, strict=True) if d != 1])
        left = [next(kept) if d != 1 else whole for d in after]
    return replace(source, axes=tuple(axes for axes, _ in left), free=tuple(free for _, free in left))
