"""Orders of a body's operators: what one takes, whether it fits, and how to make it better by moving operators.

An order is a tuple of operators by number (`Body.operators`), of the whole body or of a part of it. An order of the
whole may have waits too, which say where compute waits for a collective before anything needs it (`Body.waits_for`).
Every instruction follows from that (`Body.sequence`), and `seconds` is what the evaluator says of it.

1. `segment`: P of equation 2, two segments from idle lanes to idle lanes. Compute of one strand leads, a collective
   starts as soon as it can; the better of the two ways to lead counts.
2. `allowed`: after which operators of both strands there may be a barrier: what they need has run, and what lives then
   fits into memory. What lives between segments does not depend on the order inside.
3. `improve`: local search by moves of operators and waits. Random moves first, of which those count that are not slower
   by more than a threshold, which falls to nothing (threshold accepting: Dueck and Scheuer, 1990); some of them take
   along what stands in the way, since it needs the operator or is needed. Then each operator by a few places, as long
   as that is faster. Half-way it looks at orders in which collectives come in other turns. Most of a moved order is
   looked up and not played (`order_timing.py`), what is left of collectives a little rounded, so that more of it
   is known. The search ends after an amount of work and not of seconds, so that the result is the same on every host.
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

Timed = tuple[float, Order]  # seconds of the whole, and the order

_REACH = 12  # places that an operator is moved by at once
_FAR = 30  # the same, with what stands in the way
_DRAGS = 0.3  # share of the random moves that take along what stands in the way
_GAIN = 1e-6  # share of the time that counts as faster
_GRAIN = 6e-4  # share of the time to which what is left of collectives is rounded
_WORSE = 1.5e-2  # share of the time by which random moves may be slower, at first
_WAITING = 0.1  # share of the random moves that move a wait
_WANDERED = 0.9  # share of the work that goes into random moves, and of that
_SETTLED = 0.5  # before collectives come in other turns,
_SHORT, _LONGER = 0.02, 0.075  # and for each order in other turns that is tried, and that is tried further
_LEAST = 200  # work for each, so that short orders can settle
_TURNS, _TRIED, _FURTHER = 70, 6, 2  # such orders: looked at, tried without threshold, tried further


class OrderSearch:
    """Orders of a body, or of the operators `numbers` of it, which then begin and end with idle lanes."""

    def __init__(
        self,
        body: Body,
        costs: Mapping[Instruction, Cost],
        limits: Limits,
        numbers: Collection[int] | None = None,
    ) -> None:
        self.body, self.costs, self.limits = body, costs, limits
        self.numbers = sorted(range(len(body.operators)) if numbers is None else numbers)
        self.is_whole = numbers is None
        self.timed = self._timed(body.timed if numbers is None else self._members())
        self.parts = {n: [i for i in body.parts[n] if i in self.timed] for n in self.numbers}
        waits = body.waits_for.items() if self.is_whole else ()  # of copies that count as compute they change nothing
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
        self._segments: dict[tuple[Order, Order], tuple[float, Order]] = {}  # by which one leads
        self._pairs: dict[tuple[Order, Order], tuple[float, Order]] = {}

    def _members(self) -> dict[Instruction, None]:
        """Instructions of a part of the body, in XLA's order."""
        mine = {i for n in self.numbers for i in (*self.body.parts[n], self.body.heads[n])}
        mine |= {self.body.ends[n] for n in self.numbers if n in self.body.ends}
        return {i: None for i in sorted(mine, key=self.body.place.__getitem__)}

    def _timed(self, members: Iterable[Instruction]) -> dict[Instruction, list[Instruction]]:
        mine = {i: None for i in members if i in self.body.timed}
        return {i: [b for b in self.body.timed[i] if b in mine] for i in mine}

    def _step(self, number: int) -> Step:
        """An operator in a segment: pairs that it reads end, if they were started there."""
        ends = (self.body.ends[pair] for pair in self.body.waits[number])
        return self.states.step((*ends, *self.parts[number]))

    def sequence(self, order: Iterable[int]) -> list[Instruction]:
        """All instructions of the whole body, with no more collectives in flight than allowed.

        Ends stand as late as possible, which is best where a collective takes longer than was thought. Where that
        needs too much memory they stand where the collective has ended, by when its operand is free.
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
        """What of `sequence` takes time, and ends."""
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
        """The whole, without barriers."""
        player = Player(self.costs, self.limits.hardware, self.limits.bodies)
        for instruction in self._timed_sequence(order):
            player.play(instruction)
        player.drain()
        return player.now

    def peak(self, order: Iterable[int]) -> int:
        """Bytes that live at once."""
        return self._sequence_and_peak(order)[1]

    def fits(self, order: Iterable[int]) -> bool:
        return not self.is_whole or self.peak(order) <= self.limits.bytes

    def allowed(self, first: Sequence[Operator], second: Sequence[Operator]) -> Callable[[int, int], bool]:
        """States in which all that was needed has run and, for a whole body, what lives then fits into memory."""
        of_second, of_first = needed_of(first, second), needed_of(second, first)
        live = [self._live(first[:i], second) for i in range(len(first) + 1)] if self.is_whole else None

        def allowed(i: int, j: int) -> bool:
            needed = of_second[i] <= j and of_first[j] <= i
            return needed and (live is None or live[i][j] <= self.limits.bytes)

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
        """Seconds and order of two segments, `leading` computing first wherever both could.

        While lanes are idle, what computes first could as well be a segment of its own; so the rest is looked up.
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
        """Seconds of an operator that computes, with what travels with it, from idle lanes."""
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
        """The first of `left` to run: a collective that can start, compute that can, or what must wait least."""
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
        """Those of `orders` that fit, fastest first, with their seconds."""
        fitting = [order for order in dict.fromkeys(orders) if self.fits(order)]
        return sorted(((self.seconds(order), order) for order in fitting), key=lambda timed: timed[0])

    def improve(self, start: Timed, work: int) -> Order:
        """The fastest order found from `start`, which fits, for that much `OrderTiming.work`."""
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
        """The fastest of `best` and what random moves make of it with collectives in other turns."""
        tried = sorted((timing.seconds(order), order) for order in self._other_turns(best[1]))
        for count, share, worse in ((_TRIED, _SHORT, 0.0), (_FURTHER, _LONGER, _WORSE)):
            more = max(int(share * work), min(_LEAST, work // 24))
            tried = sorted(self._wander(one, timing, timing.work + more, worse) for one in tried[:count])
        return min([best, *(one for one in tried if self.fits(one[1]))])

    def _other_turns(self, order: Order) -> list[Order]:
        """`order` with collectives in other turns, by one exchange of neighbours after the other: the nearest ones."""
        first = tuple(n for n in order if n not in self._compute and n not in self.waits)
        seen, queue, found = {first}, [first], []
        for turns in queue:  # which grows meanwhile
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
        """`order` with `turns` in the places of its collectives, and before each what it needs; None if that is one
        whose turn comes later. Waits go to the end: they were for the turns of before."""
        next_turn = iter(turns)
        wanted = [next(next_turn) if n in turns else n for n in order if n not in self.waits]
        place = {n: k for k, n in enumerate(wanted)}
        before = {n: sorted(self.needs[n], key=place.__getitem__) for n in wanted}
        laid: dict[int, None] = {}
        for number in wanted:
            lay(number, before, laid)
        return (*laid, *self.waits) if tuple(n for n in laid if n in turns) == turns else None

    def _wander(self, start: Timed, timing: OrderTiming, work: int, worse: float = _WORSE) -> Timed:
        """Random moves, taken if what they lead to is not slower by more than a share, which falls to nothing.

        Memory is asked about the fastest so far alone: from one that does not fit, back to the fastest that does.
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
        """`best` with single operators and waits moved, as long as that is faster and fits."""
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
        """`order` with an operator or a wait elsewhere."""
        if draw.random() < _DRAGS:
            here = order.index(number)
            return self._dragged(order, here, draw.randint(max(here - _FAR, 0), min(here + _FAR, len(order) - 1)))
        rest, low, high = self._places(order, number)
        return _inserted(rest, number, draw.randint(low, high))

    def _dragged(self, order: Order, here: int, there: int) -> Order:
        """`order` with what is at `here` moved to `there`; what it needs goes along, or what needs it, and no more."""
        number, low, high = order[here], min(here, there), max(here, there) + 1
        bound = self._bound[number][there > here]
        between = [n for n in order[low:high] if n != number]
        along, staying = [n for n in between if n in bound], [n for n in between if n not in bound]
        moved = (*staying, number, *along) if there > here else (*along, number, *staying)
        return (*order[:low], *moved, *order[high:])

    @cached_property
    def _bound(self) -> dict[int, tuple[set[int], set[int]]]:
        """All that an operator or a wait needs, and all that needs it, by way of others too."""
        needed: dict[int, set[int]] = {}
        for number in [*self.numbers, *self.waits]:  # what is needed has a lower number
            needed[number] = set(self.needs[number]).union(*(needed[n] for n in self.needs[number]))
        needing: dict[int, set[int]] = {number: set() for number in needed}
        for number, all_needed in needed.items():
            for other in all_needed:
                needing[other].add(number)
        return {number: (needed[number], needing[number]) for number in needed}

    def _nearby(self, order: Order, number: int) -> Iterator[Order]:
        """Orders with an operator or a wait elsewhere, nearest places first."""
        rest, low, high = self._places(order, number)
        here = order.index(number)
        for distance in range(1, _REACH + 1):
            for there in (here - distance, here + distance):
                if low <= there <= high:
                    yield _inserted(rest, number, there)

    def _places(self, order: Order, number: int) -> tuple[Order, int, int]:
        """`order` without an operator or a wait, and from where to where that may stand: between needs and users."""
        here = order.index(number)
        rest = order[:here] + order[here + 1 :]
        low = max((rest.index(n) + 1 for n in self.needs[number]), default=0)
        high = min((rest.index(n) for n in self.users[number]), default=len(rest))
        return rest, low, high


def _inserted(rest: Order, number: int, place: int) -> Order:
    return (*rest[:place], number, *rest[place:])


def needed_of(mine: Sequence[Operator], others: Sequence[Operator]) -> list[int]:
    """How many of `others` the first 0, 1, ... of `mine` need."""
    place = {o.number: n for n, o in enumerate(others)}
    found = [0]
    for operator in mine:
        found.append(max(found[-1], *(place[n] + 1 for n in operator.needs if n in place), 0))
    return found
