"""Simulates schedules: when each instruction of a sequence runs, and how long the sequence takes.

This is the only evaluator of schedules. It takes costs and an order, and returns times; it makes no decisions.

Compute runs in the order of the sequence, one instruction at a time. A collective begins when the compute before its
start is done and its lane is free. A lane runs one collective at a time, in the order of the starts. A done makes
compute wait for its collective. A loop's body is simulated once from idle lanes, and the result is repeated. But while
a collective from before the loop is in flight, the simulation enters each iteration.

While a collective and compute overlap, each proceeds at its own rate, so durations depend on what overlaps with what.
Without a profile, the rates are the hardware's (`Hardware.rates`). With a profile, they are the rates of a measured
pair (`Costs.rates`). A profile has measurements for different launch orders. The time at which the collective begins
decides which measurement counts:

    begins while the instruction runs (its lane becomes free then)     launched second
    begins with it                                                     launched first
    began before                                                       running: it holds its SMs

The last two cases differ if kernels do not start in launch order. Under the launch setting `default`, a collective
launched together with a cuBLAS GEMM starves: its kernel is queued and gets its SMs only in the GEMM's tail. The
collective keeps these SMs. So next to the following GEMM, it runs at the rates that are measured with the collective
first and with one connection (launch setting `connections1`, which starts kernels in launch order). Example: a gather
of 300 us, and two GEMMs x and y of 200 us each. The rates of compute and collective are 1 and 0.01 during x, and 0.75
and 0.9 during y:

    gather   ............########################    526 us
    x        ############                            200 us: gather does 2 us
    y                    ################            267 us: gather does 240 us, and the other 58 alone

With one connection (`InStep.in_order`), kernels of all streams start in launch order. If a collective waits for its
lane, kernels launched after it wait, too. Example: two gathers of 300 us, both started before the GEMMs:

    gathers  1111111111111111 2222222222222222
    x                         ############           not before the second gather has begun

`CostModel.costs` adds more effects (`costs.InStep`). Compute pauses before each kernel, and when copy engines get a
collective; in a pause, collectives run alone. A collective takes longer, because it waits for the last of its GPUs. A
step with dense compute lowers the GPU's clock. The clock depends on the whole step (`settled`), so only
`simulate_module` includes this effect. Schedulers compare orders at the full clock, at which profiles are measured.

Collectives on different lanes do not slow each other, because their links differ. Compute next to several collectives
proceeds at the lowest of its rates. Messages (send and recv) run like collectives. Transfers to and from the host have
their own lane. Async compute (fusions on further streams) shares the SMs, so it counts as compute at its start. A
synchronous collective, or a pair that XLA will make synchronous, counts as a start and a done at the same place.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import is_start, start_of
from dhelix.passes.analysis.execution import counted_trips, sequence_of
from dhelix.passes.evaluation.costs import BY_THEMSELVES, Costs
from dhelix.passes.evaluation.intervals import CollectiveTime, Interval, Timeline
from dhelix.passes.evaluation.roofline_costs import Cost, Lane, constant_rates, made_synchronous
from dhelix.passes.evaluation.transfers import begins_pair
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.hardware import Hardware

_SLOWED = 1.2  # trial value of `InStep.clock`, to see how a step grows with its products


def evaluate(
    order: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    hardware: Hardware | None = None,
    bodies: dict[Computation, Timeline] | None = None,
) -> Timeline:
    """Simulates `order`, a sequence of one computation, from idle lanes until everything that it starts is done.

    Args:
      costs: costs of every instruction, also in called computations. `Costs(hardware)` computes them as needed. With a
        profile, it also gives the rates of pairs.
      hardware: gives the rates that `costs` does not give; by default the hardware of `costs`.
      bodies: a cache of timelines of called computations, for reuse between calls with the same costs.

    Raises:
      DhelixError: `hardware` is None and `costs` is not a `Costs`, which has its own hardware.
    """
    if hardware is None:
        if not isinstance(costs, Costs):
            raise DhelixError("the costs name no hardware: give Costs(hardware), or hardware= as well")
        hardware = costs.hardware
    player = Player(costs, hardware, {} if bodies is None else bodies)
    for instruction in order:
        player.play(instruction)
    player.drain()
    return player.timeline()


def simulate(
    computation: Computation,
    order: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    hardware: Hardware,
    bodies: dict[Computation, Timeline] | None = None,
) -> Timeline:
    """Calls `evaluate`. Ignores `computation`."""
    return evaluate(order, costs, hardware, bodies)


def simulate_module(module: HloModule, hardware: Hardware, costs: Mapping[Instruction, Cost] | None = None) -> Timeline:
    """Simulates a module's entry computation in the order of its schedule, at the step's own clock (`settled`)."""
    costs = Costs(hardware) if costs is None else costs
    costs = settled(module, costs) if isinstance(costs, Costs) else costs
    return evaluate(sequence_of(module.entry), costs, hardware)


def settled(module: HloModule, costs: Costs) -> Costs:
    """`costs` at the GPU clock of the module's step. A dense step has a lower clock than others (`PowerLimit`)."""
    power, sequence = costs.in_step.power, sequence_of(module.entry)
    if power is None:
        return costs
    full = costs.at_clock(1.0)
    seconds = evaluate(sequence, full).seconds
    peak, sent = costs.hardware.peak_flops, power.communication
    work = sum(full[i].flops / peak + sent * full[i].communication for i in sequence)
    if work <= power.free * seconds:
        return full
    slower = (evaluate(sequence, costs.at_clock(_SLOWED)).seconds - seconds) / (_SLOWED - 1.0)
    return costs.at_clock(power.clock(work / seconds, seconds, slower))


def guessed_overlap(timeline: Timeline, costs: Costs) -> float:
    """Fraction of the overlap of collectives and compute with guessed rates, because no similar pair was measured."""
    beside = [(under, c.instruction, seconds) for c in timeline.collectives for under, seconds in c.under]
    guessed = sum(seconds for under, collective, seconds in beside if costs.rates_are_guessed(under, collective))
    return guessed / (sum(seconds for *_, seconds in beside) or 1.0)


@dataclass(slots=True)
class _Tally:
    lane: Lane
    count: int = 0
    alone: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    under: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """A collective in flight.

    Attributes:
      left: seconds that the collective would still take alone.
      tally: totals over all executions of the collective.
      begin: time at which the collective got its lane; infinite until then.
      rate: speed at which the collective proceeds; 1 is undisturbed.
    """

    instruction: Instruction
    lane: Lane
    left: float
    tally: _Tally
    begin: float = math.inf
    rate: float = 1.0


# Collectives in flight, in launch order: instruction, lane, seconds left alone, and whether it has its lane already.
Flights = tuple[tuple[Instruction, Lane, float, bool], ...]


class Player:
    """Simulates a sequence instruction by instruction, and holds the state of the lanes. Arguments: see `evaluate`.

    A scheduler may read `now` (seconds), `under_way` (the collectives in flight, by their start) and `lanes` (the queue
    of each lane, with the running collective first).
    """

    def __init__(
        self, costs: Mapping[Instruction, Cost], hardware: Hardware, bodies: dict[Computation, Timeline]
    ) -> None:
        self.costs, self.hardware, self.bodies = costs, hardware, bodies
        self.rates, self.in_step = self._constant_rates, BY_THEMSELVES
        if isinstance(costs, Costs) and costs.estimator is not None:
            self.rates, self.in_step = costs.rates, costs.in_step
        self.now = self.compute = self.compute_alone = self.hidden = self.exposed = self.idle = 0.0
        self.lanes: dict[Lane, deque[Flight]] = {lane: deque() for lane in Lane if lane is not Lane.COMPUTE}
        self._queues = tuple(self.lanes.values())
        self.under_way: dict[Instruction, Flight] = {}
        self.spans: list[tuple[Instruction, Lane, float, float]] = []  # intervals except those of loops
        self.loops: list[Interval] = []
        self.tallies: dict[str, _Tally] = {}

    def flights(self) -> Flights:
        return tuple((f.instruction, f.lane, f.left, f.begin < self.now) for f in self.under_way.values())

    def resume(self, flights: Flights) -> None:
        """Gives a new player the flights of another player, but not the other player's totals."""
        for instruction, lane, left, running in flights:
            flight = Flight(instruction, lane, left, _Tally(lane), -math.inf if running else math.inf)
            self.lanes[lane].append(flight)
            self.under_way[instruction] = flight

    def play(self, instruction: Instruction) -> None:
        """Simulates one instruction.

        Control flow is entered here and not by a walk of `analysis/execution.py`, because each instruction moves the
        clock.
        """
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            self._wait(start_of(instruction))
        elif opcode == "while":
            self._loop(instruction)
        elif opcode == "call":
            self._call(instruction)
        elif opcode == "conditional":
            self._play_all(max(instruction.called, key=lambda c: self._body(c).seconds))
        else:
            self._run(instruction, self.costs[instruction])

    def drain(self) -> None:
        """Waits until no collective is in flight."""
        while self.under_way:
            self._stand()

    def _play_all(self, computation: Computation) -> None:
        for instruction in sequence_of(computation):
            self.play(instruction)

    def _run(self, instruction: Instruction, cost: Cost) -> None:
        if cost.seconds <= 0.0:
            return
        if cost.lane is Lane.COMPUTE:
            if self.in_step.in_order:
                self._line_up()
            launched = self.now
            self._pause(self.in_step.pause)
            start = self.now
            self._compute(instruction, cost.seconds, launched)
            self.compute_alone += cost.seconds
            self.compute += self.now - start
            self.spans.append((instruction, cost.lane, start, self.now))
            return
        self._pause(cost.launch)
        tally = self.tallies.setdefault(instruction.name, _Tally(cost.lane))
        tally.count += 1
        tally.alone += cost.seconds
        flight = Flight(instruction, cost.lane, cost.seconds + self.in_step.wait, tally)
        self.lanes[cost.lane].append(flight)
        self.under_way[instruction] = flight
        is_pair = is_start(instruction) or begins_pair(instruction)
        if not is_pair or made_synchronous(instruction):
            self._wait(instruction)

    def _wait(self, start: Instruction) -> None:
        """Makes compute wait until the collective that `start` launched is done."""
        while start in self.under_way:
            self._stand()

    def _line_up(self) -> None:
        """Makes compute wait until every collective that was already launched has its lane."""
        while len(self._queues[0]) > 1 or len(self._queues[1]) > 1:
            self._stand()

    def _call(self, call: Instruction) -> None:
        """Simulates a call. Where calls nest and no collective is in flight, each callee is simulated only once."""
        callee = call.called[0]
        if not any(i.opcode in CONTROL_FLOW for i in callee.instructions):
            self._play_all(callee)
        elif not self.under_way:
            self._repeat(call, 1)
        elif self._body(callee).seconds:
            self._play_all(callee)

    def _loop(self, loop: Instruction) -> None:
        left = counted_trips(loop)
        if self.under_way and not self._body(loop.called[0]).seconds:
            return
        while left and self.under_way:
            self._play_all(loop.called[0])
            left -= 1
        if left:
            self._repeat(loop, left)

    def _repeat(self, loop: Instruction, left: int) -> None:
        """Simulates a loop's body or a callee once, and takes it `left` times. No collective is in flight."""
        body, start = self._body(loop.called[0]), self.now
        self.now += left * body.seconds
        for name in ("compute", "compute_alone", "hidden", "exposed", "idle"):
            setattr(self, name, getattr(self, name) + left * getattr(body, name))
        self.loops.append(Interval(loop.name, Lane.COMPUTE, start, self.now, body, left))
        for inner in body.collectives:
            tally = self.tallies.setdefault(inner.instruction, _Tally(inner.lane))
            tally.count += left * inner.count
            for name in ("alone", "hidden", "exposed"):
                setattr(tally, name, getattr(tally, name) + left * getattr(inner, name))
            for beside, seconds in inner.under:
                tally.under[beside] = tally.under.get(beside, 0.0) + left * seconds

    def _body(self, computation: Computation) -> Timeline:
        if computation not in self.bodies:
            self.bodies[computation] = evaluate(sequence_of(computation), self.costs, self.hardware, self.bodies)
        return self.bodies[computation]

    def _compute(self, instruction: Instruction, work: float, launched: float) -> None:
        """Advances time until `work` seconds of `instruction` are done. `launched` is the time of its launch."""
        while work > 0.0:
            heads = self._heads()
            if not heads:
                self.now += work
                return
            rate = 1.0
            for head in heads:
                first, running = head.begin <= launched, head.begin < launched
                own, head.rate = self.rates(instruction, head.instruction, first, running)
                if own < rate:
                    rate = own
            needed = work / rate
            passed = self._pass(heads, needed, instruction.name)
            work = work - passed * rate if passed < needed else 0.0

    def _pause(self, seconds: float) -> None:
        """Advances time by `seconds` in which no compute kernel runs."""
        left = seconds
        while left > 0.0 and self.under_way:
            left -= self._stand(left)
        self.now += left
        self.idle += left

    def _stand(self, seconds: float = math.inf) -> float:
        """Advances time without compute until the next collective ends, at most `seconds`. Returns the time passed."""
        heads = self._heads()
        for head in heads:
            head.rate = 1.0
        return self._pass(heads, seconds, None)

    def _heads(self) -> list[Flight]:
        """The collectives that run now, one per busy lane. Sets `begin` of those that start now."""
        heads = [queue[0] for queue in self._queues if queue]
        for head in heads:
            if head.begin > self.now:
                head.begin = self.now
        return heads

    def _pass(self, heads: list[Flight], seconds: float, beside: str | None) -> float:
        """Advances time by `seconds`, or less if one of `heads` ends earlier. Returns the time passed.

        `beside` is the name of the compute instruction that overlaps; None if compute waits.
        """
        passed = seconds
        for head in heads:
            if head.left / head.rate < passed:
                passed = head.left / head.rate
        self.now += passed
        if beside is None:
            self.exposed += passed
        else:
            self.hidden += passed
        for head in heads:
            tally = head.tally
            if beside is None:
                tally.exposed += passed
            else:
                tally.hidden += passed
                tally.under[beside] = tally.under.get(beside, 0.0) + passed
            if head.left / head.rate == passed:
                self._finish(head)
            else:
                head.left = max(head.left - passed * head.rate, 0.0)
        return passed

    def _finish(self, flight: Flight) -> None:
        self.lanes[flight.lane].popleft()
        del self.under_way[flight.instruction]
        self.spans.append((flight.instruction, flight.lane, flight.begin, self.now))

    def _constant_rates(
        self, compute: Instruction, collective: Instruction, first: bool, running: bool
    ) -> tuple[float, float]:
        return constant_rates(self.hardware, self.costs[collective])

    def timeline(self) -> Timeline:
        collectives = tuple(
            CollectiveTime(name, t.lane, t.count, t.alone, t.hidden, t.exposed, _longest_first(t.under))
            for name, t in self.tallies.items()
        )
        intervals = [Interval(i.name, lane, start, end) for i, lane, start, end in self.spans] + self.loops
        intervals.sort(key=lambda i: (i.start, i.end))
        return Timeline(
            self.now,
            self.compute,
            self.compute_alone,
            self.hidden,
            self.exposed,
            tuple(intervals),
            collectives,
            self.idle,
        )


def _longest_first(under: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(under.items(), key=lambda item: (-item[1], item[0])))
