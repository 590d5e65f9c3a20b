"""Splits a scheduled step's time into compute, copies, slow-down, exposed communication and pauses.

    parts = step_parts(module, CostModel.find("H200").costs())
    parts.seconds, parts.exposed    # seconds of the step, and of its exposed communication

The parts come from a simulation of the schedule (`timeline.py`). They let a reader compare two steps part by part.
"""

from collections.abc import Iterator, Sequence

from dhelix.passes.analysis.collectives import find_collective, named_mesh
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_time import executed, predict
from dhelix.passes.evaluation.timeline import guessed_overlap, simulate_module
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.framework.units import bytes_text
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.profiles.estimates.estimator import Source

_MOVES = frozenset("copy bitcast reshape transpose tuple get-tuple-element parameter".split())
_NAMED = 3  # number of collectives that a report names
_FILLS = frozenset("broadcast constant bitcast tuple parameter".split())


def step_parts(
    module: HloModule,
    costs: Costs,
    memory: int = 0,
    played: Timeline | None = None,
    ran: Sequence[tuple[Instruction, int]] | None = None,
) -> StepParts:
    """Splits the time of a scheduled module into parts, at the step's own clock (`timeline.settled`).

    Args:
      memory: peak memory in bytes, arguments included; 0 if unknown.
      played: the module's timeline, if the caller already has it (`simulate_module`).
      ran: what the step runs, if the caller already knows it (`executed`).
    """
    played = simulate_module(module, costs.hardware, costs) if played is None else played
    full = costs.at_clock(1.0)
    ran = list(executed(module, full)) if ran is None else ran
    kernels = [(i, count) for i, count in ran if full[i].lane is Lane.COMPUTE]
    copies = sum(count * full[i].seconds for i, count in kernels if moved(i) is not None)
    compute = sum(count * full[i].seconds for i, count in kernels)
    return StepParts(
        compute=compute - copies,
        copies=copies,
        clock=played.compute_alone - compute,
        slow_down=played.slow_down,
        exposed=played.exposed,
        idle=played.idle,
        flops=sum(count * full[i].flops for i, count in kernels),
        memory=memory,
        guessed=predict(module, full, ran=ran).shares[Source.GUESS],
        guessed_overlap=guessed_overlap(played, costs),
        costs=costs.words,
        assumed=full.assumed,
        link=costs.link,
        setting=costs.setting,
        exposed_by=_exposed_by(module, played),
        sent=sum(one.alone for one in played.collectives),
    )


def _exposed_by(module: HloModule, played: Timeline) -> tuple[tuple[str, float], ...]:
    """The largest exposed times, as (the collective in words, seconds). Negligible times are left out.

    The words are the collective's kind and size, and the axes that it runs over if the module names its mesh.
    """
    found: dict[str, float] = {}
    mesh = named_mesh(module)
    instructions = {i.name: i for computation in module.schedule for i in computation.instructions}
    for one in played.collectives:
        sent = find_collective(instructions[one.instruction])
        words = f"{sent.kind} {bytes_text(sent.size)}" if sent else "messages"
        axes = mesh.over(sent) if mesh and sent else ()
        words += f" over {' and '.join(axes)}" if axes else ""
        found[words] = found.get(words, 0.0) + one.exposed
    least = played.seconds / 500
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return tuple((words, seconds) for words, seconds in ordered[:_NAMED] if seconds > least)


def loops_to_look_at(timeline: Timeline, start: float = 0.0, runs: int = 1) -> Iterator[tuple[float, Timeline, int]]:
    """Finds a step's layer loops: innermost loops that hold collectives and take most of the time.

    Yields three values for each loop: the start of a middle iteration in seconds, this iteration's timeline, and the
    number of iterations in the whole step.

    Args:
      start: time in seconds at which `timeline` begins.
      runs: how often a step runs `timeline`.
    """
    loops = [(i, i.body) for i in timeline.intervals if i.body is not None and i.body.collectives]
    if not loops:
        return
    longest, body = max(loops, key=lambda pair: pair[0].end - pair[0].start)
    middle = start + longest.start + longest.count // 2 * body.seconds
    inside = list(loops_to_look_at(body, middle, runs * longest.count))
    if inside:
        yield from inside
        return
    for loop, body in loops:
        if loop.end - loop.start > 0.1 * (longest.end - longest.start):
            yield start + loop.start + loop.count // 2 * body.seconds, body, runs * loop.count


def moved(instruction: Instruction) -> str | None:
    """`copy` if an instruction only moves data, `fill` if it only broadcasts values into a buffer, else None."""
    if instruction.opcode in ("copy", "copy-start"):
        return "copy"
    opcodes = {i.opcode for called in kernel_of(instruction) for i in called.instructions} - {"fusion"}
    if not opcodes:
        return None
    if "broadcast" in opcodes and opcodes <= _FILLS:
        return "fill"
    return "copy" if opcodes & {"copy", "transpose"} and opcodes <= _MOVES else None


def kernel_of(instruction: Instruction) -> Iterator[Computation]:
    """The fused computations of an instruction that is one kernel, including fusions inside async wrappers."""
    if instruction.opcode in ("fusion", "async-start"):
        for called in instruction.called:
            yield called
            yield from (c for i in called.instructions for c in kernel_of(i))
