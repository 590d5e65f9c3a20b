"""Rules for new orders of a scheduled module's computations: legality, memory, and which order is taken.

A scheduler is a function `order(computation, sequence, costs, limits) -> sequence`. `apply_order` calls the scheduler
for each computation with async collectives, callees before callers. `apply_order` takes the new order if the evaluator
predicts a shorter time for it. If the number of collectives in flight is limited, dones move up in the new order. If
XLA's order exceeds this limit, it is replaced even by a slower order.

A legal order keeps data flow, control dependencies, the order of side effects, and the order of accesses to a shared
buffer (`passes/analysis/buffers.py`); `dependencies` returns all of these. Memory is a hard limit: an order whose
estimated peak is above the limit is never taken. If XLA's order is above the limit and no order within the limit is
found, the pass refuses. It then reports the smallest need that it found.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.analysis.content import Contents
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.operator_keys import FREE_OPCODES
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import guessed_overlap, simulate, simulate_module
from dhelix.passes.framework.manager import PassContext, say_once
from dhelix.passes.framework.units import bytes_text
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.profiles.hardware import SYMMETRIC_RATE, Hardware

MEMORY_SLACK = 0.03
"""Extra memory for all passes together, as a fraction of the plain step's memory without arguments (DHelix section 6,
arXiv 2411.15871)."""
_UNMEASURED = 2.5
"""Factor on the required gain if the costs come from a roofline and not from measurements."""
_GUESSED = 0.1
"""If the rates are guessed for more than this fraction of the overlap time, a warning says so."""


class MemoryRefusal(PassRefusal):
    """No order that was found fits into memory. `needed`: bytes of the smallest one, arguments included."""

    def __init__(self, reason: str, needed: int):
        super().__init__(reason, needed=needed)
        self.needed = needed


@dataclass(frozen=True)
class Limits:
    """Limits that a scheduler must respect, and results that it can reuse.

    Attributes:
      bytes: peak memory allowed in the computation, callees included.
      memory: the estimator of peak memory.
      bodies: timelines of called computations, whose order is final.
      max_in_flight: the largest number of collectives of one lane that may be between start and done; None for no
        limit.
    """

    hardware: Hardware
    bytes: int
    memory: Memory
    bodies: dict[Computation, Timeline] = field(default_factory=dict)
    max_in_flight: int | None = None


Scheduler = Callable[[Computation, Sequence[Instruction], Mapping[Instruction, Cost], Limits], list[Instruction]]


def dependencies(
    computation: Computation, sequence: Sequence[Instruction], memory: Memory
) -> Iterable[tuple[Instruction, Instruction]]:
    """Pairs (before, after) whose order must stay, because of data flow, control, side effects or shared buffers."""
    edges: dict[tuple[Instruction, Instruction], None] = {}
    effect: Instruction | None = None
    for instruction in sequence:
        for before in (*instruction.operands, *instruction.control_predecessors):
            edges[before, instruction] = None
        if has_side_effect(instruction):
            if effect is not None:
                edges[effect, instruction] = None
            effect = instruction
    edges.update(dict.fromkeys(memory.buffers[computation].order_edges(sequence)))
    return edges


def predecessors(
    computation: Computation, sequence: Sequence[Instruction], memory: Memory
) -> dict[Instruction, list[Instruction]]:
    """For each instruction, the instructions that must come before it because of `dependencies`."""
    before: dict[Instruction, list[Instruction]] = {i: [] for i in sequence}
    for earlier, later in dependencies(computation, sequence, memory):
        before[later].append(earlier)
    return before


def few_in_flight(
    order: Sequence[Instruction],
    before: Mapping[Instruction, Sequence[Instruction]],
    costs: Mapping[Instruction, Cost],
    most: int | None,
) -> list[Instruction]:
    """Moves dones up in `order`, so that each lane has at most `most` collectives between start and done.

    A done that depends on the start that would exceed the limit stays where it is.

    Args:
      before: for each instruction, the instructions that must come before it.
    """
    if most is None:
        return list(order)
    ends = {start_of(i): i for i in order if is_done(i)}
    flying: dict[Lane, list[Instruction]] = {}
    laid: dict[Instruction, None] = {}
    for instruction in order:
        lane = costs[instruction].lane
        if lane is not Lane.COMPUTE and instruction in ends:
            flying[lane] = [s for s in flying.get(lane, ()) if ends[s] not in laid]
            for start in flying[lane][: max(len(flying[lane]) + 1 - most, 0)]:
                missing = _missing(ends[start], before, laid)
                if instruction not in missing:
                    laid.update(dict.fromkeys(missing))
            flying[lane].append(instruction)
        laid[instruction] = None
    return list(laid)


def starts_behind_ends(
    order: Sequence[Instruction], before: Mapping[Instruction, Sequence[Instruction]], costs: Mapping[Instruction, Cost]
) -> list[Instruction]:
    """Changes `order` so that XLA keeps the order of collectives on each lane.

    If no compute lies between a start and its done, XLA makes the pair synchronous, at the place of the done. Another
    collective that starts between the two would then begin first. If it is on the same lane, its start moves behind the
    done. This does not delay it, because the lane is busy until then:

        before    gather-start  scatter-start  gather-done
        after     gather-start  gather-done  scatter-start

    Args:
      before: for each instruction, the instructions that must come before it.
    """
    laid: list[Instruction] = []
    recent: list[Instruction] = []  # instructions since the last compute instruction
    for instruction in order:
        recent.append(instruction)
        if is_done(instruction):
            if (start := start_of(instruction)) in recent:
                between = recent[recent.index(start) + 1 :]
                ended = {start_of(i) for i in between if is_done(i)}
                needed = {b for i in between for b in before[i]}
                lane = costs[start].lane
                later = [i for i in between if is_start(i) and costs[i].lane is lane and i not in ended | needed]
                recent = [i for i in recent if i not in later] + later
        elif not is_start(instruction) and instruction.opcode not in FREE_OPCODES:
            laid += recent
            recent = []
    return laid + recent


def most_in_flight(order: Sequence[Instruction], costs: Mapping[Instruction, Cost]) -> int:
    """The largest number of collectives of one lane that are between start and done at the same time."""
    flying, most = dict.fromkeys(Lane, 0), 0
    for instruction in order:
        source = start_of(instruction) if is_done(instruction) else instruction
        lane = costs[source].lane
        if lane is not Lane.COMPUTE:
            flying[lane] += -1 if is_done(instruction) else is_start(instruction)
            most = max(most, flying[lane])
    return most


def _missing(
    instruction: Instruction, before: Mapping[Instruction, Sequence[Instruction]], laid: Mapping[Instruction, None]
) -> list[Instruction]:
    """`instruction` and all its predecessors that are not in `laid`, in a legal order."""
    found: dict[Instruction, None] = {}
    stack = [instruction]
    while stack:
        needed = [b for b in before[stack[-1]] if b not in laid and b not in found]
        if needed:
            stack += reversed(needed)
        else:
            found[stack.pop()] = None
    return list(found)


def least_gain(min_gain: float, costs: Costs) -> float:
    """The `min_gain` for `apply_order`, derived from the `min_gain` of a pass.

    The `min_gain` of a pass is meant for measured costs. Roofline costs have larger errors, so they require a larger
    predicted gain.
    """
    return min_gain * (_UNMEASURED if costs.estimator is None else 1.0)


def apply_order(
    module: HloModule,
    context: PassContext,
    order: Scheduler,
    costs: Costs,
    memory_limit: int | None = None,
    memory_slack: float = 0.0,
    min_gain: float | None = 0.0,
    max_in_flight: int | None = None,
) -> bool:
    """Gives every computation with async collectives the order that `order` finds, if that order is better.

    Callees come before their callers, so a loop's body is final when the loop itself is placed. Equal computations,
    such as the loops of several stages, get equal orders, and `order` is called for the first of them.

    Args:
      memory_limit: bytes that the module may need, arguments included, as estimated from live ranges. None stands for
        the need of XLA's order plus `memory_slack`.
      memory_slack: memory in addition to the need of XLA's order, as a fraction of that need without arguments.
      min_gain: required saving, as a fraction of the most that overlap could save: of the computation's own compute
        time or communication time, whichever is smaller. None takes every order that fits, even a slower one. This
        makes a baseline.
      max_in_flight: as in `Limits`. An order within this limit replaces an order above it, even if the new order is
        slower.

    Returns:
      Whether the schedule changed. The notes in `context` say what was done.

    Raises:
      MemoryRefusal: the module needs more than `memory_limit` in XLA's order and in every order that was tried.
    """
    chosen = [c for c in module.computations if c in module.schedule and _has_collectives(c, costs)]
    if not chosen:
        return False
    memory, bodies = Memory(module), {}
    original = dict(module.schedule)
    before = simulate_module(module, costs.hardware, costs).seconds
    needed = memory.needed(module)
    if memory_limit is None:
        memory_limit = needed + int((needed - memory.arguments) * memory_slack)
    crowded = max_in_flight is not None and any(most_in_flight(original[c], costs) > max_in_flight for c in chosen)
    order = _once(order, costs.operator_keys.contents)
    for computation in chosen:
        memory.forget()
        allowed = memory_limit - memory.arguments - memory.beside(computation)
        limits = Limits(costs.hardware, allowed, memory, bodies, max_in_flight)
        _improve(computation, order, costs, limits, min_gain, context)
    memory.forget()
    _check_memory(module, memory_limit, memory.needed(module), original)
    if all(module.schedule[c] == original[c] for c in chosen):
        return False
    played = simulate_module(module, costs.hardware, costs)
    after, guessed = played.seconds, guessed_overlap(played, costs)
    facts = {"seconds_before": before, "seconds_after": after, "guessed_overlap": guessed}
    if after >= before and min_gain is not None and needed <= memory_limit and not crowded:
        module.schedule.update(original)
        context.note("orders dropped: the module as a whole is not predicted to be faster", **facts)
        return False
    context.note(f"new orders: the module is predicted to take {before * 1e3:.1f} ms -> {after * 1e3:.1f} ms", **facts)
    if costs.estimator is not None and guessed > _GUESSED:
        setting, hardware, rate = costs.estimator.section.setting, costs.hardware, costs.hardware.communication_rate
        rate = max(rate, SYMMETRIC_RATE) if costs.operator_keys.implementation == "symmetric" else rate
        say_once(
            f"the profile of {hardware.name} has no measured pairs for {guessed:.0%} of the time in which collectives "
            f"overlap with compute under launch setting {setting!r}: compute is assumed to run at "
            f"{hardware.compute_rate:.2g} and collectives at {rate:.2g} of their speed (between nodes "
            f"{hardware.inter_compute_rate:.2g} and {hardware.inter_communication_rate:.2g}); "
            "`dhelix profile` of this step measures pairs",
            ("guessed overlap", setting),
        )
    return True


def _once(order: Scheduler, contents: Contents) -> Scheduler:
    """`order`, but a computation gets the order that was found for an equal one, if this order fits into memory.

    The body of a loop is not equal to another computation, because its back edge makes buffers shared.
    """
    known: dict[Hashable, list[int]] = {}  # places of a computation's instructions

    def found(
        computation: Computation, sequence: Sequence[Instruction], costs: Mapping[Instruction, Cost], limits: Limits
    ) -> list[Instruction]:
        place = {instruction: n for n, instruction in enumerate(computation.instructions)}
        is_body = limits.memory.buffers[computation].is_body
        alike = contents.of_computation(computation), is_body, tuple(place[i] for i in sequence)
        if alike in known:
            repeated = [computation.instructions[n] for n in known[alike]]
            if limits.memory.peak(computation, repeated) <= limits.bytes:
                return repeated
        new = order(computation, sequence, costs, limits)
        known[alike] = [place[i] for i in new]
        return new

    return found


def _check_memory(
    module: HloModule, limit: int, needed: int, original: Mapping[Computation, list[Instruction]]
) -> None:
    if needed > limit:
        module.schedule.update(original)
        raise MemoryRefusal(
            f"no order was found that fits into the limit of {bytes_text(limit)}, arguments included; the smallest "
            f"needs {bytes_text(needed)}",
            needed,
        )


def _has_collectives(computation: Computation, costs: Costs) -> bool:
    return any(is_start(i) and costs[i].lane is not Lane.COMPUTE for i in computation.instructions)


def _improve(
    computation: Computation,
    order: Scheduler,
    costs: Costs,
    limits: Limits,
    min_gain: float | None,
    context: PassContext,
) -> None:
    schedule = computation.module.schedule
    old = schedule[computation]
    new = order(computation, old, costs, limits)
    crowded = False
    needs = predecessors(computation, old, limits.memory)
    if limits.max_in_flight is not None:
        new = few_in_flight(new, needs, costs, limits.max_in_flight)
        crowded = most_in_flight(old, costs) > limits.max_in_flight
    if new != old:
        new = starts_behind_ends(new, needs, costs)
    verify_sequence(computation, new)
    before, after = (simulate(computation, s, costs, limits.hardware, limits.bodies) for s in (old, new))
    peak_before, peak = (limits.memory.peak(computation, s) for s in (old, new))
    facts = {
        "computation": computation.name,
        "seconds_before": before.seconds,
        "seconds_after": after.seconds,
        "exposed_before": before.exposed,
        "exposed_after": after.exposed,
        "bytes": peak,
        "bytes_limit": limits.bytes,
    }
    faster = min_gain is None or after.seconds <= before.seconds - min_gain * _overlappable(before)
    if peak > max(peak_before, limits.bytes):
        context.note("XLA's order kept: the new order needs more memory than allowed", **facts)
        return
    if new == old or not (faster or crowded or peak_before > limits.bytes):
        context.note("XLA's order kept: no order is predicted to be faster", **facts)
        return
    schedule[computation] = new
    context.note("reordered", **facts)


def _overlappable(timeline: Timeline) -> float:
    """The smaller of the computation's own compute and communication, in seconds, without the loops inside it."""
    loops = [(i.body, i.count) for i in timeline.intervals if i.body is not None]
    compute = timeline.compute_alone - sum(body.compute_alone * count for body, count in loops)
    communication = timeline.communication - sum(body.communication * count for body, count in loops)
    return max(min(compute, communication), 0.0)
