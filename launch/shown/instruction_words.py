"""Describes the instructions of a scheduled step: what they do, in which part of the step, and in which loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import Collective, find_collective
from dhelix.passes.analysis.execution import places, sequence_of, supposed_trips
from dhelix.passes.evaluation.custom_calls import calls_of, family_of
from dhelix.passes.evaluation.step_parts import kernel_of, moved
from dhelix.passes.evaluation.transfers import Transfer, find_transfer
from dhelix.passes.hlo import Computation, HloModule, Instruction


@dataclass(frozen=True)
class Place:
    """Where a computation runs, and how often.

    Attributes:
      loops: names of the loops around the computation, outermost first.
      executions: how often one step runs the computation.
      notes: reasons why `executions` is uncertain.
    """

    loops: tuple[str, ...]
    executions: int
    notes: tuple[str, ...] = ()


def part_of(instruction: Instruction) -> str:
    """The part of the step that an instruction belongs to: alpha, beta, forward, backward or other.

    The part follows from the op name. If a fusion's own op name does not tell the part, the op names of the fused
    instructions do.
    """
    for name in _op_names(instruction):
        for strand in ("alpha", "beta"):
            if f"strand_{strand}" in name:
                return strand
        if "jvp(" in name:
            return "backward" if "transpose(" in name else "forward"
    return "other"


def parts_of(computation: Computation) -> Iterator[tuple[Instruction, str]]:
    """Each instruction of a computation with its part of the step.

    Instructions whose own part is "other" get the part of the remaining instructions, if these all belong to one part.
    This rule does not apply to the entry computation.
    """
    parts = [(instruction, part_of(instruction)) for instruction in computation.instructions]
    told = {part for _, part in parts} - {"other"}
    default = told.pop() if len(told) == 1 and computation is not computation.module.entry else "other"
    return ((instruction, default if part == "other" else part) for instruction, part in parts)


def describe(instruction: Instruction) -> str:
    """A word for what an instruction does, such as all-gather, GEMM or copy.

    For other instructions, it is the last part of the op name, which comes from the user's program.
    """
    sent = communicates(instruction)
    if sent is not None:
        return sent.kind
    inner = [instruction, *(i for called in kernel_of(instruction) for i in called.instructions)]
    families = [family_of(call) for call in calls_of(instruction)]
    if any(i.opcode == "dot" for i in inner) or any(f.name == "GEMM" for f in families):
        return "GEMM"
    if any(f.work.startswith("attention") for f in families):
        return "attention"
    if moved(instruction) is not None:
        return str(moved(instruction))
    named = next(_op_names(instruction), "").rpartition("/")[2]
    return (named or next((f.name for f in families), instruction.opcode)).removesuffix("-start")


class Words(dict[Instruction, str]):
    """Maps instructions to their words (`describe`), each made at its first lookup."""

    def __missing__(self, instruction: Instruction) -> str:
        self[instruction] = word = describe(instruction)
        return word


def communicates(instruction: Instruction) -> Collective | Transfer | None:
    """The collective, message or host transfer that an instruction starts, or None."""
    return find_collective(instruction) or find_transfer(instruction)


def bytes_moved(found: Collective | Transfer) -> int:
    """The number of bytes that `found` moves. If XLA combined several collectives, this is their sum."""
    return found.size + sum(other.size for other in getattr(found, "others", ()))


def _op_names(instruction: Instruction) -> Iterator[str]:
    """Yields op names, which come from the user's program.

    The instruction's own op name comes first. The op names of fused instructions follow, results before operands.
    """
    if instruction.op_name:
        yield instruction.op_name
    for called in kernel_of(instruction):
        yield from (inner.op_name for inner in reversed(called.instructions) if inner.op_name)


def places_of(module: HloModule) -> Iterator[tuple[Computation, Place]]:
    """Yields the computations whose instructions the step launches as kernels, and their places.

    These are the entry computation, and all computations that control flow calls. A computation that is called from
    several places has the loops of the first one, and the executions of all.
    """
    for visit in places(module):
        loops = [control for control in visit.through if control.opcode == "while"]
        notes = (_unsure(control) for control in visit.through)
        yield visit.computation, Place(tuple(loop.name for loop in loops), visit.count, tuple(filter(None, notes)))


def _unsure(control: Instruction) -> str:
    """Why it is uncertain how often a loop or conditional runs its computations; "" if it is certain."""
    if control.opcode == "conditional":
        return f"it runs in one of {len(control.called)} branches of {control.name}"
    if control.opcode == "while" and supposed_trips(control) is None:
        return f"the number of runs of {control.name} is unknown: it counts once"
    return ""


def place_notes(places: dict[Computation, Place]) -> Iterator[str]:
    """Yields sentences about loops and conditionals whose estimated times are uncertain."""
    control = [i for computation in places for i in sequence_of(computation)]
    loops = [i for i in control if i.opcode == "while"]
    if unknown := [i.name for i in loops if supposed_trips(i) is None]:
        yield f"the trip count of {_listed(unknown)} depends on data: each body counts once"
    if asking := [i.name for i in loops if any(map(communicates, i.called[1].instructions))]:
        yield f"the conditions of {_listed(asking)} communicate, which is not counted"
    choices = [i.name for i in control if i.opcode == "conditional"]
    if choices:
        yield f"in every execution of {_listed(choices)} the longest branch counts"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
