"""What a scheduled module says about its step: what collectives lie under, what is exposed, what is copied.

Times are estimates: the schedule is played (`dhelix.passes.evaluation.timeline`) with the costs of a profile or of a
roofline, and nothing is measured. They are good for comparing two programs for one hardware, and for seeing where the
time goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dhelix.launch.inspecting.dumps import Memory
from dhelix.launch.timeline_plot import COMMUNICATION, COMPUTE, Bar, Picture, Window
from dhelix.launch.units import size_unit, time_unit
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.evaluation.costs import Costs, Lane, sequence_of, trip_count
from dhelix.passes.evaluation.timeline import CollectiveTime, Interval, Timeline, simulate_module
from dhelix.passes.hlo import Computation, HloModule, Instruction, shapes
from dhelix.profiles.hardware import Hardware

LARGE = 16 * 2**20  # bytes: copies of smaller buffers inside loops are not worth a line
_LANES = {Lane.COMPUTE: COMPUTE, Lane.COMM: COMMUNICATION, Lane.COMM_INTER: f"{COMMUNICATION} between nodes"}
_SHORT = {
    "all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A",
    "ragged-all-to-all": "RA2A", "collective-permute": "CP", "collective-broadcast": "CB",
}  # fmt: skip
_MOVES = frozenset("copy bitcast reshape transpose tuple get-tuple-element parameter".split())
_FILLS = frozenset("broadcast constant bitcast tuple parameter".split())


@dataclass(frozen=True)
class Place:
    """Where a computation runs: the loops around it, outermost first, and how often a step runs it."""

    loops: tuple[str, ...]
    executions: int


@dataclass(frozen=True)
class Under:
    """Something that computes while a collective runs; milliseconds of one execution of the collective."""

    instruction: str
    what: str
    ms: float


@dataclass(frozen=True)
class CollectiveReport:
    """One collective of the program. Milliseconds are of all its executions in a step.

    Attributes:
      bytes: of the whole buffer on one device: gathered, or before it is reduced.
      devices: how many take part.
      part: alpha, beta, forward, backward or other, as its name in the user's program says.
      alone_ms: what it would take with nothing beside it; `hidden_ms + exposed_ms` is what it takes.
    """

    instruction: str
    kind: str
    bytes: int
    devices: int
    part: str
    loops: tuple[str, ...]
    executions: int
    alone_ms: float
    hidden_ms: float
    exposed_ms: float
    under: tuple[Under, ...]


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
class Inspection:
    """A step as its schedule describes it. Milliseconds of a step, all of them estimates.

    Attributes:
      slow_down_ms: what compute loses by running beside collectives; contained in `compute_ms`.
      communication_alone_ms: what the collectives would take with nothing beside them.
      communication_ms: what they take, hidden and exposed.
      collectives: most exposed first.
      copies: longest first; only inside loops, only buffers of LARGE bytes or more.
      memory: of one device; None where nothing says.
      picture: the timeline; not in the JSON.
    """

    source: str
    module: str
    instructions: int
    cost_model: str
    hardware: str
    step_ms: float
    compute_ms: float
    slow_down_ms: float
    communication_alone_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    collectives: tuple[CollectiveReport, ...]
    copies: tuple[CopyReport, ...]
    memory: Memory | None
    notes: tuple[str, ...]
    picture: Picture = dataclasses.field(repr=False, compare=False)

    @property
    def hidden_share(self) -> float:
        return self.hidden_ms / self.communication_ms if self.communication_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the picture, as JSON holds it."""
        fields = dataclasses.asdict(dataclasses.replace(self, picture=Picture("", "", ())))
        del fields["picture"]
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
) -> Inspection:
    """Plays a scheduled module and says what it shows.

    Args:
      costs: of its instructions.
      cost_model: where these come from, for people to read.
      source: where the module comes from, for people to read.
      title: of the picture; by default the module's name.
    """
    hardware = costs.hardware
    timeline = simulate_module(module, hardware, costs)
    places = dict(_places(module))
    instructions = {i.name: i for computation in places for i in computation.instructions}
    parts = {i.name: part for computation in places for i, part in _parts(computation)}
    reports = [_collective(c, instructions, parts, places, hardware) for c in timeline.collectives]
    inspection = Inspection(
        source=source or module.name,
        module=module.name,
        instructions=module.instruction_count,
        cost_model=cost_model,
        hardware=hardware.name,
        step_ms=1e3 * timeline.seconds,
        compute_ms=1e3 * timeline.compute,
        slow_down_ms=1e3 * timeline.slow_down,
        communication_alone_ms=sum(r.alone_ms for r in reports),
        communication_ms=1e3 * timeline.communication,
        hidden_ms=1e3 * timeline.hidden,
        exposed_ms=1e3 * timeline.exposed,
        collectives=tuple(sorted(reports, key=lambda r: (-r.exposed_ms, -r.hidden_ms, r.instruction))),
        copies=_copies(places, costs),
        memory=memory,
        notes=notes,
        picture=Picture("", "", ()),
    )
    copied = {copy.instruction for copy in inspection.copies}
    picture = Picture(
        title or module.name,
        _summary(inspection),
        tuple(_bars(timeline, instructions, parts, copied)),
        tuple(_windows(timeline, parts, 0.0)),
    )
    return dataclasses.replace(inspection, picture=picture)


def part_of(instruction: Instruction) -> str:
    """alpha or beta for the strand that the operator's name carries; else forward, backward or other.

    A fusion without a name of its own, or with one that tells nothing, is taken for what is inside.
    """
    for name in _op_names(instruction):
        for strand in ("alpha", "beta"):
            if f"strand_{strand}" in name:
                return strand
        if "jvp(" in name:
            return "backward" if "transpose(" in name else "forward"
    return "other"


def _parts(computation: Computation) -> Iterator[tuple[Instruction, str]]:
    """The part of each instruction; one that tells none is taken for what all others are, if they agree."""
    parts = [(instruction, part_of(instruction)) for instruction in computation.instructions]
    told = {part for _, part in parts} - {"other"}
    default = told.pop() if len(told) == 1 and computation is not computation.module.entry else "other"
    return ((instruction, default if part == "other" else part) for instruction, part in parts)


def describe(instruction: Instruction) -> str:
    """A word for people: all-gather, GEMM, attention, copy, or the operation in the user's program."""
    collective = find_collective(instruction)
    if collective is not None:
        return collective.kind
    inner = [instruction, *(i for called in _called(instruction) for i in called.instructions)]
    targets = " ".join(i.proto.custom_call_target for i in inner)
    if any(i.opcode == "dot" for i in inner) or "matmul" in targets or "gemm" in targets:
        return "GEMM"
    if "fmha" in targets or "cudnn" in targets:
        return "attention"
    if _moves(instruction) is not None:
        return str(_moves(instruction))
    return next(_op_names(instruction), instruction.opcode).rpartition("/")[2].removesuffix("-start")


def _called(instruction: Instruction) -> Iterator[Computation]:
    """Computations of which the instruction is one kernel, fusions inside async wrappers included."""
    if instruction.opcode in ("fusion", "async-start"):
        for called in instruction.called:
            yield called
            yield from (c for i in called.instructions for c in _called(i))


def _op_names(instruction: Instruction) -> Iterator[str]:
    """Names in the user's program: of the instruction, then of what it fuses, results first."""
    if instruction.op_name:
        yield instruction.op_name
    for called in _called(instruction):
        yield from (inner.op_name for inner in reversed(called.instructions) if inner.op_name)


def _places(module: HloModule) -> Iterator[tuple[Computation, Place]]:
    """Computations whose instructions are kernels of the step: the entry and what loops and calls lead to."""
    waiting = [(module.entry, Place((), 1))]
    while waiting:
        computation, place = waiting.pop()
        yield computation, place
        for instruction in sequence_of(computation):
            if instruction.opcode == "while":
                count = trip_count(instruction) or 1
                inner = Place((*place.loops, instruction.name), place.executions * count)
                waiting.append((instruction.called[0], inner))
            elif instruction.opcode in ("call", "conditional"):
                waiting.extend((called, place) for called in instruction.called)


def _collective(
    time: CollectiveTime,
    instructions: dict[str, Instruction],
    parts: dict[str, str],
    places: dict[Computation, Place],
    hardware: Hardware,
) -> CollectiveReport:
    instruction = instructions[time.instruction]
    collective = find_collective(instruction)
    assert collective is not None  # the timeline says it communicates
    under = tuple(Under(n, describe(instructions[n]), 1e3 * s / time.count) for n, s in time.under)
    return CollectiveReport(
        instruction=instruction.name,
        kind=collective.kind,
        bytes=collective.size,
        devices=collective.group_size(default=hardware.gpus_per_node),
        part=parts[instruction.name],
        loops=places[instruction.computation].loops,
        executions=time.count,
        alone_ms=1e3 * time.alone,
        hidden_ms=1e3 * time.hidden,
        exposed_ms=1e3 * time.exposed,
        under=under,
    )


def _moves(instruction: Instruction) -> str | None:
    """`copy` or `fill` for an instruction that only moves or writes whole buffers, else None."""
    if instruction.opcode in ("copy", "copy-start"):
        return "copy"
    called = list(_called(instruction))
    opcodes = {i.opcode for c in called for i in c.instructions} - {"fusion"}
    if not opcodes:
        return None
    if "broadcast" in opcodes and opcodes <= _FILLS:
        return "fill"
    return "copy" if opcodes & {"copy", "transpose"} and opcodes <= _MOVES else None


def _copies(places: dict[Computation, Place], costs: Costs) -> tuple[CopyReport, ...]:
    found = []
    for computation, place in places.items():
        for instruction in computation.instructions if place.loops else ():
            kind = _moves(instruction)
            size = shapes.byte_size(instruction.shape)
            if kind is None or size < LARGE:
                continue
            total = 1e3 * place.executions * costs[instruction].seconds
            shape = shapes.text(instruction.shape)
            found.append(CopyReport(instruction.name, kind, shape, size, place.loops, place.executions, total))
    return tuple(sorted(found, key=lambda c: (-c.total_ms, c.instruction)))


def _bars(
    timeline: Timeline, instructions: dict[str, Instruction], parts: dict[str, str], copied: set[str]
) -> Iterator[Bar]:
    words: dict[str, str] = {}
    for interval, start in _expanded(timeline, 0.0):
        name = interval.instruction
        if name not in words:
            words[name] = describe(instructions[name])
        what, key = words[name], "copy" if name in copied else parts[name]
        end = start + interval.end - interval.start
        yield Bar(1e3 * start, 1e3 * end, _LANES[interval.lane], key, what, name, _SHORT.get(what, ""))


def _expanded(timeline: Timeline, offset: float) -> Iterator[tuple[Interval, float]]:
    """Every interval with its start in the step, loops played as often as they run."""
    for interval in timeline.intervals:
        start = offset + interval.start
        if interval.body is None:
            yield interval, start
            continue
        for iteration in range(interval.count):
            yield from _expanded(interval.body, start + iteration * interval.body.seconds)


def _windows(timeline: Timeline, parts: dict[str, str], offset: float) -> Iterator[Window]:
    """One iteration, out of the middle, of each innermost loop that communicates where most time is spent."""
    loops = [(i, i.body) for i in timeline.intervals if i.body is not None and i.body.collectives]
    if not loops:
        return
    longest, body = max(loops, key=lambda pair: pair[0].end - pair[0].start)
    inside = list(_windows(body, parts, offset + longest.start + longest.count // 2 * body.seconds))
    if inside:
        yield from inside
        return
    for loop, body in loops:
        if loop.end - loop.start > 0.1 * (longest.end - longest.start):
            start = offset + loop.start + loop.count // 2 * body.seconds
            title = f"{_what_runs(body, parts)}: {1e3 * body.seconds:.2f} ms"
            yield Window(1e3 * start, 1e3 * (start + body.seconds), title)


def _what_runs(body: Timeline, parts: dict[str, str]) -> str:
    found = {parts[c.instruction] for c in body.collectives}
    if {"alpha", "beta"} <= found or {"forward", "backward"} <= found:
        return "one iteration: forward of one strand, backward of the other"
    directions = [word for word in ("forward", "backward") if word in found]
    return f"one iteration, {directions[0]}" if directions else "one iteration"


def _summary(inspection: Inspection) -> str:
    unit = time_unit([inspection.step_ms])
    words = [
        f"estimate: step {unit.text(inspection.step_ms)}",
        f"exposed communication {unit.text(inspection.exposed_ms)}",
    ]
    if inspection.memory is not None:
        peak = inspection.memory.peak
        words.append(f"peak memory {size_unit([peak]).text(peak)}")
    return "  ·  ".join(words)
