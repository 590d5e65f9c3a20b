"""Splits a co-executed body into two strands, each a sequence of operators, for `strand_pairing.py`.

In DHelix section 4.2, a transformer layer with tensor and sequence parallelism has 14 operators forward and 18
backward. Here, a scheduled body of 260 instructions becomes two chains that share only their inputs:

    first (forward)     norm, all-gather, product, attention, product, reduce-scatter, ...
    second (backward)   all-gather, product, product, reduce-scatter, product (weight gradient), ...

1. *Strands* follow data flow, through tuples element by element. Instructions that only read and move loop state
   (weight slices, norms of the input) belong to their users and connect nothing. All other instructions are a
   collective, a matrix product or attention, or depend on one of these. They fall into parts that share no value. The
   two longest parts start the two strands. Each further part joins the shorter strand. The names of the instructions
   only decide which strand is the first.
2. *Operators* are collectives (a start with its done) and instructions that take at least 20 us or 0.3 % of the body's
   time. Each shorter instruction travels with the first operator that needs it. An instruction that no operator needs
   travels with the last operator that it needs.
3. *Floating* operators, such as weight gradients, have no user in their strand except floating operators.
   `Strand.candidates` holds three orders to try: XLA's order, floating operators right after collectives of their
   strand, and floating operators at the end. In the second order, floating operators hide collectives of their own
   strand (the paper's dual-coloured blocks).

`Body.sequence` turns any order of operators that respects `Operator.needs` into an order of all instructions.
Instructions that an operator depends on go directly before it, unless they are placed already. This includes dones of
collectives, so dones are as late as possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dhelix.passes.analysis.buffers import is_update
from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.evaluation.operator_keys import FREE_OPCODES
from dhelix.passes.evaluation.operator_work import work_of
from dhelix.passes.evaluation.roofline_costs import COMMUNICATION, Cost, Lane
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import Limits, dependencies

_TINY = 3e-3  # an instruction that takes this fraction of the body's time is an operator
_LONG = 2e-5  # an instruction that takes this many seconds is an operator
_RENAMES = frozenset("bitcast opt-barrier async-update".split())


@dataclass(frozen=True)
class Operator:
    """A group of instructions that the search moves as one.

    Attributes:
      number: index in XLA's schedule order.
      lane, seconds: lane and time of its head, the instruction that stands for it.
      light: seconds of the compute that travels with it.
      needs: numbers of the operators, of either strand, that must come before it.
    """

    number: int
    lane: Lane
    seconds: float
    light: float = 0.0
    needs: frozenset[int] = frozenset()

    def busy(self, lane: Lane) -> float:
        """Seconds of `lane` that the operator occupies."""
        return (self.seconds if lane is self.lane else 0.0) + (self.light if lane is Lane.COMPUTE else 0.0)


@dataclass(frozen=True)
class Strand:
    """Operators of one strand in XLA's order, and the numbers of its floating operators."""

    operators: tuple[Operator, ...]
    floating: frozenset[int]

    def part(self, operators: Sequence[Operator]) -> "Strand":
        return Strand(tuple(operators), self.floating & {o.number for o in operators})

    def candidates(self) -> tuple[tuple[Operator, ...], ...]:
        """XLA's order, floating operators after collectives of the strand, and floating operators at the end."""
        beneath, late = (self.placed(lanes) for lanes in (COMMUNICATION, ()))
        return self.operators, beneath, late

    def placed(self, lanes: Collection[Lane]) -> tuple[Operator, ...]:
        """Moves each floating operator behind the first operator on `lanes` after which it can run, else to the end."""
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
    """A body split into strands.

    Attributes:
      order: all instructions in XLA's order.
      heads: for each operator, the instruction that stands for it. For a collective, this is the start.
      parts: for each operator, its head and the instructions that travel with it.
      ends: the done of each operator that is an async pair.
      waits: for each operator, the async pairs whose results it needs, directly or through instructions that travel
        with operators.
      before: for each instruction, the instructions that must come before it.
      timed: like `before`, but with dones and instructions that take time only. All others are skipped over.
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
        """Position of each instruction in XLA's order."""
        return {i: n for n, i in enumerate(self.order)}

    @cached_property
    def waits_for(self) -> dict[int, int]:
        """Maps the number of each wait to an async pair. At a wait, compute waits for the done of the pair."""
        return {len(self.operators) + n: pair for n, pair in enumerate(sorted(self.ends))}

    def head(self, number: int) -> Instruction:
        """The head of an operator, or the done of the pair that wait `number` waits for."""
        return self.heads[number] if number < len(self.heads) else self.ends[self.waits_for[number]]

    def sequence(self, numbers: Iterable[int]) -> list[Instruction]:
        """All instructions, ordered by `numbers` (of operators and waits). `numbers` must respect all needs."""
        laid: dict[Instruction, None] = {}
        for number in numbers:
            lay(self.head(number), self.before, laid)
            for instruction in self.parts[self.waits_for.get(number, number)]:
                # Travelling instructions after the head or the done hold memory until they run. So place them early.
                if instruction not in laid and instruction in self.timed:
                    if all(b in laid for b in self.timed[instruction]):
                        lay(instruction, self.before, laid)
        for instruction in self.order:
            if instruction not in laid:
                lay(instruction, self.before, laid)
        return list(laid)


def lay[T](wanted: T, before: Mapping[T, Sequence[T]], laid: dict[T, None]) -> None:
    """Appends `wanted` to `laid`, after all its predecessors (`before`) that are missing in `laid`."""
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
    """Splits the operators of `computation`, whose XLA order is `sequence`, into two strands.

    All operators are in the first strand if no two parts are independent, or if `most` is 1.
    """
    seconds = {i: _seconds(i, costs, limits) for i in sequence}
    tiny = min(_TINY * sum(seconds.values()), _LONG)
    # 1. Strands
    parts = [p for p in _independent_parts(sequence, costs) if sum(seconds[i] for i in p) > tiny]
    parts.sort(key=lambda part: -sum(seconds[i] for i in part))
    two = [list(sequence), []]
    if len(parts) > 1 and most > 1:
        two = sorted(_halves(parts, seconds), key=lambda part: _backward_share(part, seconds))
    before: dict[Instruction, list[Instruction]] = {i: [] for i in sequence}
    for earlier, later in dependencies(computation, sequence, limits.memory):
        before[later].append(earlier)
    # 2. Operators; `_Maker` also does step 3, floating operators.
    heads = [i for i in sequence if not is_done(i) and (costs[i].lane is not Lane.COMPUTE or seconds[i] >= tiny)]
    return _Maker(computation, sequence, costs, seconds, before, heads).body(two)


def _halves(
    parts: Sequence[Sequence[Instruction]], seconds: Mapping[Instruction, float]
) -> tuple[list[Instruction], list[Instruction]]:
    """Groups parts into two halves of similar time, such as two forward passes and one backward pass."""
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
    """Groups work (`_is_work`), and all instructions that depend on work, into parts that share no value."""
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
    """Whether the instruction is a collective, a matrix product, a custom call such as attention, or control flow."""
    if instruction.opcode in ("fusion", "dot", "convolution"):
        return work_of(instruction).unit != "memory"
    return instruction.opcode in (*CONTROL_FLOW, "custom-call") or costs[instruction].lane is not Lane.COMPUTE


def _sources(value: Instruction) -> list[Instruction]:
    """The instructions that produce `value`. Looks through renames, and finds the tuple element that is read."""
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
    """Builds a body's operators. Each of `heads` stands for an operator, and other instructions travel with one."""

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
        """For each timed instruction (dones included), the nearest timed instructions that must come before it."""
        timed = {i: i for i in self.sequence if is_done(i) or self.seconds[i] > 0.0 or i in self.number}
        found = _nearest(self.sequence, self.before, timed)
        return {i: list(found[i]) for i in timed}

    def _carriers(self) -> dict[Instruction, int]:
        """The operator with which each instruction travels. Dones of async pairs travel with no operator."""
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
        for instruction in reversed(self.sequence):  # the rest travels with the instructions that need it
            if instruction in found:
                for earlier in self.before[instruction]:
                    if earlier not in found and not is_done(earlier):
                        found[earlier] = found[instruction]
        return found

    def _waits(self, ends: Mapping[int, Instruction]) -> tuple[tuple[int, ...], ...]:
        """For each operator, the async pairs whose results it needs, also through instructions that travel with one."""
        marks: dict[Instruction, int | None] = dict.fromkeys(self.heads)
        marks.update((done, number) for number, done in ends.items())
        found = _nearest(self.sequence, self.before, marks)
        return tuple(tuple(sorted(found[head])) for head in self.heads)

    def _strands(self, operators: Sequence[Operator], parts: Sequence[Sequence[Instruction]]) -> tuple[Strand, Strand]:
        """Makes a strand of each part. Other operators join the strand of their first user, or the first strand."""
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
        """Compute operators whose users in their own strand all float. Collectives never float."""
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
    """For each instruction, the marks of its nearest marked predecessors. Marks that are None are left out."""
    found: dict[Instruction, Mapping[Mark, None]] = {}
    for instruction in sequence:
        earlier = before[instruction]
        if len(earlier) == 1 and earlier[0] not in marks:
            found[instruction] = found[earlier[0]]  # the common case: share the set instead of copying it
            continue
        merged: dict[Mark, None] = {}
        for b in earlier:
            if b not in marks:
                merged.update(found[b])
            elif (mark := marks[b]) is not None:
                merged[mark] = None
        found[instruction] = merged
    return found
