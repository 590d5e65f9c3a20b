"""Searches for fast orders of a body's operators: times an order, checks its memory, and improves it.

A body is a scheduled computation, split into operators (`strand_sequences.Body`). An order is a tuple of operator
numbers, of the whole body or of a part of it. An order of the whole body may also hold waits: places where compute
waits for a collective before any operator needs it (`Body.waits_for`). `Body.sequence` turns an order of operators into
an order of all instructions.

- `segment` gives P of equation 2 (`pairing_table.py`): the time of two segments, with idle lanes before and after.
  Collectives start as early as they can. The compute of either strand may come first: the faster way counts.
- `allowed` tells where a barrier may stand: the operators before it must not need any operator after it, and the live
  values must fit into memory. Live values at a barrier do not depend on the order inside segments.
- `improve` is a local search. Random moves of operators and waits come first. A move is accepted if the new order is
  slower by less than a threshold, which falls to zero (threshold accepting: Dueck and Scheuer, 1990). Some moves take
  along the operators in between that depend on the moved operator, or on which it depends. Half-way, the search tries
  other orders of the collectives. At the end, each operator moves by a few places as long as that is faster. Most parts
  of a moved order are looked up instead of simulated (`order_timing.py`). The remaining times of collectives are
  rounded slightly, so that more lookups succeed. The search ends after a fixed amount of work, so the result is the
  same on every host.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from dhelix.passes.analysis.buffers import LiveSet
from dhelix.passes.analysis.collectives import is_done, start_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import Player
from dhelix.passes.hlo import Instruction
from dhelix.passes.ordering.order_rules import Limits, few_in_flight
from dhelix.passes.ordering.order_timing import Order, OrderTiming, States, Step
from dhelix.passes.ordering.strand_sequences import Body, Operator, lay

Timed = tuple[float, Order]  # seconds of an order, and the order

_REACH = 12  # longest move of one operator in the final climb, in places
_FAR = 30  # longest move that drags other operators along, in places
_DRAGS = 0.3  # fraction of the random moves that drag other operators along
_GAIN = 1e-6  # an order is faster only if it saves this fraction of the time
_GRAIN = 6e-4  # fraction of the time to which remaining times of collectives are rounded
_WORSE = 1.5e-2  # at first, a random move may make an order slower by this fraction of its time
_WAITING = 0.1  # fraction of the random moves that move a wait
_WANDERED = 0.9  # fraction of the work that random moves get
_SETTLED = 0.5  # fraction of the random moves' work before other collective orders are tried
_SHORT, _LONGER = 0.02, 0.075  # fractions of the random moves' work for each order in the first and second trial
_LEAST = 200  # least work for a collective order in a trial, so that short orders can converge
_TURNS, _TRIED, _FURTHER = 70, 6, 2  # numbers of collective orders: made, tried once (no threshold), tried twice


class OrderSearch:
    """Searches for fast orders of a body, or of its operators `numbers`. Lanes are idle before and after an order."""

    def __init__(
        self, body: Body, costs: Mapping[Instruction, Cost], limits: Limits, numbers: Collection[int] | None = None
    ) -> None:
        self.body, self.costs, self.limits = body, costs, limits
        self.numbers = sorted(range(len(body.operators)) if numbers is None else numbers)
        self.is_whole = numbers is None
        self.timed = self._timed(body.timed if numbers is None else self._members())
        self.parts = {n: [i for i in body.parts[n] if i in self.timed] for n in self.numbers}
        waits = body.waits_for.items() if self.is_whole else ()  # a wait for a copy on the compute lane has no effect
        self.waits = {wait: pair for wait, pair in waits if body.operators[pair].lane is not Lane.COMPUTE}
        self.needs = {n: body.operators[n].needs & self.parts.keys() for n in self.numbers}
        self.needs |= {wait: frozenset((pair,)) for wait, pair in self.waits.items()}
        self.parts |= {wait: self.parts[pair] for wait, pair in self.waits.items()}
        self.users: dict[int, list[int]] = {n: [] for n in self.needs}
        for number, needs in self.needs.items():
            for needed in needs:
                self.users[needed].append(number)
        self.states = States(costs, limits)
        self._compute = {n for n in self.numbers if body.operators[n].lane is Lane.COMPUTE}
        self._steps = {n: self._step(n) for n in self.numbers}
        self._end = self.states.step((), drains=True)
        self._segments: dict[tuple[Order, Order], tuple[float, Order]] = {}  # key: (leading, following)
        self._pairs: dict[tuple[Order, Order], tuple[float, Order]] = {}

    def _members(self) -> dict[Instruction, None]:
        """The instructions of the operators `numbers`, in XLA's order."""
        mine = {i for n in self.numbers for i in (*self.body.parts[n], self.body.heads[n])}
        mine |= {self.body.ends[n] for n in self.numbers if n in self.body.ends}
        return {i: None for i in sorted(mine, key=self.body.place.__getitem__)}

    def _timed(self, members: Iterable[Instruction]) -> dict[Instruction, list[Instruction]]:
        mine = {i: None for i in members if i in self.body.timed}
        return {i: [b for b in self.body.timed[i] if b in mine] for i in mine}

    def _step(self, number: int) -> Step:
        """The step (`States`) of an operator in a segment. It waits for the async pairs that the operator reads."""
        ends = (self.body.ends[pair] for pair in self.body.waits[number])
        return self.states.step((*ends, *self.parts[number]))

    def sequence(self, order: Iterable[int]) -> list[Instruction]:
        """All instructions of the whole body, with at most `Limits.max_in_flight` collectives per lane in flight.

        Dones are as late as possible. This is best if a collective takes longer than predicted. If late dones need too
        much memory, each done moves up to where its collective has ended, if that lowers the peak memory.
        """
        return self._sequence_and_peak(order)[0]

    def _sequence_and_peak(self, order: Iterable[int]) -> tuple[list[Instruction], int]:
        late = few_in_flight(self.body.sequence(order), self.body.before, self.costs, self.limits.max_in_flight)
        late_peak = self.limits.memory.peak(self.body.computation, late)
        if late_peak <= self.limits.bytes:
            return late, late_peak
        early = self._with_early_ends(late)
        early_peak = self.limits.memory.peak(self.body.computation, early)
        return (early, early_peak) if early_peak < late_peak else (late, late_peak)

    def _with_early_ends(self, sequence: Sequence[Instruction]) -> list[Instruction]:
        player = Player(self.costs, self.limits.hardware, self.limits.bodies)
        ends = {start_of(i): i for i in sequence if is_done(i)}
        laid: dict[Instruction, None] = {}
        flying: list[Instruction] = []
        for instruction in sequence:
            lay(instruction, self.body.before, laid)
            player.play(instruction)
            flying += [instruction] if instruction in ends else []
            for start in [s for s in flying if s not in player.under_way]:
                if all(b in laid for b in self.body.before[ends[start]]):
                    laid[ends[start]] = None
                    flying.remove(start)
        return list(laid)

    def _timed_sequence(self, order: Iterable[int]) -> list[Instruction]:
        """The instructions of `sequence` that take time, and all dones."""
        laid: dict[Instruction, None] = {}
        timed = self.timed
        for number in order:
            lay(self.body.head(number), timed, laid)
            for instruction in self.parts[number]:
                if instruction not in laid and all(b in laid for b in timed[instruction]):
                    laid[instruction] = None
        for instruction in timed:
            lay(instruction, timed, laid)
        return few_in_flight(list(laid), timed, self.costs, self.limits.max_in_flight)

    def seconds(self, order: Order) -> float:
        """Time of the whole order in seconds, without barriers."""
        player = Player(self.costs, self.limits.hardware, self.limits.bodies)
        for instruction in self._timed_sequence(order):
            player.play(instruction)
        player.drain()
        return player.now

    def peak(self, order: Iterable[int]) -> int:
        """Peak memory of the order in bytes."""
        return self._sequence_and_peak(order)[1]

    def fits(self, order: Iterable[int]) -> bool:
        return not self.is_whole or self.peak(order) <= self.limits.bytes

    def allowed(self, first: Sequence[Operator], second: Sequence[Operator]) -> Callable[[int, int], bool]:
        """Returns a function of (i, j): may a barrier follow the first i operators of `first` and j of `second`?"""
        of_second, of_first = needed_of(first, second), needed_of(second, first)
        live = [self._live(first[:i], second) for i in range(len(first) + 1)] if self.is_whole else None

        def allowed(i: int, j: int) -> bool:
            needed = of_second[i] <= j and of_first[j] <= i
            return needed and (live is None or live[i][j] <= self.limits.bytes)

        return allowed

    def _live(self, first: Sequence[Operator], second: Sequence[Operator]) -> list[int]:
        """For n = 0, 1, ...: the bytes that are live after all of `first` and the first n operators of `second`."""
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
        """Seconds and order of two segments that run together. Either may begin: the faster way counts."""
        both = tuple([o.number for o in first]), tuple([o.number for o in second])
        found = self._pairs.get(both)
        if found is None:
            one, other = both
            found = self._lay(one, other)
            if one and other and (turned := self._lay(other, one))[0] < found[0]:
                found = turned
            self._pairs[both] = found
        return found

    def _lay(self, leading: Order, following: Order) -> tuple[float, Order]:
        """Seconds and order of two segments. If both have compute that can run, `leading` comes first.

        If the first operator is compute, nothing runs beside it. Then the other operators are timed as segments of
        their own. All results are kept.
        """
        known = self._segments.get((leading, following))
        if known is None:
            head = self._next((*leading, *following), {}) if leading or following else None
            if head is None:
                known = 0.0, ()
            elif head in self._compute:
                rest = (tuple(n for n in segment if n != head) for segment in (leading, following))
                seconds, order = self._lay(*rest)
                known = self._alone(head) + seconds, (head, *order)
            else:
                known = self._play(leading + following)
            self._segments[leading, following] = known
        return known

    def _alone(self, number: int) -> float:
        """Seconds of a compute operator and the other instructions of its step, beginning with idle lanes."""
        step = self._steps[number]
        return step.least + self.states.idle[step][0]

    def _play(self, numbers: Order) -> tuple[float, Order]:
        left = dict.fromkeys(numbers)
        laid: list[int] = []
        seconds, state = 0.0, self.states.idle
        while left:
            chosen = self._next(left, state.under_way)
            if not state.under_way and chosen in self._compute:
                rest, order = self._lay(tuple(left), ())
                return seconds + rest, (*laid, *order)
            step = self._steps[chosen]
            lost, state = state[step]
            seconds += step.least + lost
            laid.append(chosen)
            del left[chosen]
        return seconds + state[self._end][0], tuple(laid)

    def _next(self, left: Collection[int], under_way: Collection[Instruction]) -> int:
        """The next operator: a collective that can start at once, else compute that can, else the first ready one."""
        body = self.body
        ready: list[int] = []
        free: list[int] = []
        for number in left:
            if not self.needs[number].isdisjoint(left):
                continue
            ready.append(number)
            if not under_way or not any(body.heads[w] in under_way for w in body.waits[number]):
                if number not in self._compute:
                    return number
                free.append(number)
        return free[0] if free else ready[0]

    def fitting(self, orders: Iterable[Order]) -> list[Timed]:
        """The orders that fit into memory, each with its seconds, fastest first."""
        fitting = [order for order in dict.fromkeys(orders) if self.fits(order)]
        return sorted(((self.seconds(order), order) for order in fitting), key=lambda timed: timed[0])

    def improve(self, start: Timed, work: int) -> Order:
        """The fastest fitting order that the search finds from `start`. `work` limits effort (`OrderTiming.work`)."""
        states = States(self.costs, self.limits, _GRAIN * start[0])
        timing = OrderTiming(self.body, states, self.timed, self.parts)
        waits = sorted(self.waits, key=lambda wait: start[1].index(self.waits[wait]))
        waiting = *start[1], *waits
        until = int(_WANDERED * work)
        best = self._wander((timing.seconds(waiting), waiting), timing, int(_SETTLED * until))
        best = self._wander(self._in_other_turns(best, timing, until), timing, until)
        found = self._climb(best, timing, work)[1]
        return min(start, (self.seconds(found), found))[1]

    def _in_other_turns(self, best: Timed, timing: OrderTiming, work: int) -> Timed:
        """The fastest of `best` and of new orders.

        A new order is `best` with its collectives in another order, improved by random moves.
        """
        tried = sorted((timing.seconds(order), order) for order in self._other_turns(best[1]))
        for count, share, worse in ((_TRIED, _SHORT, 0.0), (_FURTHER, _LONGER, _WORSE)):
            more = max(int(share * work), min(_LEAST, work // 24))
            tried = sorted(self._wander(one, timing, timing.work + more, worse) for one in tried[:count])
        return min([best, *(one for one in tried if self.fits(one[1]))])

    def _other_turns(self, order: Order) -> list[Order]:
        """Versions of `order` with swapped collectives. Versions with fewer swaps of neighbours come first."""
        first = tuple(n for n in order if n not in self._compute and n not in self.waits)
        seen, queue, found = {first}, [first], []
        for turns in queue:  # grows during the loop
            for k in range(len(turns) - 1):
                other = (*turns[:k], turns[k + 1], turns[k], *turns[k + 2 :])
                if other in seen or len(seen) == _TURNS:
                    continue
                seen.add(other)
                if (turned := self._turned(order, other)) is not None:
                    queue.append(other)
                    found.append(turned)
        return found

    def _turned(self, order: Order, turns: Order) -> Order | None:
        """`order` with its collectives in the order `turns`; None if dependencies do not allow this order.

        Waits go to the end, because their places suited the old order of the collectives.
        """
        next_turn = iter(turns)
        wanted = [next(next_turn) if n in turns else n for n in order if n not in self.waits]
        place = {n: k for k, n in enumerate(wanted)}
        before = {n: sorted(self.needs[n], key=place.__getitem__) for n in wanted}
        laid: dict[int, None] = {}
        for number in wanted:
            lay(number, before, laid)
        return (*laid, *self.waits) if tuple(n for n in laid if n in turns) == turns else None

    def _wander(self, start: Timed, timing: OrderTiming, work: int, worse: float = _WORSE) -> Timed:
        """Makes random moves. Accepts a result that is slower by less than a threshold, which falls to zero.

        Memory is checked only for a new fastest order. If that order does not fit, the search returns to the fastest
        order that fits.
        """
        draw, waits = random.Random(0), list(self.waits)
        here = best = start
        while (left := work - timing.work) > 0:
            movable = waits if waits and draw.random() < _WAITING else self.numbers
            order = self._moved(here[1], draw.choice(movable), draw)
            enough = here[0] * (1.0 + worse * left / work)
            if (seconds := timing.seconds(order, enough)) < enough:
                here = seconds, order
                if seconds < best[0] * (1.0 - _GAIN):
                    best = here = here if self.fits(order) else best
        return best

    def _climb(self, best: Timed, timing: OrderTiming, work: int) -> Timed:
        """Moves single operators and waits of `best`, as long as the order gets faster and fits."""
        seen = {best[1]}
        movable = sorted(best[1], key=lambda n: (n in self._compute, n))
        improved = True
        while improved:
            improved = False
            for number in movable:
                for order in self._nearby(best[1], number):
                    if timing.work >= work:
                        return best
                    if order in seen:
                        continue
                    seen.add(order)
                    enough = best[0] * (1.0 - _GAIN)
                    if (seconds := timing.seconds(order, enough)) < enough and self.fits(order):
                        best, improved = (seconds, order), True
                        break
        return best

    def _moved(self, order: Order, number: int, draw: random.Random) -> Order:
        """`order` with operator or wait `number` at a random place."""
        if draw.random() < _DRAGS:
            here = order.index(number)
            return self._dragged(order, here, draw.randint(max(here - _FAR, 0), min(here + _FAR, len(order) - 1)))
        rest, low, high = self._places(order, number)
        return _inserted(rest, number, draw.randint(low, high))

    def _dragged(self, order: Order, here: int, there: int) -> Order:
        """`order` with the operator at `here` moved to `there`. Its needs or users in between move along."""
        number, low, high = order[here], min(here, there), max(here, there) + 1
        bound = self._bound[number][there > here]
        between = [n for n in order[low:high] if n != number]
        along, staying = [n for n in between if n in bound], [n for n in between if n not in bound]
        moved = (*staying, number, *along) if there > here else (*along, number, *staying)
        return (*order[:low], *moved, *order[high:])

    @cached_property
    def _bound(self) -> dict[int, tuple[set[int], set[int]]]:
        """For each number: all numbers that it needs, and all numbers that need it, directly or indirectly."""
        needed: dict[int, set[int]] = {}
        for number in [*self.numbers, *self.waits]:  # needs have lower numbers
            needed[number] = set(self.needs[number]).union(*(needed[n] for n in self.needs[number]))
        needing: dict[int, set[int]] = {number: set() for number in needed}
        for number, all_needed in needed.items():
            for other in all_needed:
                needing[other].add(number)
        return {number: (needed[number], needing[number]) for number in needed}

    def _nearby(self, order: Order, number: int) -> Iterator[Order]:
        """Versions of `order` with operator or wait `number` at another place, nearest places first."""
        rest, low, high = self._places(order, number)
        here = order.index(number)
        for distance in range(1, _REACH + 1):
            for there in (here - distance, here + distance):
                if low <= there <= high:
                    yield _inserted(rest, number, there)

    def _places(self, order: Order, number: int) -> tuple[Order, int, int]:
        """`order` without `number`, and the first and last place for `number`: between its needs and its users."""
        here = order.index(number)
        rest = order[:here] + order[here + 1 :]
        low = max((rest.index(n) + 1 for n in self.needs[number]), default=0)
        high = min((rest.index(n) for n in self.users[number]), default=len(rest))
        return rest, low, high


def _inserted(rest: Order, number: int, place: int) -> Order:
    return (*rest[:place], number, *rest[place:])


def needed_of(mine: Sequence[Operator], others: Sequence[Operator]) -> list[int]:
    """For n = 0, 1, ...: the length of the prefix of `others` that the first n operators of `mine` need."""
    place = {o.number: n for n, o in enumerate(others)}
    found = [0]
    for operator in mine:
        found.append(max(found[-1], *(place[n] + 1 for n in operator.needs if n in place), 0))
    return found
