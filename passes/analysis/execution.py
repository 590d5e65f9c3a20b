"""Walks the instructions that a program executes, through loops, calls and branches, with execution counts.

    for instruction, visit in instructions(module.entry): ...    in execution order; each runs visit.count times
    for visit in visits(module.entry): ...                       each place at which a computation runs
    for visit in places(module): ...                             each computation that runs, once
    for start in collective_launches(module.entry): ...          each launch of a collective, loops unrolled
    executions(module)                                           how often a step runs each computation in total

Of a loop, only the body is visited. The condition is not visited, because XLA runs loops of known trip count without
their conditions. A loop of unknown trip count counts as one iteration. All branches of a conditional are visited, as if
each ran. The computations of fusions, reductions and async pairs are not visited, because each of these instructions is
one kernel.

Other modules have walks of their own: the simulated clock (`passes/evaluation/timeline.py`), live memory
(`buffers.py`), all called computations whether or not they run (`hlo/graph.py`), digests of the collective order
(`passes/framework/fingerprint.py`), and matching a trace with the program
(`runtime/profiling/traces/module_executions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dhelix.passes.analysis.collectives import find_collective, is_done
from dhelix.passes.analysis.configuration import backend_config
from dhelix.passes.analysis.names import expected_trips
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.hlo.loops import proved_trip_count

type Into = Callable[[Instruction], Sequence[Computation]]


@dataclass(frozen=True)
class Visit:
    """A place at which a computation runs.

    Attributes:
      count: how often a step runs the computation at this place.
      through: the loops, calls and conditionals that lead to this place, outermost first.
    """

    computation: Computation
    count: int = 1
    through: tuple[Instruction, ...] = ()


def sequence_of(computation: Computation) -> list[Instruction]:
    """The instructions in execution order: the schedule, or module order if there is none."""
    return computation.module.schedule.get(computation, computation.instructions)


def trip_count(loop: Instruction) -> int | None:
    """Trip count of a `while`, as XLA noted it or as constants prove it; None if unknown."""
    known = backend_config(loop).get("known_trip_count")
    if known is not None:
        return int(known["n"])
    return proved_trip_count(loop)


def supposed_trips(loop: Instruction) -> int | None:
    """Trip count of a `while`. If it depends on data, what its author expects (`names.expected_trips`), or None."""
    count = trip_count(loop)
    return expected_trips(loop) if count is None else count


def counted_trips(control: Instruction) -> int:
    """How often a `while`, a call or a conditional runs its callees. An unknown trip count is taken as 1."""
    count = supposed_trips(control) if control.opcode == "while" else 1
    return 1 if count is None else count


def entered(control: Instruction) -> Sequence[Computation]:
    """The computations that are visited: a loop's body, the callee of a call, all branches of a conditional."""
    return control.called[:1] if control.opcode == "while" else control.called


def visits(entry: Computation, into: Into = entered, visit: Visit | None = None) -> Iterator[Visit]:
    """Places at which computations run, callers first.

    Args:
      entry: where the walk begins.
      into: returns the computations to visit for a loop, a call or a conditional.
      visit: the place of `entry`, if it is not the program's start.
    """
    visit = visit or Visit(entry)
    yield visit
    for instruction in sequence_of(visit.computation):
        for inner in _inside(instruction, into, visit):
            yield from visits(inner.computation, into, inner)


def instructions(
    entry: Computation, into: Into = entered, visit: Visit | None = None
) -> Iterator[tuple[Instruction, Visit]]:
    """Instructions in execution order, each with its place. Control flow comes before the instructions that it runs."""
    visit = visit or Visit(entry)
    for instruction in sequence_of(visit.computation):
        yield instruction, visit
        for inner in _inside(instruction, into, visit):
            yield from instructions(inner.computation, into, inner)


def _inside(instruction: Instruction, into: Into, visit: Visit) -> Iterator[Visit]:
    if instruction.opcode in CONTROL_FLOW:
        count, through = visit.count * counted_trips(instruction), (*visit.through, instruction)
        for called in into(instruction):
            yield Visit(called, count, through)


def collective_launches(computation: Computation) -> Iterator[Instruction]:
    """The collectives of a computation in the order of their launches, each as often as it is launched.

    A loop of unknown trip count is entered once. Of a conditional, only the first branch is entered.
    """
    for instruction in sequence_of(computation):
        if instruction.opcode in CONTROL_FLOW:
            for _ in range(counted_trips(instruction)):
                for inner in entered(instruction)[:1]:
                    yield from collective_launches(inner)
        elif not is_done(instruction) and find_collective(instruction) is not None:
            yield instruction


def once(into: Into = entered) -> Into:
    """An `into` for walks that visit each computation only once, at its first place."""
    seen: set[Computation] = set()

    def fresh(control: Instruction) -> list[Computation]:
        found = [called for called in dict.fromkeys(into(control)) if called not in seen]
        seen.update(found)
        return found

    return fresh


def places(module: HloModule, into: Into = entered) -> Iterator[Visit]:
    """Each computation that a step runs, at the first place at which it runs. Its count is the sum over all places.

    Takes time linear in the module's size, even if many places call one computation.
    """
    runs = executions(module, into)
    for visit in visits(module.entry, once(into)):
        yield replace(visit, count=runs[visit.computation])


def executions(module: HloModule, into: Into = entered) -> dict[Computation, int]:
    """How often a step runs each computation.

    Takes time linear in the module's size, even if many places call one computation.
    """
    runs = {module.entry: 1}
    for computation in reversed(module.computations):  # callers first
        for instruction in sequence_of(computation) if computation in runs else ():
            if instruction.opcode in CONTROL_FLOW:
                for called in into(instruction):
                    runs[called] = runs.get(called, 0) + runs[computation] * counted_trips(instruction)
    return runs
