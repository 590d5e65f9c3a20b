"""Times many similar orders of operators, for a search that tries thousands of them.

The time of an instruction depends only on the collectives in flight: on the time that each of them still needs, and on
whether it runs already. So an order is a path through an automaton. The automaton is built on demand:

    State          what is in flight (`Player.flights`), such as 120 us of a gather
    Step           an operator, with instructions that must run before it and those that travel with it
    state[step]    seconds lost in the step, and the state after it; simulated once, then looked up

An instruction that is too short to be an operator travels with an operator: it is placed together with the operator
(`strand_sequences.py`).

The loss of a step is its time beyond the least time that it can take. Losses are never negative. So an order is given
up as soon as it has lost too much. The path of the last complete order is kept. For the next order, only the part that
differs is evaluated:

    kept     a b c d e f g h
    asked    a b c g d e f h

Up to c, both paths are the same. After seven operators, both orders have placed the same operators. From there on, the
rest of the kept path counts as soon as both paths reach the same state at the same place.

Contract: `OrderTiming.seconds` equals the evaluator's time of the order's instructions, up to rounding. If the `grain`
of `States` is above 0, the remaining times of collectives are rounded, so that states recur. This is accurate enough to
tell good orders from bad ones.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.evaluation.timeline import Flights, Player
from dhelix.passes.hlo import Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import Limits, few_in_flight
from dhelix.passes.ordering.strand_sequences import Body, lay

Order = tuple[int, ...]

_QUANTUM = 2.0**-50  # seconds


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Instructions that are simulated together.

    Attributes:
      least: the least seconds that these instructions can take.
      drains: whether the step also waits until nothing is in flight.
    """

    instructions: tuple[Instruction, ...]
    least: float
    drains: bool


class State(dict[Step, "tuple[float, State]"]):
    """The collectives in flight between two steps.

    Maps the next step to the seconds lost in it (its time beyond `Step.least`), and to the state after it.
    """

    def __init__(self, states: "States", flights: Flights) -> None:
        super().__init__()
        self.states, self.flights = states, flights
        self.under_way = frozenset(flight[0] for flight in flights)

    def __missing__(self, step: Step) -> "tuple[float, State]":
        found = self[step] = self.states.play(self.flights, step)
        return found


class States:
    """All steps and all states reached so far, starting with `idle`.

    Args:
      grain: unit, in seconds, to which remaining times of collectives are rounded; 0 does not round.
    """

    def __init__(self, costs: Mapping[Instruction, Cost], limits: Limits, grain: float = 0.0) -> None:
        self.costs, self.limits, self.grain = costs, limits, grain
        self._steps: dict[tuple[tuple[Instruction, ...], bool], Step] = {}
        self._states: dict[Flights, State] = {}
        self.idle = self._state(())
        self.played = 0  # number of simulated steps

    def step(self, instructions: tuple[Instruction, ...], drains: bool = False) -> Step:
        found = self._steps.get((instructions, drains))
        if found is None:
            found = Step(instructions, sum(map(self.least, instructions)), drains)
            self._steps[instructions, drains] = found
        return found

    def least(self, instruction: Instruction) -> float:
        """The least seconds of an instruction, whatever is in flight.

        For a loop, call or conditional, this is 0, because collectives in flight change what overlaps inside it.
        """
        if instruction.opcode in CONTROL_FLOW:
            return 0.0
        player = self._player()
        player.play(instruction)
        return player.now

    def play(self, flights: Flights, step: Step) -> tuple[float, State]:
        self.played += 1
        player = self._player()
        player.resume(flights)
        for instruction in step.instructions:
            player.play(instruction)
        if step.drains:
            player.drain()
        lost = player.now - step.least
        if self.grain:  # sums of multiples of the quantum are exact, so the time is independent of the cached path
            lost = round(lost / _QUANTUM) * _QUANTUM
        return lost, self._state(player.flights())

    def _state(self, flights: Flights) -> State:
        if self.grain:
            flights = tuple([(i, lane, self._rounded(left), running) for i, lane, left, running in flights])
        found = self._states.get(flights)
        if found is None:
            found = self._states[flights] = State(self, flights)
        return found

    def _rounded(self, seconds: float) -> float:
        """Rounds `seconds` to whole grains, and to at least one, because a collective in flight has not ended."""
        return max(round(seconds / self.grain), 1) * self.grain

    def _player(self) -> Player:
        return Player(self.costs, self.limits.hardware, self.limits.bodies)


class OrderTiming:
    """Times orders of a body's operators, or of some of them. All lanes are idle before and after an order.

    Args:
      timed: maps each done, and each instruction that takes time, to the keys of this map that must come before it.
      parts: for each operator, the instructions of `timed` that belong to it (`Body.parts`). A wait (`Body.waits_for`)
        has the instructions of its async pair.
    """

    def __init__(
        self,
        body: Body,
        states: States,
        timed: Mapping[Instruction, Sequence[Instruction]],
        parts: Mapping[int, Sequence[Instruction]],
    ) -> None:
        self.body, self.states, self.timed, self.parts = body, states, timed, parts
        self.most_in_flight = states.limits.max_in_flight
        self.least = sum(map(states.least, timed))
        self._bit = {i: 1 << n for n, i in enumerate(timed)}
        self._closure: dict[Instruction, int] = {}  # for each instruction, a mask of itself and all predecessors
        for instruction, before in timed.items():
            self._closure[instruction] = self._bit[instruction]
            for earlier in before:
                self._closure[instruction] |= self._closure[earlier]
        self._steps: dict[int, dict[int, tuple[Step, int]]] = {n: {} for n in parts}
        self._decides = {n: self._deciding(n) for n in self._steps}
        self._last: dict[int, Step] = {}
        self._asked, self._played_before = 0, states.played
        self._kept: Order = ()  # the last order that was timed to its end
        # Before each operator of `_kept` and after the last one: seconds lost, state, mask of placed instructions.
        self._way: list[tuple[float, State, int]] = [(0.0, states.idle, 0)]
        self._lost = 0.0  # seconds lost in all of `_kept`, the final drain included

    @property
    def work(self) -> int:
        """Number of timed orders plus number of simulated steps: a deterministic measure of the effort."""
        return self._asked + self.states.played - self._played_before

    def seconds(self, order: Order, stop: float = math.inf) -> float:
        """Time of the order in seconds; infinite if this time is `stop` or more."""
        self._asked += 1
        if self.most_in_flight is not None:
            return self._crowded_seconds(order, stop)
        most, steps, decides, way = stop - self.least, self._steps, self._decides, self._way
        first, last = _differing(order, self._kept)
        place, walked = first, []
        lost, state, laid = way[first]
        while place < last or (place < len(order) and (way[place][1] is not state or way[place][2] != laid)):
            walked.append((lost, state, laid))
            number = order[place]
            step, mask = steps[number].get(laid & decides[number]) or self._step(number, laid)
            laid |= mask
            more, state = state[step]
            lost += more
            if lost >= most:
                return math.inf
            place += 1
        if place < len(order):
            ahead = lost - way[place][0]
            total = self._lost + ahead
            rest = [(before + ahead, under_way, mask) for before, under_way, mask in way[place:]]
        else:
            total = lost + state[self._ending(laid)][0]
            rest = [(lost, state, laid)]
        if total >= most:
            return math.inf
        self._kept, self._way, self._lost = order, [*way[:first], *walked, *rest], total
        return self.least + total

    def _crowded_seconds(self, order: Order, stop: float) -> float:
        """Does the same as `seconds`, but with a limit on the collectives in flight.

        Dones move up, and each instruction is a step of its own.
        """
        sequence: list[Instruction] = []
        laid = 0
        for number in order:
            step, mask = self._steps[number].get(laid & self._decides[number]) or self._step(number, laid)
            laid |= mask
            sequence += step.instructions
        sequence += self._ending(laid).instructions
        seconds, state = self.least, self.states.idle
        for instruction in few_in_flight(sequence, self.timed, self.states.costs, self.most_in_flight):
            lost, state = state[self.states.step((instruction,))]
            seconds += lost
        seconds += state[self.states.step((), drains=True)][0]
        return seconds if seconds < stop else math.inf

    def _ending(self, laid: int) -> Step:
        """The step that places all remaining instructions and waits until nothing is in flight."""
        if laid not in self._last:
            self._last[laid] = self.states.step(self._new(laid, self.timed), drains=True)
        return self._last[laid]

    def _deciding(self, number: int) -> int:
        """Mask of the instructions that change the step of an operator or a wait if they are placed before it."""
        found = self._closure.get(self.body.head(number), 0)
        for instruction in self.parts[number]:
            found |= self._bit[instruction]
            for earlier in self.timed[instruction]:
                found |= self._bit[earlier]
        return found

    def _step(self, number: int, laid: int) -> tuple[Step, int]:
        """The step of an operator or a wait after the instructions in the mask `laid`, and the mask of the step."""
        head = self.body.head(number)
        new = self._new(laid, (head,) if head in self.timed else (), self.parts[number])
        found = self.states.step(new), sum(self._bit[i] for i in new)
        self._steps[number][laid & self._decides[number]] = found
        return found

    def _new(
        self, mask: int, wanted: Collection[Instruction], travelling: Sequence[Instruction] = ()
    ) -> tuple[Instruction, ...]:
        """The instructions that follow those in `mask`: `wanted` and what it needs, then `travelling`.

        A travelling instruction is left out if one of its predecessors is not placed yet.
        """
        laid = dict.fromkeys(i for i, bit in self._bit.items() if mask & bit)
        count = len(laid)
        for instruction in wanted:
            lay(instruction, self.timed, laid)
        for instruction in travelling:
            if instruction not in laid and all(b in laid for b in self.timed[instruction]):
                laid[instruction] = None
        return tuple(laid)[count:]


def _differing(order: Order, kept: Order) -> tuple[int, int]:
    """The range of `order` that differs from `kept`; the range reaches to the end if the lengths differ."""
    first = next((k for k, (one, other) in enumerate(zip(order, kept, strict=False)) if one != other), len(kept))
    last = len(order)
    if last == len(kept):
        while last > first and order[last - 1] == kept[last - 1]:
            last -= 1
    return min(first, last), last
