"""The integer programs of `order.py`, in nanoseconds. `order.py` explains their constraints.

    Overlap     which compute meets (overlaps with) which collective, in which way, and for how long, but not when
    Schedule    the same, and when everything begins and ends

`Overlap` is a relaxation of `Schedule` and much smaller. `bound.py` adds constraints that hold for one order of the
collectives.

Rounding keeps the bound valid: the numbers of a legal order, with times rounded down, satisfy every constraint. To
ensure this, each constraint is loosened by the amount that rounding its terms may lose. Rates are whole thousandths,
rounded to the side that loosens the constraint.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.ordering.exact.problem import Meeting, Problem

NANO = 1e9
_SCALE = 1000


@dataclass(frozen=True)
class Way:
    """One way in which compute and a collective may meet.

    Attributes:
      so: variable that tells whether compute and the collective meet in this way.
      beside: variable with the nanoseconds for which the two overlap in this way.
      of_compute, of_collective: rates of the two while they overlap.
    """

    meeting: Meeting
    so: Any
    beside: Any
    of_compute: float
    of_collective: float


class Overlap:
    """The program that decides which compute hides which collective, but not when.

    `horizon` is a limit in seconds on all times.

    Attributes:
      length: duration of each compute instruction, its pause included.
      flight: duration of each collective from its begin to its end.
      waiting, paused: for each collective, nanoseconds for which compute waits for it, or pauses while it runs.
      launches: nanoseconds for which compute pauses before each collective.
      met: for each pair of compute and collective that may overlap, the ways in which the two may meet.
      last: for each such pair, whether the collective is done while the compute runs.
      earlier: for each pair of collectives of a lane, whether the first of the pair runs before the second.
      slack: nanoseconds by which rounding may have lengthened the makespan.
    """

    def __init__(self, cp_sat: Any, problem: Problem, horizon: float) -> None:
        self.model = cp_sat.CpModel()
        self.problem, self.horizon = problem, int(horizon * NANO) + 2
        self.slack = len(problem.compute) + 3 * len(problem.collectives) + 3
        self.launches = [int(c.launch * NANO) for c in problem.collectives]
        self.lanes = [
            [n for n, c in enumerate(problem.collectives) if c.lane is lane]
            for lane in Lane
            if any(c.lane is lane for c in problem.collectives)
        ]
        self.length = self.times(len(problem.compute))
        self.flight, self.waiting, self.paused = (self.times(len(problem.collectives)) for _ in range(3))
        self.met = {
            (x, c): self._ways(x, c)
            for c in range(len(problem.collectives))
            for x in range(len(problem.compute))
            if problem.free(problem.compute[x], problem.collectives[c])
        }
        self.last = {met: self.model.new_bool_var("") for met in self.met}
        self.earlier: dict[tuple[int, int], Any] = {}
        for lane in self.lanes:
            self._in_turn(lane)
            for c in lane:
                self._collective(c, lane)
        for x in range(len(problem.compute)):
            for lane in self.lanes or [[]]:
                self._compute(x, lane)
        self._chains()
        self.makespan = self._makespan()
        self.model.minimize(self.makespan)

    def times(self, count: int) -> list[Any]:
        return [self.model.new_int_var(0, self.horizon, "") for _ in range(count)]

    def _ways(self, x: int, c: int) -> tuple[Way, ...]:
        compute, collective = self.problem.compute[x], self.problem.collectives[c]
        ways = []
        for meeting in Meeting:
            rates = self.problem.rates(compute, collective, meeting)
            slowest = rates[0] if len(self.lanes) == 1 else self._slowest(x)
            most = int(min(compute.seconds / slowest, collective.seconds / rates[1]) * NANO) + 1
            so, beside = self.model.new_bool_var(""), self.model.new_int_var(0, most, "")
            self.model.add(beside <= most * so)
            ways.append(Way(meeting, so, beside, *rates))
        self.model.add_at_most_one(way.so for way in ways)
        return tuple(ways)

    def _slowest(self, x: int) -> float:
        """The lowest rate of compute `x` beside any collective. Two lanes may run a collective beside `x` at once."""
        compute = self.problem.compute[x]
        met = [c for c in self.problem.collectives if self.problem.free(compute, c)]
        return min(self.problem.rates(compute, c, meeting)[0] for c in met for meeting in Meeting)

    def _in_turn(self, lane: Sequence[int]) -> None:
        """Constraints on the order of a lane's collectives, and on the compute that they can meet in that order."""
        model, problem = self.model, self.problem
        for one, other in itertools.combinations(lane, 2):
            so = self.earlier[one, other] = model.new_bool_var("")
            self.earlier[other, one] = ~so
        for a, b, c in itertools.permutations(lane, 3):
            model.add_bool_or(~self.earlier[a, b], ~self.earlier[b, c], self.earlier[a, c])
        for one, other in itertools.permutations(lane, 2):
            for x, compute in enumerate(problem.compute):
                meets = sum(way.so for way in self.met.get((x, other), ()))
                if problem.precedes(compute, problem.collectives[one]):  # x is done before `one` begins
                    model.add(meets <= self.earlier[other, one])
                if problem.follows(compute, problem.collectives[one]):
                    model.add(meets <= self.earlier[one, other])
        for c in lane:
            for earlier in problem.launched_before(problem.collectives[c]):
                model.add(self.earlier[earlier, c] == 1)

    def _collective(self, c: int, lane: Sequence[int]) -> None:
        """Constraints on the work and length of collective `c`, and on the compute that it overlaps with."""
        model = self.model
        met = {x: ways for (x, other), ways in self.met.items() if other == c}
        ways = [way for found in met.values() for way in found]
        lost = len(ways) + 3
        alone = self.waiting[c] + self.paused[c]
        work = sum(_up(way.of_collective) * way.beside for way in ways)
        model.add(_SCALE * (alone + lost) + work >= int(_SCALE * NANO * self.problem.collectives[c].seconds))
        together = sum(way.beside for way in ways) + alone
        model.add(self.flight[c] + 2 >= together)
        model.add(self.flight[c] <= together + lost)
        pause = max((compute.pause for compute in self.problem.compute), default=0.0)
        others = sum(self.launches) - self.launches[c]
        model.add(self.paused[c] <= (int(pause * NANO) + 1) * sum(way.so for way in ways) + others)
        model.add_at_most_one(self.last[x, c] for x in met)
        for x, (running, first, _) in met.items():  # compute that ends before the collective ends overlaps in full
            for way in () if self.problem.compute[x].loop else (running, first):
                whole = int(self.problem.compute[x].seconds / way.of_compute * NANO) - 1
                model.add(way.beside >= whole * way.so - whole * self.last[x, c])
        opening = [way.so for way in ways if way.meeting is not Meeting.RUNNING]
        model.add_at_most_one(opening)
        for x, (running, _, second) in met.items():
            if len(self.lanes) == 1 and not others:  # otherwise the collective may begin while compute waits or pauses
                model.add(running.so <= sum(opening))
            if not self.problem.compute[x].loop:  # c can begin while x runs only if an earlier collective ends then
                there = [way.so for o in lane if o != c for way in self.met.get((x, o), ())[:2]]
                model.add(second.so <= sum(there))

    def _compute(self, x: int, lane: Sequence[int]) -> None:
        """Constraints of the collectives of one lane on the length of compute `x`."""
        model, compute = self.model, self.problem.compute[x]
        ways = [way for c in lane for way in self.met.get((x, c), ())]
        alone = int(_SCALE * NANO * (compute.seconds + compute.pause))
        cost = sum((_SCALE - _up(way.of_compute)) * way.beside for way in ways)
        model.add(_SCALE * (self.length[x] + 1) >= alone + cost)
        if len(self.lanes) <= 1 and not compute.loop:
            most = sum((_SCALE - _down(way.of_compute)) * way.beside for way in ways)
            model.add(_SCALE * (self.length[x] - len(ways) - 3) <= alone + most)
        if ways:
            model.add(sum(way.beside for way in ways) <= self.length[x] + 1 - int(compute.pause * NANO))
            model.add_at_most_one(way.so for way in ways if way.meeting is not Meeting.SECOND)

    def _chains(self) -> None:
        """If one collective must be done before another starts, no compute overlaps with both.

        Compute that overlaps with the later collective runs after the launch of that collective. By then the earlier
        collective is done.
        """
        for c, collective in enumerate(self.problem.collectives):
            for earlier in self.problem.done_before(collective):
                for x in range(len(self.problem.compute)):
                    met = *self.met.get((x, earlier), ()), *self.met.get((x, c), ())
                    self.model.add_at_most_one(way.so for way in met)

    def _makespan(self) -> Any:
        makespan = self.model.new_int_var(0, self.horizon, "makespan")
        launches = sum(self.launches)
        pauses = int(sum(compute.pause for compute in self.problem.compute) * NANO) + len(self.launches) + launches + 1
        for lane in self.lanes or [[]]:
            waiting = sum(self.waiting[c] for c in lane)
            self.model.add(sum(self.paused[c] for c in lane) <= pauses)
            self.model.add(makespan + self.slack >= sum(self.length) + launches + waiting)
        return makespan


class Schedule(Overlap):
    """The program that decides which compute hides which collective, and when everything begins and ends.

    Attributes:
      begin, end: times of each compute instruction, its pause included.
      issue, done: begin and end of each collective.
      launch: time at which each collective is launched. The collective begins then, or later when its lane becomes
        free.
    """

    def __init__(self, cp_sat: Any, problem: Problem, horizon: float) -> None:
        super().__init__(cp_sat, problem, horizon)
        self.begin, self.end, compute = self._intervals(self.length)
        self.issue, self.done, flights = self._intervals(self.flight)
        self.launch = self.times(len(problem.collectives))
        blocking = [flights[n] for n, c in enumerate(problem.collectives) if c.blocks]
        self.model.add_no_overlap([*compute, *blocking])
        for lane in self.lanes:
            self.model.add_no_overlap([flights[c] for c in lane])
        for (one, other), so in self.earlier.items():
            self.model.add(self.issue[other] >= self.done[one]).only_enforce_if(so)
        self._precedences()
        for x, c in self.met:
            self._meet(x, c)
        for end in (*self.end, *self.done):
            self.model.add(self.makespan >= end)

    def _intervals(self, lengths: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        begins, ends = self.times(len(lengths)), self.times(len(lengths))
        parts = zip(begins, lengths, ends, strict=True)
        return begins, ends, [self.model.new_interval_var(*part, "") for part in parts]

    def _precedences(self) -> None:
        problem = self.problem
        targets = [(c.place, begin) for c, begin in zip(problem.compute, self.begin, strict=True)]
        targets += [(c.start, launch) for c, launch in zip(problem.collectives, self.launch, strict=True)]
        for place, begin in targets:
            compute, collectives = problem.predecessors(place)
            for end in (*(self.end[x] for x in compute), *(self.done[c] for c in collectives)):
                self.model.add(begin >= end)
        for issue, launch in zip(self.issue, self.launch, strict=True):
            self.model.add(issue >= launch)

    def _meet(self, x: int, c: int) -> None:
        """Constraints on compute `x` and collective `c`: one runs before the other, or they meet in one of the ways."""
        model, (running, first, second) = self.model, self.met[x, c]
        begin, end, issue, done = self.begin[x], self.end[x], self.issue[c], self.done[c]
        before, after = model.new_bool_var(""), model.new_bool_var("")
        model.add_exactly_one(before, after, running.so, first.so, second.so)
        model.add(end <= issue).only_enforce_if(before)
        model.add(done <= begin).only_enforce_if(after)
        for way in self.met[x, c]:
            model.add(self.launch[c] <= begin).only_enforce_if(way.so)
        model.add(issue <= begin).only_enforce_if(running.so)
        model.add(issue == begin).only_enforce_if(first.so)
        model.add(issue >= begin).only_enforce_if(second.so)
        within = model.new_bool_var("")  # c is done before x ends; the overlap ends at the earlier end
        model.add(done <= end).only_enforce_if(within)
        model.add(done >= end).only_enforce_if(~within)
        pause = int(self.problem.compute[x].pause * NANO) + 2
        for way, since in ((running, begin), (first, begin), (second, issue)):
            for until, so in ((done, within), (end, ~within)):
                model.add(way.beside <= until - since).only_enforce_if(way.so, so)
                if not self.problem.compute[x].loop:
                    model.add(way.beside + pause >= until - since).only_enforce_if(way.so, so)
            model.add_implication(within, self.last[x, c]).only_enforce_if(way.so)

    def hint(self, timeline: Timeline) -> None:
        """Starts the solver's search at the evaluator's timeline of a known order."""
        problem, spans = self.problem, {i.instruction: i for i in timeline.intervals}
        under = {c.instruction: dict(c.under) for c in timeline.collectives}
        compute, flights = ([spans[o.instruction.name] for o in of] for of in (problem.compute, problem.collectives))
        begins = [int((s.start - c.pause) * NANO) for s, c in zip(compute, problem.compute, strict=True)]
        for x, span in enumerate(compute):
            end = int(span.end * NANO)
            self._hint((self.begin[x], self.length[x], self.end[x]), (begins[x], end - begins[x], end))
        for c, span in enumerate(flights):
            issue, done = int(span.start * NANO), int(span.end * NANO)
            self._hint((self.issue[c], self.flight[c], self.done[c]), (issue, done - issue, done))
        for (x, c), ways in self.met.items():
            issue = int(flights[c].start * NANO)
            beside = int(under[flights[c].instruction].get(compute[x].instruction, 0.0) * NANO)
            meeting = Meeting.RUNNING if issue < begins[x] else Meeting.FIRST if issue == begins[x] else Meeting.SECOND
            for way in ways:
                met = int(beside > 0 and way.meeting is meeting)
                self._hint((way.so, way.beside), (met, beside * met))

    def _hint(self, variables: Sequence[Any], values: Sequence[int]) -> None:
        for variable, value in zip(variables, values, strict=True):
            self.model.add_hint(variable, value)


def _up(rate: float) -> int:
    return min(math.ceil(rate * _SCALE), _SCALE)


def _down(rate: float) -> int:
    return math.floor(rate * _SCALE)
