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
from collections import Counter, defaultdict
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
from dhelix.passes.sharding.states.state_axes import SplitAxes, StateGroup, axis_name, data_axes
from dhelix.passes.sharding.states.updates import Update, is_placed, results


@dataclass(frozen=True)
class StateSharding:
    """Shards model states.

    Attributes:
      axes: the mesh axes that split states.
      groups: parameters whose states other axes split.
      others: the name of all other parameters.
    """

    axes: SplitAxes
    groups: tuple[StateGroup, ...] = ()
    others: str = "the others"

    name = "state-sharding"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        entry = module.entry
        inline_all(entry)
        for manual in manual_computations(entry):
            inline_all(manual.body)
        every = list(map(Update.of, results(entry)))
        updates = [one for one in every if one.places(self.axes.data)]  # (1)
        self._check_together(every)
        self._check_placed(updates)
        manual = ManualStates(entry)
        read = self._parameters(entry, updates, manual)  # (2)
        gradients = self._inputs(entry, updates, manual)  # (3)
        self._new_states(entry, every)  # (4)
        stayed = manual.finish()
        entry.sort()
        if stayed:
            context.note("gradients stay whole until the last micro-batch", None, count=stayed)
        for group in self._every_group():
            # A group that is replicated has updates, too. Of the others, only what is placed is known to be a state.
            ours = [one for one in (updates if group.name == self.others else every) if self._group(one) == group]
            if ours:
                name = f"{group.name}: " if self.groups else ""
                facts = {"parameters": read[group.name], "gradients": gradients[group.name]}
                context.note(name + self._said(ours, module), None, states=len(ours), **facts)
        return True

    def _said(self, updates: list[Update], module: HloModule) -> str:
        held = [shapes.byte_size(one.result.shape) // self._parts(one, module) for one in updates]
        whole = sum(size * self._parts(one, module, self.axes.data) for size, one in zip(held, updates, strict=True))
        shards = sum(held)
        if shards == whole:
            return f"between steps, every device holds all {bytes_text(whole)} of states"
        return f"between steps, a device holds {bytes_text(shards)} of states instead of {bytes_text(whole)}"

    def _parts(self, update: Update, module: HloModule, over: Axes | None = None) -> int:
        """Into how many parts the axes `over`, by default all axes, split a new state."""
        split = update.split(self.axes.data)
        if split is None:
            return 1
        sizes = mesh_axes(module, split.mesh)
        axes = (axis for axes in split.axes for axis in axes if over is None or axis_name(axis) in over)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def _every_group(self) -> tuple[StateGroup, ...]:
        return *self.groups, StateGroup(self.others, self.axes)

    def _of(self, state: Instruction) -> StateGroup:
        """The group of a state."""
        number, groups = state.proto.parameter_number, self._every_group()
        return next((group for group in self.groups if number in group.arguments), groups[-1])

    def _group(self, update: Update) -> StateGroup | None:
        """The group of an update: that of its placed states, or else of its first state. None if it has no state."""
        placed = [state for state in update.states if is_placed(state, self.axes.data)]
        return next(map(self._of, [*placed, *update.states]), None)

    def _check_together(self, updates: list[Update]) -> None:
        """Refuses groups that tear a parameter and its optimizer states apart."""
        for one in updates if self.groups else ():
            groups = {self._of(state): state for state in one.states if shapes.is_floating(state.shape)}
            if len({group.axes for group in groups}) > 1:
                (first, a), (second, b), *_ = sorted(groups.items(), key=lambda item: item[0].name == self.others)
                raise PassRefusal(
                    f"{_called(a)} is in group {first.name}, but {_called(b)}, which is updated together with it, in "
                    f"{second.name}; name the group by the part of the path that both have, such as 'embedding'"
                )

    def _check_placed(self, updates: list[Update]) -> None:
        """Refuses states that are placed under another plan, or not at all."""
        data, over = self.axes.data, defaultdict[str, set[frozenset[str]]](set)
        for state, split in _placed(updates, data).items():
            over[self._of(state).name].add(data_axes(split, data))
        for group in self._every_group():
            wanted, found = frozenset(group.axes.optimizer), over.get(group.name)
            of_group = f" of {group.name}" if self.groups else ""
            # Of the others, only what is placed is known to be a state. They may have none.
            if not found and wanted and (group.arguments or not over):
                raise PassRefusal(
                    f"no state{of_group} is split over {', '.join(group.axes.optimizer)}: place it with "
                    "dhelix.shard_state(state, plan); the step must return the new state, compute it outside of "
                    "shard_map, and have no out_shardings for it"
                )
            if found and (wanted not in found or any(not axes <= wanted for axes in found)):
                placed = " and ".join(sorted(", ".join(sorted(axes)) for axes in found))
                told = f"splits it over {', '.join(group.axes.optimizer)}" if wanted else "keeps it whole"
                raise PassRefusal(
                    f"the state{of_group} is split over {placed}, but this plan {told}; place it under this plan: "
                    "state = dhelix.shard_state(state, plan)"
                )

    def _parameters(self, entry: Computation, updates: list[Update], manual: ManualStates) -> Counter[str]:
        """Gathers placed states where something other than an update reads them. Returns their numbers by group."""
        users, narrowing = entry.users(), Narrowing()
        gathered: dict[Instruction, StateGroup] = {}
        inside = {i for one in updates for i in one.steps}
        for state, split in _placed(updates, self.axes.data).items():
            group = self._of(state)
            readers = [user for user in users[state] if user not in inside and user is not entry.root]
            if not readers:
                continue
            kept = [_only(over, group.axes.parameters, self.axes.data) for over in split.over]
            whole = constrained(Builder(entry), state, kept, split.mesh, {})
            for reader in readers:
                reader.operands = [whole if operand is state else operand for operand in reader.operands]
            narrowing.narrow(whole, readers)
            manual.enter(whole, readers, group.axes.parameters)
            gathered[whole] = group
        split_ones = {whole: group.axes.parameters for whole, group in gathered.items() if group.axes.parameters}
        users, late = entry.users() if split_ones else {}, LateGathers(local=False)
        for whole, over in split_ones.items():
            self._gather_late(whole, users[whole], over, late)
        late.finish()
        return Counter(group.name for group in gathered.values())

    def _gather_late(
        self, shards: Instruction, readers: list[Instruction], parameters: Axes, late: LateGathers
    ) -> None:
        """Under automatic sharding, gathers a layer's parameters where the layer computes with them.

        Otherwise the partitioner may exchange activations instead, and no pass sees where it gathers. Parameters
        outside of layers, such as an embedding, are left to the partitioner.
        """
        split = stated(shards)
        entered = any(reader.proto.custom_call_target == TO_LOCAL for reader in readers)
        if split is None or entered:
            return
        found = [n for n, over in enumerate(split.over) if over and not set(over).isdisjoint(parameters)]
        if len(found) != 1:
            return
        (dimension,) = found
        held, others = split.over[dimension], any(axes for n, axes in enumerate(split.axes) if n != dimension)

        def gather(value: Instruction, at: int) -> Instruction:
            if not is_of_layer(value):
                return value
            for over in (held, _only(held, (), self.axes.data)):  # or else the partitioner may gather the whole stack
                every: list[Over] = [None if others else ()] * len(value.shape.dimensions)
                every[at] = over
                value = constrained(Builder(value.computation), value, every, split.mesh, {})
            return value

        sizes = mesh_axes(shards.computation.module, split.mesh)
        late.move(shards, readers, (dimension, math.prod(sizes[axis] for axis in split.axes[dimension])), gather)

    def _inputs(self, entry: Computation, updates: list[Update], manual: ManualStates) -> Counter[str]:
        """Splits the values that updates start from, such as gradients. Returns their numbers by group."""
        found = Counter[str]()
        sharded, program = dict[Instruction, Instruction](), list(entry.instructions)
        for one in updates:
            split, group = one.placed_split(self.axes.data), self._group(one)
            assert group is not None  # a state of the update is placed
            for value in one.inputs:
                if value not in sharded:
                    left = manual.leave(value, split, group.axes.gradients)
                    held = value if left else self._accumulated(value, split, group.axes.gradients)
                    found[group.name] += 1
                    sharded[value] = constrained(Builder(entry), held, split.over, split.mesh, {})
        for instruction in program:
            instruction.operands = [sharded.get(operand, operand) for operand in instruction.operands]
        return found

    def _accumulated(self, value: Instruction, split: Split, gradients: Axes) -> Instruction:
        """Returns the result of a loop over micro-batches or of a pipeline, split as `gradients` says.

        With one micro-batch nothing is added up, so each gradient may be reduced right into the shards of the update.
        Then the loop runs once, or it is the loop over layers, which writes one gradient after the other.
        """
        made = value.operands[0] if value.opcode == "get-tuple-element" else value
        if made.opcode != "while" and made.proto.custom_call_target != TO_GLOBAL:
            return value
        if made.opcode == "while" and not _adds_up(WhileLoop(made), value.tuple_index):
            return value
        kept = [_only(over, gradients, self.axes.data) for over in split.over]
        if gradients and made.opcode == "while" and made.called[0].root.opcode == "tuple":
            body, k = made.called[0], value.tuple_index
            body.root.operands[k] = constrained(Builder(body), body.root.operands[k], kept, split.mesh, {})
            body.sort()
        return constrained(Builder(value.computation), value, kept, split.mesh, {})

    def _new_states(self, entry: Computation, every: list[Update]) -> None:
        """Keeps new states where their states are: split, or whole in a group that is replicated."""
        root = entry.root
        made: dict[Instruction, Instruction] = {}
        for one in every:
            split, group, value = one.split(self.axes.data), self._group(one), one.result
            if split is None or not (one.places(self.axes.data) or group in self.groups):
                continue
            while is_sharding_constraint(value):  # the program's own, which may say that the new state is whole
                (value,) = value.operands
            made[one.result] = constrained(Builder(entry), value, split.over, split.mesh, {})
        root.operands = [made.get(operand, operand) for operand in root.operands]


def _adds_up(loop: WhileLoop, k: int) -> bool:
    """Whether a loop adds to its k-th value more than once, instead of writing it part by part."""
    root = loop.body.root
    is_written = root.opcode == "tuple" and root.operands[k].opcode == "dynamic-update-slice"
    return loop.trip_count != 1 and not is_written


def _placed(updates: Iterable[Update], data: Axes) -> dict[Instruction, Split]:
    states = [state for one in updates for state in one.states if is_placed(state, data)]
    return {state: split for state in dict.fromkeys(states) if (split := stated(state)) is not None}


def _only(over: Over, kept: Axes, data: Axes) -> Over:
    """The axes of a dimension without the data-parallel axes that are not among `kept`."""
    return None if over is None else tuple(axis for axis in over if axis in kept or axis not in data)


def _called(state: Instruction) -> str:
    return state.proto.metadata.op_name or state.name
