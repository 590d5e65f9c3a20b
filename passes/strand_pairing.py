"""Strand pairing: what of one strand runs with what of the other, by dynamic programming (DHelix section 4.2).

Matches: scheduled bodies in which two strands run that share no value, each a sequence of operators
(`passes/strand_sequences.py`). Bodies without are given to `list_order`.

Makes of it: another order of the same instructions. Both sequences are cut into segments, and segments are paired
so that what one strand sends lies under what the other computes:

    forward     | norm  all-gather      | product  attention  | product  reduce-scatter |
    backward    | product (wgrad)       | all-gather          | product  product        |

1. Equation 2, with the cuts as part of the search. T(i, j), the time of the first i operators of one strand and j
   of the other, is the least of T(i - a, j - b) + P over all segments of a and b operators, either of which may be
   empty. P, both segments together from idle lanes, is simulated with the rates of measured pairs, in two launch
   orders: whose compute goes first. Inside, a collective starts as soon as it can. States whose live values need
   more than the memory allowed are left out; what lives between segments does not depend on the order inside.
2. That for each pair of candidate orders of the strands, at most three each.
3. Cuts are barriers in the model alone. Starting from the two fastest of these plans, `list_order` and XLA's order,
   single operators move to other places while the evaluator says that the whole is faster without barriers.
4. The fastest of that, `list_order` and XLA's order within memory.

Everything is deterministic: costs and sequence in, order out.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dhelix.errors import DhelixError
from dhelix.passes.buffers import LiveSet
from dhelix.passes.collective_schedule import Limits, apply_order, list_order
from dhelix.passes.collectives import is_done
from dhelix.passes.costs import Cost, CostModel, Costs, Lane
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.operator_keys import CONTROL_FLOW
from dhelix.passes.strand_sequences import Body, Operator, find_strands
from dhelix.passes.timeline import Player, simulate
from dhelix.profiles.hardware import H200, Hardware

SegmentCost = Callable[[Sequence[Operator], Sequence[Operator]], float]

_REACH = 12  # places that an operator is moved by at once
_STARTS = 2  # orders that are improved
_PLAYED = 25_000  # operators that the improvement of one plays, over all orders that it tries
_STATES = 10_000  # of the table; longer strands, those of unrolled layers, would take more than seconds
_GAIN = 1e-6  # share of the time that counts as faster


@dataclass(frozen=True)
class StrandPairing:
    """Pairs the operators of two strands.

    Attributes:
      hardware: whose costs and rates count where there is no `model`.
      memory_limit, memory_slack, min_gain, model: as of `CollectiveSchedule`.
      max_segment: operators of one strand in a segment.
    """

    hardware: Hardware = H200
    memory_limit: int | None = None
    memory_slack: float = 0.03
    min_gain: float = 0.01
    model: CostModel | None = None
    max_segment: int = 3

    name = "strand-pairing"
    stage = Stage.POST_SCHEDULER

    def __post_init__(self) -> None:
        if self.max_segment < 1:
            raise DhelixError(f"max_segment={self.max_segment} leaves no segments; give 1 or more, such as 3")

    def run(self, module: HloModule, context: PassContext) -> bool:
        costs = Costs(self.hardware) if self.model is None else self.model.costs()
        order = partial(pairing_order, max_segment=self.max_segment, context=context)
        return apply_order(module, context, order, costs, self.memory_limit, self.memory_slack, self.min_gain)


@dataclass(frozen=True)
class SegmentPair:
    """Operators `first[0]` to `first[1] - 1` of one strand with those of the other; `seconds` together."""

    first: tuple[int, int]
    second: tuple[int, int]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Segments in the order in which they run; `seconds` of all, with a barrier after each."""

    seconds: float
    segments: tuple[SegmentPair, ...]


def pair(
    first: Sequence[Operator],
    second: Sequence[Operator],
    cost: SegmentCost,
    max_segment: int,
    allowed: Callable[[int, int], bool] = lambda i, j: True,
) -> Plan | None:
    """The fastest way to cut two sequences into segments and pair them (DHelix section 4.2, equation 2).

    Args:
      cost: seconds of two segments together, either of which may be empty. It must be no less than what any
        lane is busy in both of them, by which segments are left out that cannot be part of a fastest plan.
      max_segment: longest segment.
      allowed: whether there may be a barrier after the first i operators and j of the other sequence.

    Returns:
      The plan; None where no plan is allowed.
    """
    bounds = _Bounds(first, second)
    best: dict[tuple[int, int], tuple[float, SegmentPair | None]] = {(0, 0): (0.0, None)}
    shapes = [(a, b) for a in range(max_segment + 1) for b in range(max_segment + 1) if a + b]
    for i in range(len(first) + 1):
        for j in range(len(second) + 1):
            if not (i or j) or not allowed(i, j):
                continue
            found: tuple[float, SegmentPair | None] | None = None
            tries = [
                (best[i - a, j - b][0] + bounds.busy(i - a, i, j - b, j), a + b, a)
                for a, b in shapes
                if (i - a, j - b) in best
            ]
            for least, size, a in sorted(tries):
                if found is not None and least >= found[0]:
                    break
                b = size - a
                seconds = cost(first[i - a : i], second[j - b : j])
                until = best[i - a, j - b][0] + seconds
                if found is None or until < found[0]:
                    found = until, SegmentPair((i - a, i), (j - b, j), seconds)
            if found is not None:
                best[i, j] = found
    return _plan(best, len(first), len(second))


def _plan(best: Mapping[tuple[int, int], tuple[float, SegmentPair | None]], i: int, j: int) -> Plan | None:
    if (i, j) not in best:
        return None
    seconds, segment = best[i, j]
    segments: list[SegmentPair] = []
    while segment is not None:
        segments.append(segment)
        segment = best[segment.first[0], segment.second[0]][1]
    return Plan(seconds, tuple(reversed(segments)))


class _Bounds:
    """Seconds that the busiest lane works in two segments."""

    def __init__(self, first: Sequence[Operator], second: Sequence[Operator]) -> None:
        self.first = [_running_sums(o.busy(lane) for o in first) for lane in Lane]
        self.second = [_running_sums(o.busy(lane) for o in second) for lane in Lane]

    def busy(self, i: int, i_end: int, j: int, j_end: int) -> float:
        return max(f[i_end] - f[i] + s[j_end] - s[j] for f, s in zip(self.first, self.second, strict=True))


def _running_sums(values: Iterator[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def pairing_order(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    max_segment: int = 3,
    context: PassContext | None = None,
) -> list[Instruction]:
    """The fastest of a pairing of strands, `list_order` and `sequence`; a `Scheduler` for `apply_order`.

    What was found goes into the notes of `context`, if there is one: operators of each strand, those that float apart;
    seconds of the best plan, which has barriers, and of the three orders, which have none.
    """
    listed = list_order(computation, sequence, costs, limits)
    body = find_strands(computation, sequence, costs, limits)
    if body is None or len(body.first.operators) * len(body.second.operators) > _STATES:
        if context is not None:
            reason = "no two independent strands" if body is None else "too many operators to pair"
            context.note(f"{reason}: left to the list schedule", computation=computation.name)
        return listed
    search = _Search(body, costs, limits)
    starts, planned = search.starts(max_segment, listed)
    improved = min(map(search.improve, starts[:_STARTS]), key=search.seconds)
    orders = [list(sequence), listed, body.sequence(improved)]
    seconds = [simulate(computation, o, costs, limits.hardware, limits.bodies).seconds for o in orders]
    if context is not None:
        strands = (body.first, body.second)
        context.note(
            "two strands",
            computation=computation.name,
            operators=[len(s.operators) - len(s.floating) for s in strands],
            floating=[len(s.floating) for s in strands],
            seconds_plan=planned,
            **dict(zip(("seconds_xla", "seconds_list", "seconds_paired"), seconds, strict=True)),
        )
    fitting = [n for n in range(3) if n == 0 or limits.memory.peak(computation, orders[n]) <= limits.bytes]
    return orders[min(fitting, key=lambda n: seconds[n])]


class _Search:
    """Orders of the operators of one body, as numbers."""

    def __init__(self, body: Body, costs: Mapping[Instruction, Cost], limits: Limits) -> None:
        self.body, self.costs, self.limits = body, costs, limits
        self.segments: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, tuple[int, ...]]] = {}
        self.timed = {i for i in body.order if is_done(i) or costs[i].seconds > 0.0 or i.opcode in CONTROL_FLOW}
        self.parts = [[i for i in part if i in self.timed] for part in body.parts]
        self.users: list[list[int]] = [[] for _ in body.operators]
        for operator in body.operators:
            for needed in operator.needs:
                self.users[needed].append(operator.number)

    def starts(self, max_segment: int, listed: Sequence[Instruction]) -> tuple[list[list[int]], float | None]:
        """Of the plans' orders, XLA's and `listed` those that fit, fastest first, and the seconds of the best plan."""
        number = {head: n for n, head in enumerate(self.body.heads)}
        orders = [list(range(len(number))), [number[i] for i in listed if i in number]]
        planned: list[float] = []
        for first in self.body.first.candidates():
            for second in self.body.second.candidates():
                plan = pair(first, second, self.cost, max_segment, self._allowed(first, second))
                if plan is not None:
                    planned.append(plan.seconds)
                    paired = [(first[slice(*s.first)], second[slice(*s.second)]) for s in plan.segments]
                    orders.append([n for segments in paired for n in self._best(*segments)[1]])
        fitting = [list(o) for o in dict.fromkeys(map(tuple, orders)) if self._fits(o)] or orders[:1]
        return sorted(fitting, key=self.seconds), min(planned, default=None)

    def seconds(self, numbers: Sequence[int]) -> float:
        """The whole body, without barriers."""
        limits = self.limits
        order = [i for i in self.body.sequence(numbers) if i in self.timed]
        return simulate(self.body.computation, order, self.costs, limits.hardware, limits.bodies).seconds

    def _fits(self, numbers: Sequence[int]) -> bool:
        peak = self.limits.memory.peak(self.body.computation, self.body.sequence(numbers))
        return peak <= self.limits.bytes

    def _allowed(self, first: Sequence[Operator], second: Sequence[Operator]) -> Callable[[int, int], bool]:
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

    def cost(self, first: Sequence[Operator], second: Sequence[Operator]) -> float:
        """Both segments from idle lanes to idle lanes, in the better of two launch orders."""
        return self._best(first, second)[0]

    def _best(self, first: Sequence[Operator], second: Sequence[Operator]) -> tuple[float, tuple[int, ...]]:
        one, other = (tuple(o.number for o in segment) for segment in (first, second))
        tries = [self._lay(one, other)]
        if one and other:
            tries.append(self._lay(other, one))
        return min(tries, key=lambda t: t[0])

    def _lay(self, leading: tuple[int, ...], following: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Seconds and order of two segments, `leading` computing first wherever both could.

        While lanes are idle, what computes first could as well be a segment of its own; so the rest is looked up.
        """
        known = self.segments.get((leading, following))
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
            self.segments[leading, following] = known
        return known

    def _play(self, numbers: Sequence[int]) -> tuple[float, tuple[int, ...]]:
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

    def improve(self, numbers: Sequence[int]) -> list[int]:
        """`numbers` with single operators moved, as long as that is faster and fits."""
        best, best_seconds = list(numbers), self.seconds(numbers)
        seen = {tuple(best)}
        tries, improved = _PLAYED // len(best), True
        while improved and tries:
            improved = False
            for operator in sorted(self.body.operators, key=lambda o: (o.lane is Lane.COMPUTE, o.number)):
                for order in self._moved(best, operator):
                    if not tries or tuple(order) in seen:
                        continue
                    seen.add(tuple(order))
                    tries -= 1
                    seconds = self.seconds(order)
                    if seconds < best_seconds * (1.0 - _GAIN) and self._fits(order):
                        best, best_seconds, improved = order, seconds, True
                        break
        return best

    def _moved(self, numbers: Sequence[int], operator: Operator) -> Iterator[list[int]]:
        """Orders with `operator` elsewhere, nearest places first, where its needs and its users' are kept."""
        place = {n: k for k, n in enumerate(numbers)}
        here = place[operator.number]
        rest = [n for n in numbers if n != operator.number]
        low = max((place[n] + 1 for n in operator.needs), default=0)
        high = min((place[n] - 1 for n in self.users[operator.number]), default=len(rest))
        for distance in range(1, _REACH + 1):
            for there in (here - distance, here + distance):
                if low <= there <= high:
                    yield [*rest[:there], operator.number, *rest[there:]]


def _most(values: Iterator[int]) -> list[int]:
    """Running maxima, from 0."""
    found = [0]
    for value in values:
        found.append(max(found[-1], value))
    return found
