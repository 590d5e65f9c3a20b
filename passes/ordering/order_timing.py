"""How long orders of operators take, for a search that tries thousands of them, each a little different from another.

What an instruction takes depends on the collectives under way alone: how much is left of each, and whether it runs. So
orders are ways through an automaton, which is built as far as they go:

    State          what is under way (`Player.flights`), such as 120 us of a gather
    Step           an operator, with what must be laid before it and what travels with it
    state[step]    the seconds lost in it, and the state after it: played by the evaluator once, then looked up

Lost is what a step takes beyond the least that it can take; it only grows, so an order that lost too much is given up
before its end. Of an order that was walked to its end the way is kept, and of the next one only what differs is walked:

    kept     a b c d e f g h      the way to c is the same; behind g, where the same operators are laid as before, the
    asked    a b c g d e f h      rest is, too, as soon as the same is under way: at the latest when nothing is

Contract: the seconds are those that the evaluator says of the order's sequence, to rounding. With a `grain` what is
left of collectives is rounded to it, which makes states recur: near enough to tell good orders from bad ones.
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
    """Instructions that are played together; the seconds that they take at least; whether all comes to its end then."""

    instructions: tuple[Instruction, ...]
    least: float
    drains: bool


class State(dict[Step, "tuple[float, State]"]):
    """What is under way between two steps. By step: the seconds lost in it, and the state after it."""

    def __init__(self, states: "States", flights: Flights) -> None:
        super().__init__()
        self.states, self.flights = states, flights
        self.under_way = frozenset(flight[0] for flight in flights)

    def __missing__(self, step: Step) -> "tuple[float, State]":
        found = self[step] = self.states.play(self.flights, step)
        return found


class States:
    """All states that were met, beginning with `idle` lanes, and all steps; `grain` in seconds, 0 is exact."""

    def __init__(self, costs: Mapping[Instruction, Cost], limits: Limits, grain: float = 0.0) -> None:
        self.costs, self.limits, self.grain = costs, limits, grain
        self._steps: dict[tuple[tuple[Instruction, ...], bool], Step] = {}
        self._states: dict[Flights, State] = {}
        self.idle = self._state(())
        self.played = 0  # steps

    def step(self, instructions: tuple[Instruction, ...], drains: bool = False) -> Step:
        found = self._steps.get((instructions, drains))
        if found is None:
            found = Step(instructions, sum(map(self.least, instructions)), drains)
            self._steps[instructions, drains] = found
        return found

    def least(self, instruction: Instruction) -> float:
        """Seconds that an instruction takes whatever is under way; a loop may overlap, so none."""
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
        if self.grain:  # sums of such numbers are exact, so an order takes the same whichever way it was walked
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
        """Never nothing: what is under way has not ended."""
        return max(round(seconds / self.grain), 1) * self.grain

    def _player(self) -> Player:
        return Player(self.costs, self.limits.hardware, self.limits.bodies)


class OrderTiming:
    """Seconds of orders of some of a body's operators, which begin and end with idle lanes.

    Args:
      timed: instructions that take time, and ends, and what of these must come before each.
      parts: of each operator what of `timed` travels with it, and of each wait what travels with its pair.
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
        self._closure: dict[Instruction, int] = {}  # of each instruction all that must come before it, and itself
        for instruction, before in timed.items():
            self._closure[instruction] = self._bit[instruction]
            for earlier in before:
                self._closure[instruction] |= self._closure[earlier]
        self._steps: dict[int, dict[int, tuple[Step, int]]] = {n: {} for n in parts}
        self._decides = {n: self._deciding(n) for n in self._steps}
        self._last: dict[int, Step] = {}
        self._asked, self._played_before = 0, states.played
        self._kept: Order = ()  # the last order that was walked to its end,
        # and before each of its operators and after the last one: seconds lost, state, mask of what is laid.
        self._way: list[tuple[float, State, int]] = [(0.0, states.idle, 0)]
        self._lost = 0.0  # in all of it, what is drained at its end included

    @property
    def work(self) -> int:
        """Orders that were asked about, and steps that were played for them; about 20 microseconds each."""
        return self._asked + self.states.played - self._played_before

    def seconds(self, order: Order, stop: float = math.inf) -> float:
        """Of the order; infinite if it is `stop` or more."""
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
        """With ends moved up, so that no more are in flight than allowed; each instruction is a step of its own."""
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
        """All that is not laid after the last operator, and that nothing is under way behind it."""
        if laid not in self._last:
            self._last[laid] = self.states.step(self._new(laid, self.timed), drains=True)
        return self._last[laid]

    def _deciding(self, number: int) -> int:
        """What of the instructions laid before decides which ones come with an operator or a wait."""
        found = self._closure.get(self.body.head(number), 0)
        for instruction in self.parts[number]:
            found |= self._bit[instruction]
            for earlier in self.timed[instruction]:
                found |= self._bit[earlier]
        return found

    def _step(self, number: int, laid: int) -> tuple[Step, int]:
        """What an operator or a wait brings with it after the instructions `laid`, and its mask."""
        head = self.body.head(number)
        new = self._new(laid, (head,) if head in self.timed else (), self.parts[number])
        found = self.states.step(new), sum(self._bit[i] for i in new)
        self._steps[number][laid & self._decides[number]] = found
        return found

    def _new(
        self, mask: int, wanted: Collection[Instruction], travelling: Sequence[Instruction] = ()
    ) -> tuple[Instruction, ...]:
        """What is laid for the instructions `wanted`, and of those `travelling` what can run then."""
        laid = dict.fromkeys(i for i, bit in self._bit.items() if mask & bit)
        count = len(laid)
        for instruction in wanted:
            lay(instruction, self.timed, laid)
        for instruction in travelling:
            if instruction not in laid and all(b in laid for b in self.timed[instruction]):
                laid[instruction] = None
        return tuple(laid)[count:]


def _differing(order: Order, kept: Order) -> tuple[int, int]:
    """From where to where `order` differs from `kept`; to its end if it has another length."""
    first = next((k for k, (one, other) in enumerate(zip(order, kept, strict=False)) if one != other), len(kept))
    last = len(order)
    if last == len(kept):
        while last > first and order[last - 1] == kept[last - 1]:
            last -= 1
    return min(first, last), last
