"""Shards the model states of a data-parallel step: the optimizer works on shards, and only parameters are gathered.

Before, with parameters p and optimizer states m that are placed in shards, as XLA's partitioner would run it:

    g  = sum over replicas of gradients(p, batch)
    m' = 0.9 m + 0.1 g                             all-gathers of m, because g is whole
    p' = p - m'

After, where `shard` and `whole` are sharding constraints:

    w  = whole(p)                                  all-gather of p; whole() keeps the axes over which p stays split
    g  = shard(sum over replicas of gradients(w, batch))           reduce-scatter, or all-reduce and slice
    m' = shard(0.9 m + 0.1 g)                      each device updates its own shard
    p' = shard(p - m')

Contract
    Consumes  a step whose state is an argument and a result, with arguments that are split over data-parallel mesh axes
              (`shard_state`). An *update* is the part of the program from which a new state is computed element by
              element. The pass finds it backwards from the results.
    Makes     sharding constraints on the inputs of updates, on new states, and on parameters where the model reads
              them. A state that is read outside of updates is a parameter. With `gradients` split over more axes than
              `parameters`, the accumulators of a loop over micro-batches are split over them, too. Parameters are
              converted before they are gathered, if all readers convert them (`narrow_reads.py`). A shard_map gathers
              and reduce-scatters by itself (`manual_states.py`), each layer in its turn over the axes of `parameters`
              and `gradients`.
    Leaves    results that are not computed from a placed state. Refuses a program without any placed state, which
              programs that were lowered for GSPMD seem to be.

Why it is legal: a sharding constraint never changes a value. It only decides where a value is stored. The two modules
above say why their changes are legal.
Cost: the all-gathers and reduce-scatters of AMSP section IV-C; `passes/sharding/step_times.py` predicts them.
Paper: AMSP sections IV-B and V-B, with tensors split inside (each tensor into equal shards).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.framework.units import bytes_text
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.constraints import Axes, Over, Split, constrained, is_sharding_constraint, mesh_axes, stated
from dhelix.passes.hlo.edit import TO_GLOBAL, TO_LOCAL
from dhelix.passes.hlo.loop_state import WhileLoop
from dhelix.passes.hlo.manual_computation import inline_all, manual_computations
from dhelix.passes.sharding.states.late_gathers import LateGathers
from dhelix.passes.sharding.states.manual_states import ManualStates
from dhelix.passes.sharding.states.moves import is_of_layer
from dhelix.passes.sharding.states.narrow_reads import Narrowing

_ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert copy cosine divide exponential exponential-minus-one floor "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or power remainder round-nearest-even "
    "rsqrt select sign sine sqrt subtract tanh xor".split()
)
_EVERYWHERE_EQUAL = frozenset("broadcast constant iota".split())


@dataclass(frozen=True)
class StateSharding:
    """Shards model states.

    Attributes:
      data: the data-parallel mesh axes.
      optimizer: those of `data` over which states are split between steps.
      parameters: those of `data` over which parameters stay split while the model reads them.
      gradients: those of `data` over which gradients are split in each micro-batch.
    """

    data: Axes
    optimizer: Axes
    parameters: Axes = ()
    gradients: Axes = ()

    name = "state-sharding"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        entry = module.entry
        inline_all(entry)
        for manual in manual_computations(entry):
            inline_all(manual.body)
        updates = [one for one in map(_Update.of, _results(entry)) if one.places(self.data)]  # (1)
        self._check_placed(updates)
        manual = ManualStates(entry, self.parameters, self.gradients)
        read = self._parameters(entry, updates, manual)  # (2)
        gradients = self._inputs(entry, updates, manual)  # (3)
        self._new_states(entry, updates)  # (4)
        stayed = manual.finish()
        entry.sort()
        if stayed:
            context.note("gradients stay whole until the last micro-batch", None, count=stayed)
        held = [shapes.byte_size(one.result.shape) // self._parts(one, module) for one in updates]
        whole = sum(size * self._parts(one, module, self.data) for size, one in zip(held, updates, strict=True))
        shards = sum(held)
        said = f"between steps, a device holds {bytes_text(shards)} of states instead of {bytes_text(whole)}"
        context.note(said, None, states=len(updates), parameters=read, gradients=gradients)
        return True

    def _parts(self, update: _Update, module: HloModule, over: Axes | None = None) -> int:
        """Into how many parts the axes `over`, by default all axes, split a new state."""
        split = update.split(self.data)
        sizes = mesh_axes(module, split.mesh)
        axes = (axis for axes in split.axes for axis in axes if over is None or _name(axis) in over)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def _check_placed(self, updates: list[_Update]) -> None:
        """Refuses states that are placed under another plan, or not at all."""
        over = {_data_axes(split, self.data) for split in _placed(updates, self.data).values()}
        wanted = frozenset(self.optimizer)
        if not over:
            raise PassRefusal(
                f"no state is split over {', '.join(self.optimizer)}: place it with dhelix.shard_state(state, plan); "
                "the step must return the new state, compute it outside of shard_map, and have no out_shardings for it"
            )
        if wanted not in over or any(not axes <= wanted for axes in over):
            placed = " and ".join(sorted(", ".join(sorted(axes)) for axes in over))
            raise PassRefusal(
                f"the state is split over {placed}, but this plan splits it over {', '.join(self.optimizer)}; place it "
                "under this plan: state = dhelix.shard_state(state, plan)"
            )

    def _parameters(self, entry: Computation, updates: list[_Update], manual: ManualStates) -> int:
        """Gathers placed states where something other than an update reads them. Returns their number."""
        users, gathered, narrowing = entry.users(), list[Instruction](), Narrowing()
        inside = {i for one in updates for i in one.steps}
        for state, split in _placed(updates, self.data).items():
            readers = [user for user in users[state] if user not in inside and user is not entry.root]
            if not readers:
                continue
            kept = [_only(over, self.parameters, self.data) for over in split.over]
            whole = constrained(Builder(entry), state, kept, split.mesh, {})
            for reader in readers:
                reader.operands = [whole if operand is state else operand for operand in reader.operands]
            narrowing.narrow(whole, readers)
            manual.enter(whole, readers)
            gathered.append(whole)
        users, late = entry.users() if self.parameters else {}, LateGathers(local=False)
        for whole in gathered if self.parameters else ():
            self._gather_late(whole, users[whole], late)
        late.finish()
        return len(gathered)

    def _gather_late(self, shards: Instruction, readers: list[Instruction], late: LateGathers) -> None:
        """Under automatic sharding, gathers a layer's parameters where the layer computes with them.

        Otherwise the partitioner may exchange activations instead, and no pass sees where it gathers. Parameters
        outside of layers, such as an embedding, are left to the partitioner.
        """
        split = stated(shards)
        entered = any(reader.proto.custom_call_target == TO_LOCAL for reader in readers)
        if split is None or entered:
            return
        found = [n for n, over in enumerate(split.over) if over and not set(over).isdisjoint(self.parameters)]
        if len(found) != 1:
            return
        (dimension,) = found
        held, others = split.over[dimension], any(axes for n, axes in enumerate(split.axes) if n != dimension)

        def gather(value: Instruction, at: int) -> Instruction:
            if not is_of_layer(value):
                return value
            for over in (held, _only(held, (), self.data)):  # or else the partitioner may gather the whole stack
                every: list[Over] = [None if others else ()] * len(value.shape.dimensions)
                every[at] = over
                value = constrained(Builder(value.computation), value, every, split.mesh, {})
            return value

        sizes = mesh_axes(shards.computation.module, split.mesh)
        late.move(shards, readers, (dimension, math.prod(sizes[axis] for axis in split.axes[dimension])), gather)

    def _inputs(self, entry: Computation, updates: list[_Update], manual: ManualStates) -> int:
        """Splits the values that updates start from, such as gradients. Returns their number."""
        sharded, program = dict[Instruction, Instruction](), list(entry.instructions)
        for one in updates:
            split = one.split(self.data)
            for value in one.inputs:
                if value not in sharded:
                    left = manual.leave(value, split)
                    held = value if left else self._accumulated(value, split)
                    sharded[value] = constrained(Builder(entry), held, split.over, split.mesh, {})
        for instruction in program:
            instruction.operands = [sharded.get(operand, operand) for operand in instruction.operands]
        return len(sharded)

    def _accumulated(self, value: Instruction, split: Split) -> Instruction:
        """Returns the result of a loop over micro-batches or of a pipeline, split as `gradients` says.

        With one micro-batch nothing is added up, so each gradient may be reduced right into the shards of the update.
        Then the loop runs once, or it is the loop over layers, which writes one gradient after the other.
        """
        made = value.operands[0] if value.opcode == "get-tuple-element" else value
        if made.opcode != "while" and made.proto.custom_call_target != TO_GLOBAL:
            return value
        if made.opcode == "while" and not _adds_up(WhileLoop(made), value.tuple_index):
            return value
        kept = [_only(over, self.gradients, self.data) for over in split.over]
        if self.gradients and made.opcode == "while" and made.called[0].root.opcode == "tuple":
            body, k = made.called[0], value.tuple_index
            body.root.operands[k] = constrained(Builder(body), body.root.operands[k], kept, split.mesh, {})
            body.sort()
        return constrained(Builder(value.computation), value, kept, split.mesh, {})

    def _new_states(self, entry: Computation, updates: list[_Update]) -> None:
        root = entry.root
        made: dict[Instruction, Instruction] = {}
        for one in updates:
            split, value = one.split(self.data), one.result
            while is_sharding_constraint(value):  # the program's own, which may say that the new state is whole
                (value,) = value.operands
            made[one.result] = constrained(Builder(entry), value, split.over, split.mesh, {})
        root.operands = [made.get(operand, operand) for operand in root.operands]


@dataclass(frozen=True)
class _Update:
    """The part of a program that computes a result element by element.

    Attributes:
      result: the result.
      steps: elementwise instructions of the result's dimensions, up to the result.
      states: parameters of the entry that the steps read, in the order of the entry.
      inputs: other values of the result's dimensions that the steps read.
    """

    result: Instruction
    steps: tuple[Instruction, ...]
    states: tuple[Instruction, ...]
    inputs: tuple[Instruction, ...]

    @classmethod
    def of(cls, result: Instruction) -> _Update:
        """The update that computes `result`."""
        size = list(result.shape.dimensions)
        steps, states, inputs = dict[Instruction, None](), dict[Instruction, None](), dict[Instruction, None]()
        seen, stack = {result}, [result]
        while stack:
            value = stack.pop()
            if value.opcode == "parameter":
                states[value] = None
            elif value.opcode in _ELEMENTWISE or is_sharding_constraint(value):
                steps[value] = None
                alike = [o for o in value.operands if list(o.shape.dimensions) == size and o not in seen]
                seen.update(alike)
                stack.extend(reversed(alike))
            elif value.opcode not in _EVERYWHERE_EQUAL:
                inputs[value] = None
        ordered = sorted(states, key=lambda state: state.proto.parameter_number)
        return cls(result, tuple(steps), tuple(ordered), tuple(inputs))

    def places(self, data: Axes) -> bool:
        """Whether a state of the update is split over data-parallel axes."""
        return any(_is_placed(state, data) for state in self.states)

    def split(self, data: Axes) -> Split:
        """How the result is split: as the first placed state."""
        found = stated(next(state for state in self.states if _is_placed(state, data)))
        assert found is not None
        return found


def _adds_up(loop: WhileLoop, k: int) -> bool:
    """Whether a loop adds to its k-th value more than once, instead of writing it part by part."""
    root = loop.body.root
    is_written = root.opcode == "tuple" and root.operands[k].opcode == "dynamic-update-slice"
    return loop.trip_count != 1 and not is_written


def _results(entry: Computation) -> list[Instruction]:
    root = entry.root
    found = root.operands if root.opcode == "tuple" else [root]
    return [value for value in dict.fromkeys(found) if list(value.shape.dimensions)]


def _placed(updates: Iterable[_Update], data: Axes) -> dict[Instruction, Split]:
    states = [state for one in updates for state in one.states if _is_placed(state, data)]
    return {state: split for state in dict.fromkeys(states) if (split := stated(state)) is not None}


def _is_placed(state: Instruction, data: Axes) -> bool:
    split = stated(state)
    return split is not None and bool(_data_axes(split, data))


def _data_axes(split: Split, data: Axes) -> frozenset[str]:
    return frozenset(name for axes in split.axes for axis in axes if (name := _name(axis)) in data)


def _name(axis: str) -> str:
    """The name of an axis in a sharding's text, which may have a part of the axis: `"dp":(1)2`."""
    return re.sub(r":.*", "", axis).strip('"')


def _only(over: Over, kept: Axes, data: Axes) -> Over:
    """The axes of a dimension without the data-parallel axes that are not among `kept`."""
    return None if over is None else tuple(axis for axis in over if axis in kept or axis not in data)


@dataclass(frozen=True)
class FoundStates:
    """The model states of a program, by the numbers of the entry's arguments.

    Attributes:
      parameters: states that are also read outside of updates.
      optimizer: the other states.
      gradient: bytes of an element of the gradients, as updates read them.
      computed: bytes of an element of most operands of matrix products.
    """

    parameters: tuple[int, ...]
    optimizer: tuple[int, ...]
    gradient: int
    computed: int


def find_states(module: HloModule) -> FoundStates:
    """Finds the states of a program, whether they are placed or not. It takes the program's calls apart.

    A state is an argument from which a result of its shape and type is computed element by element. If such a result
    comes from states of another type alone, as that of fp32 masters does, an argument of its own type is a state, too.
    """
    entry = module.entry
    inline_all(entry)
    for manual in manual_computations(entry):
        inline_all(manual.body)
    updates = [one for one in map(_Update.of, _results(entry)) if one.states]
    states: dict[Instruction, None] = {}
    copied: list[Instruction] = []
    for one in updates:
        alike = [state for state in one.states if shapes.same(state.shape, one.result.shape)]
        states |= dict.fromkeys(alike)
        copied += [] if alike else [one.result]
    arguments = [i for i in entry.instructions if i.opcode == "parameter" and i not in states]
    arguments.sort(key=lambda argument: argument.proto.parameter_number)  # the state comes before the batch
    for result in copied:
        if same := [i for i in arguments if shapes.same(i.shape, result.shape)]:
            arguments.remove(same[0])
            states[same[0]] = None
    inside, users = {i for one in updates for i in one.steps}, entry.users()
    read = {s for s in states if any(user not in inside and user is not entry.root for user in users[s])}
    numbers = {state: state.proto.parameter_number for state in states}
    every = (i for computation in module.computations for i in computation.instructions)
    return FoundStates(
        tuple(sorted(numbers[state] for state in states if state in read)),
        tuple(sorted(numbers[state] for state in states if state not in read)),
        _usual_width(value for one in updates for value in one.inputs),
        _usual_width(operand for i in every if i.opcode == "dot" for operand in i.operands),
    )


def _usual_width(values: Iterable[Instruction]) -> int:
    """Bytes of an element of most of these floating-point values, weighted by their sizes; 4 if there are none."""
    found: dict[int, int] = {}
    for value in values:
        if shapes.is_floating(value.shape):
            width = shapes.byte_size(shapes.scalar(value.shape.element_type))
            found[width] = found.get(width, 0) + shapes.element_count(value.shape)
    return max(found, key=lambda width: found[width], default=4)
