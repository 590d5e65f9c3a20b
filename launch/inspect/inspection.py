"""Analyses a scheduled module: what runs under each collective, what is exposed, and what is copied.

Times are estimates. `dhelix.passes.evaluation.timeline` simulates the schedule with the costs of a profile or of a
roofline, and nothing is measured. The estimates serve to compare two programs for the same hardware, and to see what
takes the most time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dhelix.launch.inspect.answers.answers import Answers, answer
from dhelix.launch.inspect.reading.dumps import Memory
from dhelix.launch.shown.instruction_words import (
    Place,
    Words,
    bytes_moved,
    communicates,
    parts_of,
    place_notes,
    places_of,
)
from dhelix.passes.analysis.collectives import Collective, NamedMesh, is_start, named_mesh
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.custom_calls import calls_of, family_of
from dhelix.passes.evaluation.intervals import CollectiveTime, Timeline
from dhelix.passes.evaluation.roofline_costs import made_synchronous
from dhelix.passes.evaluation.step_parts import moved, step_parts
from dhelix.passes.evaluation.step_time import executed
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.profiles.hardware import Hardware

LARGE = 16 * 2**20  # bytes; copies of smaller buffers are not reported


@dataclass(frozen=True)
class Under:
    """An operator that overlaps with a collective. `ms` is the time of overlap in one execution of the collective."""

    instruction: str
    what: str
    ms: float


@dataclass(frozen=True)
class CollectiveReport:
    """A collective, a message or a host transfer of the program. Times are sums over all its executions in a step.

    Attributes:
      kind: HLO's name of the collective; `send`, `recv` or `send/recv`; `copy to host` or `copy from host`.
      bytes: size of the whole buffer on one device: after a gather, or before a reduction. If XLA combined several
        collectives, this is the sum of their sizes.
      devices: number of devices in the largest group.
      axes: the mesh axes that the groups run over, outermost first. Empty for messages, or if the axes are unknown.
      groups: number of groups that communicate at the same time. In a permute or a message, a group is a pair.
      part: alpha, beta, forward, backward or other, according to the op name.
      executions: number of executions in a step; 0 if the estimate leaves the collective out, as `notes` say.
      alone_ms: time without overlap. The time with overlap is `hidden_ms + exposed_ms`.
      notes: remarks for the user, for example on an unknown trip count or number of devices.
    """

    instruction: str
    kind: str
    bytes: int
    devices: int
    axes: tuple[str, ...]
    groups: int
    part: str
    loops: tuple[str, ...]
    executions: int
    alone_ms: float
    hidden_ms: float
    exposed_ms: float
    under: tuple[Under, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnknownKernel:
    """All custom calls with one target that the cost model does not know. Times follow from the bytes that they move.

    Attributes:
      instructions: number of these custom calls in the program.
      executions: number of executions in a step, of all these custom calls together.
      bytes: number of bytes that all executions read and write.
    """

    target: str
    family: str
    instructions: int
    executions: int
    bytes: float
    total_ms: float


@dataclass(frozen=True)
class CopyReport:
    """A large buffer that is copied, or filled with a constant, in every iteration of a loop."""

    instruction: str
    kind: str  # copy or fill
    shape: str
    bytes: int
    loops: tuple[str, ...]
    executions: int
    total_ms: float


@dataclass(frozen=True)
class Ran:
    """The timeline of a step, and what is known of its instructions, by their names.

    Attributes:
      parts: alpha, beta, forward, backward or other.
      overlaps: whether the device can run collectives and compute at once.
    """

    timeline: Timeline
    instructions: Mapping[str, Instruction]
    parts: Mapping[str, str]
    words: Words
    overlaps: bool


@dataclass(frozen=True)
class Inspection:
    """The analysis of a step. All times are estimates for one step, in milliseconds.

    Attributes:
      slow_down_ms: time that compute loses because collectives run at the same time. `compute_ms` includes this time.
      idle_ms: pauses between kernels. `step_ms` is the sum `compute_ms + exposed_ms + idle_ms`.
      communication_alone_ms: time that the collectives would take without overlap.
      communication_ms: time that the collectives take in the step, hidden and exposed.
      host_ms: the part of `communication_ms` that is spent on transfers to and from the host's memory.
      collectives: collectives, messages and host transfers, most exposed first.
      unknown: unknown custom calls, longest total time first.
      copies: buffers of at least LARGE bytes that are copied or filled inside loops, longest total time first.
      memory: memory of one device; None if unknown.
      parts: the parts of the step's time; not in the JSON.
      answers: where time and memory go.
      title: of the picture; not in the JSON.
      ran: what a picture shows; not in the JSON.
    """

    source: str
    module: str
    instructions: int
    cost_model: str
    hardware: str
    step_ms: float
    compute_ms: float
    slow_down_ms: float
    idle_ms: float
    communication_alone_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    host_ms: float
    collectives: tuple[CollectiveReport, ...]
    unknown: tuple[UnknownKernel, ...]
    copies: tuple[CopyReport, ...]
    memory: Memory | None
    notes: tuple[str, ...]
    parts: StepParts = dataclasses.field(repr=False, compare=False)
    answers: Answers = dataclasses.field(repr=False, compare=False)
    title: str = dataclasses.field(repr=False, compare=False)
    ran: Ran = dataclasses.field(repr=False, compare=False)

    @property
    def hidden_share(self) -> float:
        return self.hidden_ms / self.communication_ms if self.communication_ms else 1.0

    @property
    def unknown_kernels(self) -> int:
        """Number of instructions that are unknown custom calls."""
        return sum(u.instructions for u in self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the picture and the parts, as JSON values."""
        without: Any = {"ran": None}  # asdict would copy the program
        fields = dataclasses.asdict(dataclasses.replace(self, **without))
        del fields["title"], fields["ran"], fields["parts"], fields["answers"]["words"]
        used = self.answers.utilization
        fields["answers"]["utilization"] |= {"mfu": used.mfu, "hfu": used.hfu}
        fields["unknown_kernels"] = self.unknown_kernels
        if self.memory is not None:
            fields["memory"]["peak"] = self.memory.peak
        return {"estimated": True, **fields}


def inspect_module(
    module: HloModule,
    costs: Costs,
    cost_model: str = "roofline",
    memory: Memory | None = None,
    source: str = "",
    title: str = "",
    notes: tuple[str, ...] = (),
    overlaps: bool = True,
) -> Inspection:
    """Simulates a scheduled module and analyses the timeline.

    Args:
      costs: costs of the module's instructions.
      cost_model: words that say where the costs come from.
      source: words that say where the module comes from.
      title: title of a picture; default: the module's name.
      overlaps: whether the device can run collectives and compute at once. If not, as on CPUs, a picture says so.
    """
    hardware = costs.hardware
    timeline = simulate_module(module, hardware, costs)
    places = dict(places_of(module))
    instructions = {i.name: i for computation in places for i in computation.instructions}
    parts = {i.name: part for computation in places for i, part in parts_of(computation)}
    words, ran = Words(), list(executed(module, costs))
    known = parts, places, hardware, instructions, named_mesh(module), words
    reports = [_collective(instructions[c.instruction], c, *known) for c in timeline.collectives]
    seen = {c.instruction for c in timeline.collectives}
    reports += [
        _collective(i, None, *known)
        for computation in places
        for i in sequence_of(computation)
        if i.name not in seen and communicates(i) is not None
    ]
    return Inspection(
        source=source or module.name,
        module=module.name,
        instructions=module.instruction_count,
        cost_model=cost_model,
        hardware=hardware.name,
        step_ms=1e3 * timeline.seconds,
        compute_ms=1e3 * timeline.compute,
        slow_down_ms=1e3 * timeline.slow_down,
        idle_ms=1e3 * timeline.idle,
        communication_alone_ms=sum(r.alone_ms for r in reports),
        communication_ms=1e3 * timeline.communication,
        hidden_ms=1e3 * timeline.hidden,
        exposed_ms=1e3 * timeline.exposed,
        host_ms=sum(r.hidden_ms + r.exposed_ms for r in reports if r.kind.endswith("host")),
        collectives=tuple(sorted(reports, key=lambda r: (-r.exposed_ms, -r.hidden_ms, r.instruction))),
        unknown=_unknown(places, costs),
        copies=_copies(places, costs),
        memory=memory,
        notes=(*notes, *place_notes(places)),
        parts=step_parts(module, costs, played=timeline, ran=ran),
        answers=answer(module, costs, timeline, ran, words),
        title=title or fingerprint.unmark(module.name),
        ran=Ran(timeline, instructions, parts, words, overlaps),
    )


def _collective(
    instruction: Instruction,
    time: CollectiveTime | None,
    parts: dict[str, str],
    places: dict[Computation, Place],
    hardware: Hardware,
    instructions: dict[str, Instruction],
    mesh: NamedMesh | None,
    words: Words,
) -> CollectiveReport:
    """The report on the collective that `instruction` starts.

    Args:
      time: the collective's time; None if the simulation does not run the collective. Then a conditional has a longer
        branch, or the loop has no iterations.
    """
    found = communicates(instruction)
    assert found is not None  # callers pass only instructions that communicate
    together = (found, *found.others) if isinstance(found, Collective) else (found,)
    place, notes = places[instruction.computation], ()
    count, under = 0, ()
    if time is None:
        why = "the other branch takes longer" if place.executions else "its loop does not run"
        notes = (f"not in the estimate: {why}",)
    else:
        count = time.count
        under = tuple(Under(n, words[instructions[n]], 1e3 * s / count) for n, s in time.under)
    if is_start(instruction) and made_synchronous(instruction):
        notes = (*notes, "XLA made it synchronous (`is_sync`): compute waits for it from its start")
    if len(together) > 1:
        notes = (*notes, "together: " + ", ".join(f"{t.kind} of {t.size} bytes" for t in together))
    if not found.groups and not getattr(found, "host", False):
        notes = (*notes, f"the module does not say how many devices it has: {hardware.gpus_per_node} assumed")
    return CollectiveReport(
        instruction=instruction.name,
        kind=found.kind,
        bytes=bytes_moved(found),
        devices=found.group_size(default=hardware.gpus_per_node),
        axes=mesh.over(found) if mesh and isinstance(found, Collective) else (),
        groups=max(len(found.groups), 1),
        part=parts[instruction.name],
        loops=place.loops,
        executions=count,
        alone_ms=1e3 * time.alone if time else 0.0,
        hidden_ms=1e3 * time.hidden if time else 0.0,
        exposed_ms=1e3 * time.exposed if time else 0.0,
        under=under,
        notes=(*place.notes, *notes),
    )


def _unknown(places: dict[Computation, Place], costs: Costs) -> tuple[UnknownKernel, ...]:
    """The unknown custom calls of a step, one entry for each target."""
    found: dict[str, UnknownKernel] = {}
    for computation, place in places.items():
        for instruction in sequence_of(computation):
            calls = [call for call in calls_of(instruction) if family_of(call).work == "unknown"]
            if not calls or communicates(instruction) is not None:
                continue
            target, family = calls[0].proto.custom_call_target, family_of(calls[0]).name
            known, cost = found.get(target, UnknownKernel(target, family, 0, 0, 0.0, 0.0)), costs[instruction]
            found[target] = dataclasses.replace(
                known,
                instructions=known.instructions + 1,
                executions=known.executions + place.executions,
                bytes=known.bytes + place.executions * cost.bytes,
                total_ms=known.total_ms + 1e3 * place.executions * cost.seconds,
            )
    return tuple(sorted(found.values(), key=lambda u: (-u.total_ms, u.target)))


def _copies(places: dict[Computation, Place], costs: Costs) -> tuple[CopyReport, ...]:
    found = []
    for computation, place in places.items():
        for instruction in computation.instructions if place.loops else ():
            kind = moved(instruction)
            size = shapes.byte_size(instruction.shape)
            if kind is None or size < LARGE:
                continue
            total = 1e3 * place.executions * costs[instruction].seconds
            shape = shapes.text(instruction.shape)
            found.append(CopyReport(instruction.name, kind, shape, size, place.loops, place.executions, total))
    return tuple(sorted(found, key=lambda c: (-c.total_ms, c.instruction)))


def unknown_text(inspection: Inspection) -> str:
    """The number of unknown custom calls in words; "" if there are none."""
    count = inspection.unknown_kernels
    if not count:
        return ""
    kernels = "1 kernel is an unknown custom call" if count == 1 else f"{count} kernels are unknown custom calls"
    return f"{kernels}, counted by the bytes {'it moves' if count == 1 else 'they move'}"
