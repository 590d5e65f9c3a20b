"""Makes a plan from a scheduled program. Any scheduler may have decided the order.

    schedule = dict(module.schedule)                  # XLA's schedule
    StrandPairing(model=model).run(module, context)   # or another scheduler
    plan = make_plan(module, schedule, model, Plan("llama-8b, 8 layers", target))

`strand_interleave(plan=plan)` then runs a step in this order. The bodies of the plan are the computations that have two
strands, or whose order differs from XLA's. Other computations keep XLA's order. To save memory, a schedule may end a
collective before an operator needs the result. Such an early end is an operator of the plan. The pass `planned_order`
places all other ends as late as possible.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done, start_of
from dhelix.passes.analysis.execution import executions, sequence_of
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_time import predict
from dhelix.passes.evaluation.timeline import evaluate, guessed_overlap, settled
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.body_plan import PlannedSegment, segments_of
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.strand_sequences import find_strands
from dhelix.passes.plans.plan import (
    FINALLY,
    Plan,
    PlanBody,
    PlanOperator,
    PlanSegment,
    Prediction,
)
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.passes.plans.planned_order import planned_sequence
from dhelix.profiles.estimates.estimator import Source

Schedule = Mapping[Computation, Sequence[Instruction]]


def make_plan(module: HloModule, original: Schedule, model: CostModel, like: Plan) -> Plan:
    """Makes the plan that reproduces the module's schedule.

    Bodies with two strands come first. Bodies with the same number of strands are sorted by their time in a step, the
    longest first. This time leaves out the loops and branches in the body.

    Args:
      module: a scheduled module.
      original: XLA's schedule of the same module.
      model: costs for predictions. They also decide which instructions are operators.
      like: a plan without bodies. All parts of the result but the bodies and the prediction are those of `like`.
    """
    costs = settled(module, model.costs())
    limits = Limits(costs.hardware, 0, Memory(module), {})
    timeline = evaluate(sequence_of(module.entry), costs)
    runs = executions(module)
    found: list[tuple[int, float, PlanBody]] = []
    for computation, sequence in module.schedule.items():
        if computation in runs and any(costs[i].lane is not Lane.COMPUTE for i in sequence):
            body = find_strands(computation, original[computation], costs, limits)
            if body.second.operators or sequence != original[computation]:
                segments = segments_of(body, sequence, costs, limits)
                operators = PlanOperators(computation, costs.operator_keys)
                ends = _early_ends(computation, original[computation], sequence, segments, limits.memory)
                strands = 2 if body.second.operators else 1
                planned = _body(operators, sequence, ends, segments, runs[computation], costs)
                own = sum(costs[i].seconds for i in sequence if i.opcode not in CONTROL_FLOW)
                found.append((strands, planned.runs * own, planned))
    found.sort(key=lambda entry: (-entry[0], -entry[1], entry[2].fingerprint))
    bodies = _alike_once([body for _, _, body in found])
    return replace(like.with_bodies(bodies), predicted=prediction(timeline, module, costs))


def _alike_once(bodies: Sequence[PlanBody]) -> tuple[PlanBody, ...]:
    """Merges bodies with equal fingerprints into the first one, with the sum of their runs.

    A plan applies a body to all computations with its fingerprint. For example, the loops over layers of several ticks
    of a pipeline may have the same fingerprint.
    """
    runs: dict[str, int] = {}
    for body in bodies:
        runs[body.fingerprint] = runs.get(body.fingerprint, 0) + body.runs
    first = {body.fingerprint: body for body in reversed(bodies)}
    return tuple(replace(first[key], runs=count) for key, count in runs.items())


def prediction(timeline: Timeline, module: HloModule, costs: Costs) -> Prediction:
    """The prediction for a step: `timeline` is the simulation of `module` with `costs`."""
    return Prediction(
        1e6 * timeline.seconds,
        1e6 * timeline.compute,
        1e6 * timeline.communication,
        timeline.hidden / timeline.communication if timeline.communication else 1.0,
        predict(module, costs.at_clock(1.0)).shares[Source.GUESS],
        guessed_overlap(timeline, costs),
    )


def _early_ends(
    computation: Computation,
    original: Sequence[Instruction],
    sequence: Sequence[Instruction],
    segments: Sequence[PlannedSegment],
    memory: Memory,
) -> set[Instruction]:
    """The ends of collectives that come earlier in `sequence` than necessary.

    Such an end has fewer operators before it than in the order of `planned_sequence`, in which ends come as late as
    possible.
    """
    heads = {o.head: "" for segment in segments for o in segment.operators}
    late = _heads_before(planned_sequence(computation, original, heads, memory), heads)
    return {end for end, count in _heads_before(sequence, heads).items() if count < late[end]}


def _heads_before(sequence: Sequence[Instruction], heads: Collection[Instruction]) -> dict[Instruction, int]:
    """Maps the end of each collective whose start is in `heads` to the number of `heads` before this end."""
    found: dict[Instruction, int] = {}
    count = 0
    for instruction in sequence:
        count += instruction in heads
        if is_done(instruction) and start_of(instruction) in heads:
            found[instruction] = count
    return found


def _body(
    operators: PlanOperators,
    sequence: Sequence[Instruction],
    ends: Collection[Instruction],
    segments: Sequence[PlannedSegment],
    runs: int,
    costs: Costs,
) -> PlanBody:
    heads = {o.head for segment in segments for o in segment.operators}
    launched = [i for i in sequence if i in heads or i in ends]
    names = operators.names(launched)
    table = (PlanOperator(names[i], *operators.identities[i]) for i in sorted(launched, key=lambda i: names[i]))
    firsts = [launched.index(segment.operators[0].head) for segment in segments]
    parts = [launched[a:b] for a, b in zip([0, *firsts[1:]], [*firsts[1:], len(launched)], strict=True)]
    planned = (_segment(s, [names[i] for i in part], costs) for s, part in zip(segments, parts, strict=True))
    small = _small(operators, sequence, names)
    return PlanBody(operators.describe(), operators.fingerprint, runs, tuple(table), tuple(planned), small)


def _small(
    operators: PlanOperators, sequence: Sequence[Instruction], names: Mapping[Instruction, str]
) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Instructions that take time and are not operators, grouped by the operator that they run before."""
    found: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    since: list[tuple[str, int]] = []
    for instruction in sequence:
        if instruction not in names:
            since += [operators.identities[instruction]] if operators.takes_time(instruction) else []
        elif since:
            found.append((names[instruction], tuple(since)))
            since = []
    return (*found, (FINALLY, tuple(since))) if since else tuple(found)


def _segment(segment: PlannedSegment, run: Sequence[str], costs: Costs) -> PlanSegment:
    alone = segment.seconds_alone
    guessed = sum(o.seconds for o in segment.operators if costs[o.head].source is Source.GUESS)
    return PlanSegment(tuple(run), 1e6 * segment.seconds, None, guessed / alone if alone else 0.0)
