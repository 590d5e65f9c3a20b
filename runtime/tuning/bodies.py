"""Cuts a step into overlaps, and reads their times from a trace.

    bodies = bodies_of(module, target, executions)     # of a first trace, with NCCL's defaults
    times_of(bodies[0], executions)                    # seconds of its collectives, its computations, and of the whole

An overlap is a computation of the program that holds collectives, such as the body of the loop over layers: its
collectives run on one stream beside the rest on another. Its *whole* is the time of one execution, without the loops
inside, which are overlaps of their own. So a step takes the sum over all overlaps of executions x whole. Computations
that are alike (one fingerprint) are one overlap, because they have the same settings.

Short collectives keep NCCL's defaults: those that take less than a share of the step, and all but the longest of a
body. What a GPU computes is cut into a few pieces, which the channel model takes for computations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.analysis.execution import counted_trips, sequence_of
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.plans import tuned_collectives
from dhelix.passes.plans.plan import PlanTarget
from dhelix.passes.plans.tuned_collectives import Identity, identities
from dhelix.profiles.channels.channel_model import Overlap
from dhelix.profiles.hardware import describe
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.module_executions import by_instruction, steps_in

type Times = Mapping[Instruction, Sequence[Execution]]

LEAST_NOISE, MOST_NOISE = 0.003, 0.03
"""Bounds of the relative noise that is assumed."""

_MOST = 12
"""Collectives of a body that are tuned, at most."""
_PIECES = 6
_SHARE = 0.002
"""A collective that takes less than this fraction of a step is not tuned."""


@dataclass(frozen=True)
class BodyTimes:
    """Seconds of one execution of a body.

    Attributes:
      collectives: of each tuned collective, from the last GPU's arrival.
      computations: of each piece of the computation.
      whole: of the body, without the loops inside.
    """

    collectives: tuple[float, ...]
    computations: tuple[float, ...]
    whole: float


@dataclass(frozen=True)
class Body:
    """An overlap of a step.

    Attributes:
      fingerprint: of the computation, as in plans.
      name: for people.
      runs: executions in a step.
      collectives: the tuned ones in launch order.
      computation: the computation; of several that are alike, the one that runs most often.
      members: instructions of the tuned collectives.
      pieces: instructions of each piece of computation, in order.
      overlap: what the channel model needs to know.
      default: the times with NCCL's defaults.
    """

    fingerprint: str
    name: str
    runs: int
    collectives: tuple[Identity, ...]
    computation: Computation
    members: tuple[Instruction, ...]
    pieces: tuple[tuple[Instruction, ...], ...]
    overlap: Overlap
    default: BodyTimes


type StepTimes = Mapping[str, BodyTimes]
"""Times of the bodies of a step, by fingerprint."""


class Trace:
    """The executions of a traced step, by GPU and instruction.

    Attributes:
      steps: the number of traced steps.
    """

    def __init__(self, module: HloModule, gpus: Sequence[Sequence[Execution]]) -> None:
        self._module = module
        self._times = [by_instruction(module, found) for found in gpus]
        self.steps = max(steps_in(module, self._times[0]), 1)
        self._spans = [(min(e.start for e in found), max(e.end for e in found)) for found in gpus]

    @cached_property
    def step_seconds(self) -> float:
        """The mean time of a step on the GPUs."""
        return statistics.mean(end - start for start, end in self._spans) / self.steps

    def of(self, instruction: Instruction) -> float:
        """The median time of an instruction on all GPUs; 0 if it did not run."""
        found = [e.seconds for times in self._times for e in times.get(instruction, ())]
        return statistics.median(found) if found else 0.0

    def of_collective(self, instruction: Instruction) -> float:
        """The median time of a collective, from the arrival of the last GPU."""
        together = zip(*(times.get(instruction, ()) for times in self._times), strict=False)
        found = [min(e.seconds for e in each) for each in together]
        return statistics.median(found) if found else 0.0

    def whole(self, computation: Computation) -> float:
        """The time of one execution of a computation, without the loops inside."""
        inside = sum(self.of(i) for i in sequence_of(computation) if i.opcode in CONTROL_FLOW)
        if computation is self._module.entry:
            return self.step_seconds - inside
        callers = [
            i
            for c in self._module.schedule
            for i in sequence_of(c)
            if i.opcode in CONTROL_FLOW and computation in i.called
        ]
        found = [self.of(i) / max(counted_trips(i), 1) for i in callers if self.of(i)]
        return (statistics.mean(found) if found else 0.0) - inside


def bodies_of(module: HloModule, target: PlanTarget, trace: Trace, runs: Mapping[Computation, int]) -> tuple[Body, ...]:
    """The overlaps of a step whose collectives are worth tuning, the longest in a step first.

    Args:
      runs: how often a step runs each computation (`execution.executions`).
    """
    by_body: dict[str, dict[Computation, list[Instruction]]] = {}
    names = identities(module, target)
    said = {
        operators.fingerprint: operators.describe() for operators in tuned_collectives.bodies(module, target).values()
    }
    for instruction, (fingerprint, *_) in names.items():
        by_body.setdefault(fingerprint, {}).setdefault(instruction.computation, []).append(instruction)
    sms = describe(target.hardware, target.link, target.gpus_per_node).sms
    found = []
    for fingerprint, alike in by_body.items():
        computation = max(alike, key=lambda c: runs.get(c, 0))
        often = runs.get(computation, 0)
        total = sum(runs.get(c, 0) for c in alike)
        members = _worth_tuning(alike[computation], trace, total)
        if not members or not often or trace.whole(computation) <= 0.0:
            continue
        pieces = _pieces(computation, names, trace)
        kinds = tuple(one.kind for i in members if (one := find_collective(i)))
        overlap = Overlap(tuple(_volume(i) for i in members), (math.inf,) * len(pieces), sms, kinds)
        identity = tuple(names[i] for i in members)
        empty = BodyTimes((), (), 0.0)
        place = said[fingerprint], total, identity, computation, tuple(members), pieces
        body = Body(fingerprint, *place, overlap, empty)
        found.append(replace(body, default=times_of(body, trace)))
    return tuple(sorted(found, key=lambda b: (-b.runs * b.default.whole, b.fingerprint)))


def times_of(body: Body, trace: Trace) -> BodyTimes:
    """The times of a body in a trace."""
    tiny = 1e-9  # a piece that did not run in this trace
    return BodyTimes(
        tuple(max(trace.of_collective(i), tiny) for i in body.members),
        tuple(max(sum(map(trace.of, piece)), tiny) for piece in body.pieces),
        max(trace.whole(body.computation), tiny),
    )


def are_of(bodies: Sequence[Body], times: StepTimes) -> bool:
    """Whether recorded times have these overlaps, cut into as many parts. Another run may have cut them otherwise."""

    def parts(one: BodyTimes) -> tuple[int, int]:
        return len(one.collectives), len(one.computations)

    return all(b.fingerprint in times and parts(times[b.fingerprint]) == parts(b.default) for b in bodies)


def noise_of(bodies: Sequence[Body], again: StepTimes) -> float:
    """The relative noise of a body's time, from two traces with the same settings."""
    differences = [abs(math.log(again[body.fingerprint].whole / body.default.whole)) for body in bodies]
    shares = [body.runs * body.default.whole for body in bodies]
    mean = sum(d * s for d, s in zip(differences, shares, strict=True)) / sum(shares)
    return min(max(mean, LEAST_NOISE), MOST_NOISE)


def _worth_tuning(collectives: Sequence[Instruction], trace: Trace, runs: int) -> list[Instruction]:
    least = _SHARE * trace.step_seconds
    long = [i for i in collectives if runs * trace.of_collective(i) >= least]
    kept = set(sorted(long, key=lambda i: (-trace.of_collective(i), i.name))[:_MOST])
    return [i for i in collectives if i in kept]


def _pieces(
    computation: Computation, collectives: Mapping[Instruction, Identity], trace: Trace
) -> tuple[tuple[Instruction, ...], ...]:
    """What the body computes, cut into pieces of about the same time."""
    computing = [
        i
        for i in sequence_of(computation)
        if i.opcode not in CONTROL_FLOW and i not in collectives and not find_collective(i) and trace.of(i)
    ]
    whole = sum(map(trace.of, computing))
    pieces: list[list[Instruction]] = []
    done = 0.0
    for instruction in computing:
        if not pieces or done >= whole * len(pieces) / _PIECES:
            pieces.append([])
        pieces[-1].append(instruction)
        done += trace.of(instruction)
    return tuple(map(tuple, pieces)) or ((),)


def _volume(instruction: Instruction) -> float:
    """Bytes that a collective moves over a GPU's links."""
    collective = find_collective(instruction)
    assert collective is not None
    size = collective.group_size(2)
    rounds = 2 if collective.kind == "all-reduce" else 1
    return rounds * collective.size * (size - 1) / size
