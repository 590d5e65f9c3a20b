"""The one evaluator of schedules: when each instruction of a sequence runs, and what it costs together.

Compute runs in the order of the sequence, one instruction at a time. A collective may begin when the compute
before its start is done and its lane is free; a lane runs one collective at a time, in the order of their
starts. A done makes compute wait. A loop is entered: its body is played from idle lanes once and repeated, or
played as it stands while a collective that began outside is still under way. Nothing here decides anything:
costs and an order in, times out.

While a collective and compute run at the same time each proceeds at a rate of its own, so lengths depend on
what lies beside what. Without a profile these are the hardware's (`Hardware.rates`).
With one (`Costs.rates`) they are those of the measured pair. Which pair that is, follows from when the collective
begins:

    begins while the instruction runs (its lane becomes free then)     launched second
    begins with it                                                     launched first
    began before                                                       running: it holds its SMs

The last two differ where kernels do not start in the order of their launch. A collective beside a cuBLAS GEMM, both
launched at once, is starved under the setting `default` (rates 0.01 and 1): its kernel is queued and gets its SMs in
the GEMM's tail. It keeps them, so beside the next GEMM it runs, at the rates that `connections1` shows with the
collective first. A gather of 300 us under two GEMMs of 200 us each, the second at rates 0.75 and 0.9:

    gather   ............########################    526 us
    x        ############                            200 us: gather does 2 us
    y                    ################            267 us: gather does 240 us, and the other 58 alone

Over one connection (`InStep.in_order`) kernels of all streams start in the order of their launch, so what is launched
behind a collective that waits for its lane waits, too. Two gathers of 300 us, both started before the GEMMs:

    gathers  1111111111111111 2222222222222222
    x                         ############           not before the second gather has begun

Costs for steps say more (`costs.InStep`): compute pauses before each kernel, and where copy engines are given a
collective; a collective takes longer, since it waits for the last of its GPUs. In a pause, collectives run alone. Last,
the clock is lower where a step leaves the GPU little rest. That follows from the step as a whole (`settled`), so it is
known of whole modules (`simulate_module`); schedulers compare orders at the full clock, which profiles are of.

Collectives on different lanes do not slow each other, as their links differ; compute beside several proceeds at the
lowest of its rates. Messages (send and recv) run as collectives do, transfers to and from the host on their own lane.

Async compute (fusions on further streams) shares the SMs with the rest, and so counts as compute at its
start. A collective that is no pair, or that XLA will make synchronous, is a start and a done at one place.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import is_start, start_of
from dhelix.passes.analysis.execution import sequence_of, trip_count
from dhelix.passes.evaluation.costs import BY_THEMSELVES, Costs
from dhelix.passes.evaluation.intervals import CollectiveTime, Interval, Timeline
from dhelix.passes.evaluation.roofline_costs import Cost, Lane, constant_rates, made_synchronous
from dhelix.passes.evaluation.transfers import begins_pair
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.profiles.hardware import Hardware

_SLOWED = 1.2  # times as long, to see how a step grows with its products


def evaluate(
    order: Sequence[Instruction],
    costs: Mapping[Instruction, Cost],
    hardware: Hardware | None = None,
    bodies: dict[Computation, Timeline] | None = None,
) -> Timeline:
    """Plays `order`, a sequence of one computation, from idle lanes to the end of its last instruction.

    Args:
      costs: of every instruction, in called computations too; `Costs(hardware)` computes them as needed, and
        with a profile knows the rates of pairs too.
      hardware: whose rates hold where `costs` knows none; by default that of `costs`.
      bodies: timelines of called computations, kept from call to call; they must have been played alike.

    Raises DhelixError if there is neither hardware nor `Costs`, which know theirs.
    """
    if hardware is None:
        if not isinstance(costs, Costs):
            raise DhelixError("costs without hardware: give Costs(hardware), or hardware= beside them")
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
    """`evaluate`, for callers that name the computation too."""
    return evaluate(order, costs, hardware, bodies)


def simulate_module(module: HloModule, hardware: Hardware, costs: Mapping[Instruction, Cost] | None = None) -> Timeline:
    """The entry computation of a module, in the order of its schedule, at the clock that it settles at."""
    costs = Costs(hardware) if costs is None else costs
    costs = settled(module, costs) if isinstance(costs, Costs) else costs
    return evaluate(sequence_of(module.entry), costs, hardware)


def settled(module: HloModule, costs: Costs) -> Costs:
    """`costs` at the clock that the module's step settles at, by what it does in its time."""
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
    """Share of the time in which collectives run beside compute for which no measured pair says how both proceed."""
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
    """A collective that has been started.

    Attributes:
      left: seconds it would still take alone.
      tally: of all its executions.
      begin: when its lane became free for it.
      rate: at which it proceeds.
    """

    instruction: Instruction
    lane: Lane
    left: float
    tally: _Tally
    begin: float = math.inf
    rate: float = 1.0


# Collectives under way, in the order of their launch: seconds left alone, and whether each has its lane by now.
Flights = tuple[tuple[Instruction, Lane, float, bool], ...]


class Player:
    """The lanes while a sequence is played, instruction by instruction; arguments as of `simulate`.

    A scheduler may look at `now` (seconds), at `under_way` (collectives begun and not done, by their start)
    and at what `lanes` hold, the running one first.
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
        self.spans: list[tuple[Instruction, Lane, float, float]] = []  # of intervals, but those of loops
        self.loops: list[Interval] = []
        self.tallies: dict[str, _Tally] = {}

    def flights(self) -> Flights:
        return tuple((f.instruction, f.lane, f.left, f.begin < self.now) for f in self.under_way.values())

    def resume(self, flights: Flights) -> None:
        """Goes on from the flights of another player, with nothing of what came before; for a player of its own."""
        for instruction, lane, left, running in flights:
            flight = Flight(instruction, lane, left, _Tally(lane), -math.inf if running else math.inf)
            self.lanes[lane].append(flight)
            self.under_way[instruction] = flight

    def play(self, instruction: Instruction) -> None:
        """A walk of its own (`analysis/execution.py` has the one for all else), since what runs moves the clock."""
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            self._wait(start_of(instruction))
        elif opcode == "while":
            self._loop(instruction)
        elif opcode == "call":
            self._play_all(instruction.called[0])
        elif opcode == "conditional":
            self._play_all(max(instruction.called, key=lambda c: self._body(c).seconds))
        else:
            self._run(instruction, self.costs[instruction])

    def drain(self) -> None:
        """Lets every collective come to its end."""
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
        """Compute stands still until the collective begun at `start` is done."""
        while start in self.under_way:
            self._stand()

    def _line_up(self) -> None:
        """Compute stands still until every collective that was launched before has its lane."""
        while len(self._queues[0]) > 1 or len(self._queues[1]) > 1:
            self._stand()

    def _loop(self, loop: Instruction) -> None:
        count = trip_count(loop)
        left = 1 if count is None else count
        while left and self.under_way:
            self._play_all(loop.called[0])
            left -= 1
        if not left:
            return
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
        """Lets time pass until `work` seconds of `instruction` are done."""
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
        """Lets time pass in which no kernel runs."""
        left = seconds
        while left > 0.0 and self.under_way:
            left -= self._stand(left)
        self.now += left
        self.idle += left

    def _stand(self, seconds: float = math.inf) -> float:
        """Lets time pass without compute until the next collective is done, or for `seconds`. Returns how much."""
        heads = self._heads()
        for head in heads:
            head.rate = 1.0
        return self._pass(heads, seconds, None)

    def _heads(self) -> list[Flight]:
        """What runs on the lanes."""
        heads = [queue[0] for queue in self._queues if queue]
        for head in heads:
            if head.begin > self.now:
                head.begin = self.now
        return heads

    def _pass(self, heads: list[Flight], seconds: float, beside: str | None) -> float:
        """Lets `seconds` pass, or less where one of `heads` ends before. Returns how much has passed.

        `beside`: the compute instruction that runs meanwhile, if any does.
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
        return constant_rates(self.hardware, self.costs[collective].lane)

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
