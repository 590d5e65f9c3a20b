"""Orders of a body's operators: what one takes, whether it fits, and how to make it better by moving operators.

An order is a tuple of operators by number (`Body.operators`). Every instruction of the body follows from it
(`Body.sequence`), and `OrderSearch.seconds` is what the evaluator says of those.

1. `segment`: P of equation 2, two segments from idle lanes to idle lanes. Compute of one strand leads, a collective
   starts as soon as it can; the better of the two ways to lead counts.
2. `allowed`: after which operators of both strands there may be a barrier: what they need has run, and what lives then
   fits into memory. What lives between segments does not depend on the order inside.
3. `improve`: local search. Single operators move to other places, and an order that is faster by the evaluator and
   fits is the next start, until no move helps or the steps are used up. Steps are operators played, so that the
   result does not depend on how fast the host is.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from dhelix.passes.buffers import LiveSet
from dhelix.passes.collectives import is_done
from dhelix.passes.costs import Cost, Lane
from dhelix.passes.hlo import Instruction
from dhelix.passes.operator_keys import CONTROL_FLOW
from dhelix.passes.orders import Limits, few_in_flight
from dhelix.passes.strand_sequences import Body, Operator
from dhelix.passes.timeline import Player

Order = tuple[int, ...]

_REACH = 12  # places that an operator is moved by at once
_GAIN = 1e-6  # share of the time that counts as faster


class OrderSearch:
    """Orders of one body."""

    def __init__(self, body: Body, costs: Mapping[Instruction, Cost], limits: Limits) -> None:
        self.body, self.costs, self.limits = body, costs, limits
        self.timed = {i for i in body.order if is_done(i) or costs[i].seconds > 0.0 or i.opcode in CONTROL_FLOW}
        self.parts = [[i for i in part if i in self.timed] for part in body.parts]
        self.compute = {i: costs[i].seconds for i in body.order if costs[i].lane is Lane.COMPUTE}
        self.compute.update((i, 0.0) for i in body.order if i.opcode in CONTROL_FLOW)
        self.users: list[list[int]] = [[] for _ in body.operators]
        for operator in body.operators:
            for needed in operator.needs:
                self.users[needed].append(operator.number)
        self._segments: dict[tuple[Order, Order], tuple[float, Order]] = {}

    def sequence(self, order: Iterable[int]) -> list[Instruction]:
        """All instructions, with no more collectives in flight than allowed."""
        laid = self.body.sequence(order)
        return few_in_flight(laid, self.body.before, self.costs, self.limits.max_in_flight)

    def seconds(self, order: Iterable[int], stop: float = math.inf) -> float:
        """The whole body, without barriers; infinite as soon as it is clear that it takes `stop` or more."""
        player = Player(self.costs, self.limits.hardware, self.limits.bodies)
        rest = sum(self.compute.values())
        for instruction in self.sequence(order):
            if instruction in self.timed:
                player.play(instruction)
                rest -= self.compute.get(instruction, 0.0)
                if player.now + rest >= stop:
                    return math.inf
        player.drain()
        return player.now

    def peak(self, order: Iterable[int]) -> int:
        """Bytes that live at once."""
        return self.limits.memory.peak(self.body.computation, self.sequence(order))

    def fits(self, order: Iterable[int]) -> bool:
        return self.peak(order) <= self.limits.bytes

    def allowed(self, first: Sequence[Operator], second: Sequence[Operator]) -> Callable[[int, int], bool]:
        """States in which all that was needed has run, and what lives then fits into memory."""
        place = {o.number: n for n, o in enumerate(second)}
        other = {o.number: n for n, o in enumerate(first)}
        of_second = _most(max((place[n] + 1 for n in o.needs if n in place), default=0) for o in first)
        of_first = _most(max((other[n] + 1 for n in o.needs if n in other), default=0) for o in second)
        live = [self._live(first[:i], second) for i in range(len(first) + 1)]

        def allowed(i: int, j: int) -> bool:
            return of_second[i] <= j and of_first[j] <= i and live[i][j] <= self.limits.bytes

        return allowed

    def _live(self, first: Sequence[Operator], second: Sequence[Operator]) -> list[int]:
        """Bytes that live after `first` and the first 0, 1, ... operators of `second`."""
        live = LiveSet(self.limits.memory, self.body.computation)
        for operator in first:
            self._place(operator, live)
        found = [live.bytes]
        for operator in second:
            self._place(operator, live)
            found.append(live.bytes)
        return found

    def _place(self, operator: Operator, live: LiveSet) -> None:
        for instruction in self.body.parts[operator.number]:
            live.place(instruction)
        if operator.number in self.body.ends:
            live.place(self.body.ends[operator.number])

    def segment(self, first: Sequence[Operator], second: Sequence[Operator]) -> tuple[float, Order]:
        """Seconds and order of both segments from idle lanes to idle lanes, in the better of two launch orders."""
        one, other = (tuple(o.number for o in segment) for segment in (first, second))
        tries = [self._lay(one, other)]
        if one and other:
            tries.append(self._lay(other, one))
        return min(tries, key=lambda t: t[0])

    def _lay(self, leading: Order, following: Order) -> tuple[float, Order]:
        """Seconds and order of two segments, `leading` computing first wherever both could.

        While lanes are idle, what computes first could as well be a segment of its own; so the rest is looked up.
        """
        known = self._segments.get((leading, following))
        if known is None:
            head = self._next((*leading, *following), {}) if leading or following else None
            if head is None:
                known = 0.0, ()
            elif self.body.operators[head].lane is Lane.COMPUTE:
                rest = (tuple(n for n in segment if n != head) for segment in (leading, following))
                seconds, order = self._lay(*rest)
                operator = self.body.operators[head]
                known = operator.light + operator.seconds + seconds, (head, *order)
            else:
                known = self._play(leading + following)
            self._segments[leading, following] = known
        return known

    def _play(self, numbers: Order) -> tuple[float, Order]:
        player = Player(self.costs, self.limits.hardware, self.limits.bodies)
        left = dict.fromkeys(numbers)
        laid: list[int] = []
        while left:
            chosen = self._next(left, player.under_way)
            for number in self.body.waits[chosen]:
                player.play(self.body.ends[number])
            for instruction in self.parts[chosen]:
                player.play(instruction)
            laid.append(chosen)
            del left[chosen]
        player.drain()
        return player.now, tuple(laid)

    def _next(self, left: Collection[int], under_way: Collection[Instruction]) -> int:
        """The first of `left` to run: a collective that can start, compute that can, or what must wait least."""
        body = self.body
        ready = [n for n in left if body.operators[n].needs.isdisjoint(left)]
        free = [n for n in ready if not any(body.heads[w] in under_way for w in body.waits[n])] if under_way else ready
        for number in free:
            if body.operators[number].lane is not Lane.COMPUTE:
                return number
        return free[0] if free else ready[0]

    def improve(self, order: Order, steps: int) -> Order:
        """`order` with single operators moved, as long as that is faster and fits, by playing up to `steps`."""
        best, best_seconds = order, self.seconds(order)
        seen = {best}
        tries, improved = steps // max(len(best), 1), True
        operators = sorted(self.body.operators, key=lambda o: (o.lane is Lane.COMPUTE, o.number))
        while improved and tries:
            improved = False
            for operator in operators:
                for moved in self._moved(best, operator):
                    if not tries or moved in seen:
                        continue
                    seen.add(moved)
                    tries -= 1
                    seconds = self.seconds(moved, best_seconds * (1.0 - _GAIN))
                    if seconds < best_seconds * (1.0 - _GAIN) and self.fits(moved):
                        best, best_seconds, improved = moved, seconds, True
                        break
        return best

    def _moved(self, order: Order, operator: Operator) -> Iterator[Order]:
        """Orders with `operator` elsewhere, nearest places first, where its needs and its users' are kept."""
        place = {n: k for k, n in enumerate(order)}
        here = place[operator.number]
        rest = order[:here] + order[here + 1 :]
        low = max((place[n] + 1 for n in operator.needs), default=0)
        high = min((place[n] - 1 for n in self.users[operator.number]), default=len(rest))
        for distance in range(1, _REACH + 1):
            for there in (here - distance, here + distance):
                if low <= there <= high:
                    yield (*rest[:there], operator.number, *rest[there:])


def _most(values: Iterator[int]) -> list[int]:
    """Running maxima, from 0."""
    found = [0]
    for value in values:
        found.append(max(found[-1], value))
    return found
