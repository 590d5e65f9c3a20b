"""The two strands of a co-executed body, as sequences of operators: what `strand_pairing.py` pairs.

A scheduled body of 260 instructions becomes two chains that share nothing but what they read (DHelix section
4.2: 14 operators forward and 18 backward for a transformer layer with tensor and sequence parallelism):

    first (forward)     norm, all-gather, product, attention, product, reduce-scatter, ...
    second (backward)   all-gather, product, product, reduce-scatter, product (weight gradient), ...

1. *Strands* are found by data flow, followed through tuples element by element. What reads loop state and moves it
   (slices of weights, norms of the input) belongs to whoever uses it, so it ties nothing together. All else, that is
   whatever depends on a collective, a matrix product or attention, falls into parts that share no value. The two
   longest are the strands; each further part goes with the one that takes less. Names only say which is called first.
2. *Operators*: a collective (its start, its done), or an instruction that takes at least 20 us, or 0.3 % of the
   body's time. Whatever takes less travels with the first operator that needs it, or the last that it needs.
3. *Floating* operators are those that nothing but the loop state waits for: weight gradients, writes of residuals.
   `Strand.candidates` are the orders that matter: XLA's, floating ones behind collectives of their own strand, so
   that they lie under these (the paper's dual-coloured blocks), and at the end.

Any order of operators that keeps `Operator.needs` becomes an order of all instructions (`Body.sequence`): an
operator is preceded by what it needs of the rest, ends of collectives among them, so they stand as late as possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dhelix.passes.analysis.buffers import is_update
from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.evaluation.operator_keys import FREE_OPCODES
from dhelix.passes.evaluation.operator_work import work_of
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import Limits, dependencies

_TINY = 3e-3  # share of a body's time below which an instruction is no operator of its own, unless it takes
_LONG = 2e-5  # seconds
_RENAMES = frozenset("bitcast opt-barrier async-update".split())


@dataclass(frozen=True)
class Operator:
    """What the search moves as one.

    Attributes:
      number: in the order of XLA's schedule.
      lane: that of its head; `seconds`: the head alone.
      light: seconds of compute that travel with it.
      needs: operators that must come before, of either strand.
    """

    number: int
    lane: Lane
    seconds: float
    light: float = 0.0
    needs: frozenset[int] = frozenset()

    def busy(self, lane: Lane) -> float:
        """Seconds of this lane that it takes."""
        return (self.seconds if lane is self.lane else 0.0) + (self.light if lane is Lane.COMPUTE else 0.0)


@dataclass(frozen=True)
class Strand:
    """Operators of one strand in XLA's order, and the numbers of those that float."""

    operators: tuple[Operator, ...]
    floating: frozenset[int]

    def part(self, operators: Sequence[Operator]) -> "Strand":
        return Strand(tuple(operators), self.floating & {o.number for o in operators})

    def candidates(self) -> tuple[tuple[Operator, ...], ...]:
        """XLA's order, floating operators behind collectives, to lie under them, and late."""
        beneath, late = (self._placed(lanes) for lanes in ((Lane.COMM, Lane.COMM_INTER), ()))
        return self.operators, beneath, late

    def _placed(self, lanes: Collection[Lane]) -> tuple[Operator, ...]:
        """Floating operators behind the first operator on `lanes` after which they can run; the others at the end."""
        mine = {o.number for o in self.operators}
        waiting = [o for o in self.operators if o.number in self.floating]
        order: list[Operator] = []
        laid: set[int] = set()
        for operator in self.operators:
            if operator.number in self.floating:
                continue
            order.append(operator)
            laid.add(operator.number)
            for other in list(waiting) if operator.lane in lanes else ():
                if other.needs & mine <= laid:
                    order.append(other)
                    laid.add(other.number)
                    waiting.remove(other)
        return (*order, *waiting)


@dataclass(frozen=True)
class Body:
    """A body with two strands.

    Attributes:
      operators: by number; `heads`: the instruction of each, the start where it is a collective.
      parts: what counts as the operator in the search: what travels with it, and its head.
      ends: done of each operator that is a pair; `waits`: operators that are pairs and that it reads, through
        instructions that travel.
      before: what must come before each instruction.
      timed: instructions that take time, and ends; what of these must come before each, through those that take none.
    """

    computation: Computation
    order: tuple[Instruction, ...]
    operators: tuple[Operator, ...]
    heads: tuple[Instruction, ...]
    parts: tuple[tuple[Instruction, ...], ...]
    ends: dict[int, Instruction]
    waits: tuple[tuple[int, ...], ...]
    first: Strand
    second: Strand
    before: Mapping[Instruction, Sequence[Instruction]]
    timed: Mapping[Instruction, Sequence[Instruction]]

    @cached_property
    def place(self) -> dict[Instruction, int]:
        """Of each instruction in XLA's order."""
        return {i: n for n, i in enumerate(self.order)}

    @cached_property
    def waits_for(self) -> dict[int, int]:
        """Numbers beyond those of operators: in an order, compute waits there for the pair that this one is."""
        return {len(self.operators) + n: pair for n, pair in enumerate(sorted(self.ends))}

    def head(self, number: int) -> Instruction:
        """Of an operator, or the end that is waited for."""
        return self.heads[number] if number < len(self.heads) else self.ends[self.waits_for[number]]

    def sequence(self, numbers: Iterable[int]) -> list[Instruction]:
        """All instructions, with operators and waits in the order of `numbers`, which keeps their needs."""
        laid: dict[Instruction, None] = {}
        for number in numbers:
            lay(self.head(number), self.before, laid)
            for instruction in self.parts[self.waits_for.get(number, number)]:
                # also what follows the head, or the end of a pair, and holds memory until it ran
                if instruction not in laid and instruction in self.timed:
                    if all(b in laid for b in self.timed[instruction]):
                        lay(instruction, self.before, laid)
        for instruction in self.order:
            if instruction not in laid:
                lay(instruction, self.before, laid)
        return list(laid)


def lay[T](wanted: T, before: Mapping[T, Sequence[T]], laid: dict[T, None]) -> None:
    """`wanted`, after what must come `before` it."""
    if wanted in laid:
        return
    stack = [wanted]
    while stack:
        current = stack[-1]
        missing = [b for b in before[current] if b not in laid]
        if missing:
            stack += reversed(missing)
        else:
            laid[stack.pop()] = None


def find_strands(
    computation: Computation,
    sequence: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    limits: Limits,
    most: int = 2,
) -> Body:
    """The operators of `computation`, whose order is `sequence`, as two strands.

    All are of the first strand where no two parts are independent, or where `most` is 1.
    """
    seconds = {i: _seconds(i, costs, limits) for i in sequence}
    tiny = min(_TINY * sum(seconds.values()), _LONG)
    parts = [p for p in _independent_parts(sequence, costs) if sum(seconds[i] for i in p) > tiny]
    parts.sort(key=lambda part: -sum(seconds[i] for i in part))
    two = [list(sequence), []]
    if len(parts) > 1 and most > 1:
        two = sorted(_halves(parts, seconds), key=lambda part: _backward_share(part, seconds))
    before: dict[Instruction, list[Instruction]] = {i: [] for i in sequence}
    for earlier, later in dependencies(computation, sequence, limits.memory):
        before[later].append(earlier)
    heads = [i for i in sequence if not is_done(i) and (costs[i].lane is not Lane.COMPUTE or seconds[i] >= tiny)]
    return _Maker(computation, sequence, costs, seconds, before, heads).body(two)


def _halves(
    parts: Sequence[Sequence[Instruction]], seconds: Mapping[Instruction, float]
) -> tuple[list[Instruction], list[Instruction]]:
    """Parts as two that take about as long: those of policy and reference are one beside the policy's backward pass."""
    one: list[Instruction] = []
    other: list[Instruction] = []
    for part in parts:  # the longest first
        lighter = min(one, other, key=lambda half: sum(seconds[i] for i in half))
        lighter += part
    return one, other


def _seconds(instruction: Instruction, costs: Mapping[Instruction, Cost], limits: Limits) -> float:
    if instruction.opcode in CONTROL_FLOW:
        computation = instruction.computation
        return simulate(computation, [instruction], costs, limits.hardware, limits.bodies).seconds
    return costs[instruction].seconds


def _backward_share(part: Sequence[Instruction], seconds: Mapping[Instruction, float]) -> float:
    marked = sum(seconds[i] for i in part if BACKWARD_NAME in i.op_name)
    return marked / sum(seconds[i] for i in part)


def _independent_parts(sequence: Sequence[Instruction], costs: Mapping[Instruction, Cost]) -> list[list[Instruction]]:
    """Instructions at or below work, in parts that no value connects."""
    part: dict[Instruction, list[Instruction]] = {}
    for instruction in sequence:
        if instruction.opcode in FREE_OPCODES:
            continue
        sources = dict.fromkeys(s for operand in instruction.operands for s in _sources(operand) if not is_update(s))
        joined = {id(part[s]): part[s] for s in sources if s in part}
        if not joined and not _is_work(instruction, costs):
            continue
        whole, *others = sorted(joined.values(), key=len, reverse=True) or [[]]
        for other in others:
            whole += other
            part.update(dict.fromkeys(other, whole))
        whole.append(instruction)
        part[instruction] = whole
    found = {id(p): p for p in part.values()}
    return list(found.values())


def _is_work(instruction: Instruction, costs: Mapping[Instruction, Cost]) -> bool:
    """Collectives, matrix products, attention, other calls; and loops, which may hold them."""
    if instruction.opcode in ("fusion", "dot", "convolution"):
        return work_of(instruction).unit != "memory"
    return instruction.opcode in (*CONTROL_FLOW, "custom-call") or costs[instruction].lane is not Lane.COMPUTE


def _sources(value: Instruction) -> list[Instruction]:
    """Who makes `value`: through renames, and through tuples to the element that is read."""
    path: list[int] = []
    while True:
        if value.opcode == "get-tuple-element":
            path.append(value.tuple_index)
        elif value.opcode == "tuple":
            if not path:
                return [s for operand in value.operands for s in _sources(operand)]
            value = value.operands[path.pop()]
            continue
        elif value.opcode not in _RENAMES:
            return [value]
        value = value.operands[0]


class _Maker:
    """Makes operators out of instructions. `heads` have numbers; the rest travels."""

    def __init__(
        self,
        computation: Computation,
        sequence: Sequence[Instruction],
        costs: Mapping[Instruction, Cost],
        seconds: Mapping[Instruction, float],
        before: Mapping[Instruction, Sequence[Instruction]],
        heads: Sequence[Instruction],
    ) -> None:
        self.computation, self.sequence, self.costs, self.seconds = computation, sequence, costs, seconds
        self.before, self.heads = before, heads
        self.number = {head: n for n, head in enumerate(heads)}
        self.needs = _nearest(sequence, before, self.number)
        self.carrier = self._carriers()

    def body(self, parts: Sequence[Sequence[Instruction]]) -> Body:
        ends = {self.number[start_of(i)]: i for i in self.sequence if is_done(i) and start_of(i) in self.number}
        travelling: list[list[Instruction]] = [[] for _ in self.heads]
        for instruction in self.sequence:
            if instruction in self.carrier and (instruction.opcode not in FREE_OPCODES):
                travelling[self.carrier[instruction]].append(instruction)
        operators = tuple(
            Operator(
                number,
                self.costs[head].lane,
                self.seconds[head],
                sum(self.seconds[i] for i in travelling[number] if i is not head),
                frozenset(self.needs[head]),
            )
            for number, head in enumerate(self.heads)
        )
        first, second = self._strands(operators, parts)
        return Body(
            self.computation,
            tuple(self.sequence),
            operators,
            tuple(self.heads),
            tuple(map(tuple, travelling)),
            ends,
            self._waits(ends),
            first,
            second,
            self.before,
            self._timed(),
        )

    def _timed(self) -> dict[Instruction, list[Instruction]]:
        """What takes time, or is an end, and what of that must come before; what takes none hands on."""
        timed = {i: i for i in self.sequence if is_done(i) or self.seconds[i] > 0.0 or i in self.number}
        found = _nearest(self.sequence, self.before, timed)
        return {i: list(found[i]) for i in timed}

    def _carriers(self) -> dict[Instruction, int]:
        """With which operator each instruction travels; ends of pairs do with none."""
        found = dict(self.number)
        needed_by: dict[Instruction, int] = {}
        for instruction in reversed(self.sequence):
            user = self.number.get(instruction, needed_by.get(instruction))
            if user is not None:
                for earlier in self.before[instruction]:
                    needed_by[earlier] = min(user, needed_by.get(earlier, user))
        for instruction in self.sequence:
            if instruction not in found and not is_done(instruction):
                carrier = needed_by.get(instruction, max(self.needs[instruction], default=None))
                if carrier is not None:
                    found[instruction] = carrier
        for instruction in reversed(self.sequence):  # what only others that travel need goes with these
            if instruction in found:
                for earlier in self.before[instruction]:
                    if earlier not in found and not is_done(earlier):
                        found[earlier] = found[instruction]
        return found

    def _waits(self, ends: Mapping[int, Instruction]) -> tuple[tuple[int, ...], ...]:
        """Pairs whose done each operator needs, directly or through what travels."""
        marks: dict[Instruction, int | None] = dict.fromkeys(self.heads)
        marks.update((done, number) for number, done in ends.items())
        found = _nearest(self.sequence, self.before, marks)
        return tuple(tuple(sorted(found[head])) for head in self.heads)

    def _strands(self, operators: Sequence[Operator], parts: Sequence[Sequence[Instruction]]) -> tuple[Strand, Strand]:
        """What is in neither part goes with the first operator that needs it, and with the first strand if none."""
        side = {self.number[i]: n for n, part in enumerate(parts) for i in part if i in self.number}
        users: dict[int, list[int]] = {o.number: [] for o in operators}
        for operator in operators:
            for needed in operator.needs:
                users[needed].append(operator.number)
        for operator in reversed(operators):
            if operator.number not in side:
                side[operator.number] = next((side[u] for u in users[operator.number]), 0)
        strands = []
        for n in range(2):
            mine = tuple(o for o in operators if side[o.number] == n)
            strands.append(Strand(mine, frozenset(self._floating(mine, users, side))))
        return strands[0], strands[1]

    def _floating(
        self, mine: Sequence[Operator], users: Mapping[int, Sequence[int]], side: Mapping[int, int]
    ) -> set[int]:
        """Operators that only floating ones of their strand need; never collectives, which others lie under."""
        found: set[int] = set()
        for operator in reversed(mine):
            own_users = [u for u in users[operator.number] if side[u] == side[operator.number]]
            if operator.lane is Lane.COMPUTE and not is_start(self.heads[operator.number]):
                if all(u in found for u in own_users):
                    found.add(operator.number)
        return found


def _nearest[Mark](
    sequence: Sequence[Instruction],
    before: Mapping[Instruction, Sequence[Instruction]],
    marks: Mapping[Instruction, Mark | None],
) -> dict[Instruction, Mapping[Mark, None]]:
    """Marks of what must come before each instruction, through what has none; a mark of None is left out."""
    found: dict[Instruction, Mapping[Mark, None]] = {}
    for instruction in sequence:
        earlier = before[instruction]
        if len(earlier) == 1 and earlier[0] not in marks:
            found[instruction] = found[earlier[0]]  # most hand on what they are given
            continue
        merged: dict[Mark, None] = {}
        for b in earlier:
            if b not in marks:
                merged.update(found[b])
            elif (mark := marks[b]) is not None:
                merged[mark] = None
        found[instruction] = merged
    return found
