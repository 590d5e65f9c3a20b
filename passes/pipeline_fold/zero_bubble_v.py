"""ZB-V, zero-bubble V: the folded layout, with each backward in two parts, so that one of them can fill bubbles.

    D   gradients of a chunk's inputs: the stage before waits for them
    W   gradients of its weights: nobody waits for them, so they go where the stage would be idle

For the evaluator alone: the executor's backward makes both at once. The order of work is found greedily, by simulating
the stages in time: a stage that is free does the first of these that can start,

    1   D of the lowest micro-batch                      others wait for it
    2   F of the second chunk, then F of the first one   unless P micro-batches lie on the stage, 1F1B's memory
    3   W of the oldest D

Which order that makes depends on the times, and with those of the costs it is not always the shortest: orders made with
a few other times are tried too, and that of the W schedule, and the best is taken. So the bubble is never more than
1F1B's, and with F = D = W and P a divisor of M it is (P - 1) / (6 M), the least there can be: the last stage starts
P - 1 forwards late and is never idle again.

A stage frees residuals after W. Qi et al., Pipeline Parallelism with Controllable Memory, section on V-shaped schedules
(ZB-V), and Qi et al., Zero Bubble Pipeline Parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import check_folded
from dhelix.passes.pipeline_fold.schedule import Layout
from dhelix.passes.pipeline_fold.simulation import makespan
from dhelix.passes.pipeline_fold.tasks import PipelineCosts, StagePrograms, Task
from dhelix.passes.pipeline_fold.w_schedule import w_schedule

# Times of F, D and W that make good orders for one pipeline or another.
_TRIED = ((1, 1, 1), (2, 2, 1), (2, 3, 2), (3, 4, 2))


class _Step(NamedTuple):
    kind: str
    microbatch: int
    chunk: int


def zero_bubble_v(layout: Layout, microbatches: int, costs: PipelineCosts) -> StagePrograms:
    """What each stage does; `evaluation.evaluate_programs` tells what it costs. Raises DhelixError if it is no fold."""
    check_folded(layout)
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")
    weight = Fraction(costs.backward) / 2 if costs.weight_gradient is None else Fraction(costs.weight_gradient)
    times = {"F": Fraction(costs.forward), "D": Fraction(costs.backward) - weight, "W": weight}
    tried = [times, *({kind: Fraction(time) for kind, time in zip("FDW", some, strict=True)} for some in _TRIED)]
    orders = [*(_orders(layout, microbatches, some) for some in tried), _orders_of_w(layout, microbatches)]
    programs = [_programs(layout, microbatches, each, times, costs) for each in orders]
    return min(programs, key=lambda each: makespan(each, Fraction(costs.send)))


def _orders(layout: Layout, microbatches: int, times: dict[str, Fraction]) -> list[list[_Step]]:
    """The order of each stage when every task takes `times` of its kind."""
    orders: list[list[_Step]] = [[] for _ in range(layout.stages)]
    begun = [Counter[tuple[str, int]]() for _ in orders]
    free_at = [Fraction(0)] * layout.stages
    ends: dict[_Step, Fraction] = {}
    moments = {Fraction(0)}
    while moments:
        now = min(moments)
        moments.remove(now)
        for stage, order in enumerate(orders):
            if free_at[stage] > now:
                continue
            for step in _candidates(layout, microbatches, stage, begun[stage], order):
                if all(read in ends and ends[read] <= now for read in _reads(layout, step)):
                    order.append(step)
                    begun[stage][step.kind, step.chunk] += 1
                    ends[step] = free_at[stage] = now + times[step.kind]
                    moments.add(free_at[stage])
                    break
    return orders


def _candidates(
    layout: Layout, microbatches: int, stage: int, begun: Counter[tuple[str, int]], order: list[_Step]
) -> Iterator[_Step]:
    """What the stage may do next, the best first, whether or not its input is there. `begun`: by kind and chunk."""
    down, up = layout.chunks_of(stage)
    steps = sorted((_Step("D", begun["D", chunk], chunk) for chunk in (up, down)), key=lambda step: step.microbatch)
    steps.append(_Step("F", begun["F", up], up))
    if begun["F", down] - begun["W", down] < layout.stages:
        steps.append(_Step("F", begun["F", down], down))
    yield from (step for step in steps if step.microbatch < microbatches)
    done = (step for step in order if step.kind == "D")
    yield from (step._replace(kind="W") for step in islice(done, begun["W", up] + begun["W", down], None))


def _orders_of_w(layout: Layout, microbatches: int) -> list[list[_Step]]:
    """The W schedule, with each backward as D and W, before the forward of its tick: that one needs the place."""
    orders: list[list[_Step]] = [[] for _ in range(layout.stages)]
    for tick in w_schedule(layout, microbatches).ticks:
        for order, cell in zip(orders, tick, strict=True):
            if cell.backward is not None:
                order += [_Step(kind, cell.backward.microbatch, cell.backward.chunk) for kind in "DW"]
            if cell.forward is not None:
                order.append(_Step("F", cell.forward.microbatch, cell.forward.chunk))
    return orders


def _reads(layout: Layout, step: _Step) -> list[_Step]:
    kind, microbatch, chunk = step
    if kind == "F":
        return [_Step("F", microbatch, chunk - 1)] if chunk > 0 else []
    if kind == "W":
        return [_Step("D", microbatch, chunk)]
    return [_Step("D", microbatch, chunk + 1) if chunk < layout.chunks - 1 else _Step("F", microbatch, chunk)]


def _programs(
    layout: Layout, microbatches: int, orders: list[list[_Step]], times: dict[str, Fraction], costs: PipelineCosts
) -> StagePrograms:
    ends = {("F", 0): Fraction(costs.embedding), ("D", layout.chunks - 1): Fraction(costs.head)}
    if costs.shared_ends:
        ends = {}

    def task(step: _Step) -> Task:
        return Task(
            layout.chunk_layers[step.chunk] * times[step.kind] + ends.get((step.kind, step.chunk), 0),
            reads=tuple(_reads(layout, step)),
            makes=(step,),
            takes=step.chunk if step.kind == "F" else None,
            frees=step.chunk if step.kind == "W" else None,
        )

    stages = range(layout.stages)
    return StagePrograms(
        "zbv",
        layout.chunk_layers,
        tuple(sum(layout.chunk_layers[chunk] for chunk in layout.chunks_of(stage)) for stage in stages),
        tuple(tuple(map(task, order)) for order in orders),
        costs.of_ends(microbatches) / layout.stages if costs.shared_ends else Fraction(0),
    )
