"""Finds what an optimizer updates: the states of a program, and the part of the program that computes the new ones.

    for update in map(Update.of, results(module.entry)):
        update.states            # the parameter and its moments, for example

It knows nothing of Optax. It walks back from each result through elementwise operations of the same dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.passes.hlo.constraints import Axes, Split, is_sharding_constraint, stated
from dhelix.passes.hlo.manual_computation import inline_all, manual_computations
from dhelix.passes.sharding.states.state_axes import data_axes

_ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert copy cosine divide exponential exponential-minus-one floor "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or power remainder round-nearest-even "
    "rsqrt select sign sine sqrt subtract tanh xor".split()
)
_EVERYWHERE_EQUAL = frozenset("broadcast constant iota".split())


@dataclass(frozen=True)
class Update:
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
    def of(cls, result: Instruction) -> Update:
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
        return any(is_placed(state, data) for state in self.states)

    def split(self, data: Axes) -> Split | None:
        """How the result is split: as the first state that is split over data-parallel axes, or else as any state."""
        splits = [split for state in self.states if (split := stated(state)) is not None]
        return next((split for split in splits if data_axes(split, data)), splits[0] if splits else None)

    def placed_split(self, data: Axes) -> Split:
        """How the result of an update that `places` is split."""
        found = self.split(data)
        assert found is not None
        return found


def results(entry: Computation) -> list[Instruction]:
    """The results of a program that are no scalars."""
    root = entry.root
    found = root.operands if root.opcode == "tuple" else [root]
    return [value for value in dict.fromkeys(found) if list(value.shape.dimensions)]


def is_placed(state: Instruction, data: Axes) -> bool:
    """Whether an argument is split over data-parallel axes."""
    split = stated(state)
    return split is not None and bool(data_axes(split, data))


@dataclass(frozen=True)
class FoundStates:
    """The model states of a program, by the numbers of the entry's arguments.

    Attributes:
      parameters: states that are also read outside of updates.
      optimizer: the other states.
      gradient: bytes of an element of the gradients, as updates read them.
      computed: bytes of an element of most operands of matrix products.
      frozen: those of the parameters that no gradient updates.
    """

    parameters: tuple[int, ...]
    optimizer: tuple[int, ...]
    gradient: int
    computed: int
    frozen: tuple[int, ...] = ()


def find_states(module: HloModule) -> FoundStates:
    """Finds the states of a program, whether they are placed or not. It takes the program's calls apart.

    A state is an argument from which a result of its shape and type is computed element by element. If such a result
    comes from states of another type alone, as that of fp32 masters does, an argument of its own type is a state, too.
    """
    entry = module.entry
    inline_all(entry)
    for manual in manual_computations(entry):
        inline_all(manual.body)
    updates = [one for one in map(Update.of, results(entry)) if one.states]
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
    trained = {state for one in updates if one.inputs for state in one.states}
    every = (i for computation in module.computations for i in computation.instructions)
    return FoundStates(
        tuple(sorted(numbers[state] for state in states if state in read)),
        tuple(sorted(numbers[state] for state in states if state not in read)),
        _usual_width(value for one in updates for value in one.inputs),
        _usual_width(operand for i in every if i.opcode == "dot" for operand in i.operands),
        tuple(sorted(numbers[state] for state in read if state not in trained)),
    )


def _usual_width(values: Iterable[Instruction]) -> int:
    """Bytes of an element of most of these floating-point values, weighted by their sizes; 4 if there are none."""
    found: dict[int, int] = {}
    for value in values:
        if shapes.is_floating(value.shape):
            width = shapes.byte_size(shapes.scalar(value.shape.element_type))
            found[width] = found.get(width, 0) + shapes.element_count(value.shape)
    return max(found, key=lambda width: found[width], default=4)
