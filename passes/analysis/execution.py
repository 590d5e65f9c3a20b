"""What a program executes, and how often: the one walk through loops, calls and branches.

    for instruction, visit in instructions(module.entry): ...    in the order in which they run, visit.count times
    for visit in visits(module.entry): ...                       each place at which a computation runs
    executions(module)                                           how often a step runs each computation, altogether

A loop runs its body; its condition does not count, since XLA runs loops of a known length without it. A loop whose
length nobody knows counts once. Of a conditional all branches are visited, as if each ran. Fusions, reductions and what
is inside of an asynchronous pair are no computations of their own here: each is one kernel of its caller.

Walks for other questions stand where the question is: the timeline plays a clock (`passes/evaluation/timeline.py`),
memory asks what lives at once (`buffers.py`), `hlo/graph.py` walks all that is called whether or not it runs, the
fingerprint of the collective order keeps digests (`passes/framework/fingerprint.py`), and a trace is matched with what
ran (`runtime/profiling/traces/module_executions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.configuration import backend_config
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.hlo.loops import proved_trip_count

type Into = Callable[[Instruction], Sequence[Computation]]


@dataclass(frozen=True)
class Visit:
    """A place at which a computation runs.

    Attributes:
      count: how often a step comes there.
      through: the loops, calls and conditionals that lead to it, the outermost first.
    """

    computation: Computation
    count: int = 1
    through: tuple[Instruction, ...] = ()


def sequence_of(computation: Computation) -> list[Instruction]:
    """The order in which a computation runs: its schedule, or where it has none, as it stands."""
    return computation.module.schedule.get(computation, computation.instructions)


def trip_count(loop: Instruction) -> int | None:
    """How often the body of a `while` runs: as the compiler noted it, or proved from constants; else None."""
    known = backend_config(loop).get("known_trip_count")
    if known is not None:
        return int(known["n"])
    return proved_trip_count(loop)


def counted_trips(control: Instruction) -> int:
    """How often what a `while`, a call or a conditional leads to counts: once where nobody knows."""
    count = trip_count(control) if control.opcode == "while" else 1
    return 1 if count is None else count


def entered(control: Instruction) -> Sequence[Computation]:
    """What a loop, a call or a conditional runs: the body, what is called, the branches."""
    return control.called[:1] if control.opcode == "while" else control.called


def visits(entry: Computation, into: Into = entered, visit: Visit | None = None) -> Iterator[Visit]:
    """Places at which computations run, callers first.

    `into`: which computations a loop, a call or a conditional leads to.
    """
    visit = visit or Visit(entry)
    yield visit
    for instruction in sequence_of(visit.computation):
        for inner in _inside(instruction, into, visit):
            yield from visits(inner.computation, into, inner)


def instructions(
    entry: Computation, into: Into = entered, visit: Visit | None = None
) -> Iterator[tuple[Instruction, Visit]]:
    """What runs, in the order in which it does; loops, calls and conditionals before what they lead to."""
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


def once(into: Into = entered) -> Into:
    """For walks that come to each computation only once, at the first of its places."""
    seen: set[Computation] = set()

    def fresh(control: Instruction) -> list[Computation]:
        found = [called for called in dict.fromkeys(into(control)) if called not in seen]
        seen.update(found)
        return found

    return fresh


def executions(module: HloModule) -> dict[Computation, int]:
    """How often a step runs each computation. Linear, also where many places call the same."""
    runs = {module.entry: 1}
    for computation in reversed(module.computations):  # callers first
        for instruction in sequence_of(computation) if computation in runs else ():
            if instruction.opcode in CONTROL_FLOW:
                for called in entered(instruction):
                    runs[called] = runs.get(called, 0) + runs[computation] * counted_trips(instruction)
    return runs
