"""ZB-V (zero-bubble V): a schedule on the folded layout. Each backward has two parts, and one part can fill bubbles:

    D   gradients of a chunk's inputs: the backward of the previous chunk waits for them
    W   gradients of a chunk's weights: no other work waits for them, so they run when the stage would be idle

The executor does not run ZB-V, because the executor's backward computes both parts at once. A simulation of the stages
in time finds the order of work greedily. F is a forward, P the number of stages, and M the number of micro-batches. A
free stage runs the first of these steps that can start:

    1   D of the lowest micro-batch    other stages wait for it
    2   F of the second chunk
    3   F of the first chunk           if fewer than P micro-batches hold residuals of this chunk: the memory of 1F1B
    4   W of the oldest D

The greedy order depends on the times of F, D and W. The order for the given times is not always the fastest. So
`zero_bubble_v` also tries the orders for a few other times and the order of the W schedule, and takes the fastest
order. Therefore the bubble is never larger than the bubble of 1F1B. If F, D and W take the same time and P divides M,
the bubble is (P - 1) / (6 M). This is the least possible bubble: the last stage cannot start before P - 1 forwards have
run on the other stages, and it is never idle after that.

A stage frees the residuals of a chunk after W.

Sources: Qi et al., Pipeline Parallelism with Controllable Memory, section on V-shaped schedules (ZB-V), and Qi et al.,
Zero Bubble Pipeline Parallelism.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import check_folded
from dhelix.passes.pipeline_fold.schedule import Layout
from dhelix.passes.pipeline_fold.schedules.w_schedule import w_schedule
from dhelix.passes.pipeline_fold.simulation import makespan
from dhelix.passes.pipeline_fold.tasks import PipelineCosts, StagePrograms, Task

# Other times of F, D and W from which orders are made. Each of them gives good orders for some pipelines.
_TRIED = ((1, 1, 1), (2, 2, 1), (2, 3, 2), (3, 4, 2))


class _Step(NamedTuple):
    kind: str
    microbatch: int
    chunk: int


def zero_bubble_v(layout: Layout, microbatches: int, costs: PipelineCosts) -> StagePrograms:
    """The tasks of each stage; `evaluation.evaluate_programs` computes their cost.

    Raises:
      DhelixError: the layout is not folded, or there is no micro-batch.
    """
    check_folded(layout)
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")
    weight = Fraction(costs.backward) / 2 if costs.weight_gradient is None else Fraction(costs.weight_gradient)
    times = {"F": Fraction(costs.forward), "D": Fraction(costs.backward) - weight, "W": weight}
    unit = math.lcm(*(time.denominator for time in times.values()))
    tried = dict.fromkeys([tuple(int(time * unit) for time in times.values()), *_TRIED])
    orders = [*(_orders(layout, microbatches, some) for some in tried), _orders_of_w(layout, microbatches)]
    task_of = functools.cache(functools.partial(_task, layout, _times_of(layout, times, costs)))
    shared = costs.of_ends(microbatches) / layout.stages if costs.shared_ends else Fraction(0)
    programs = [_programs(layout, each, task_of, shared) for each in orders]
    return min(programs, key=lambda each: makespan(each, Fraction(costs.send)))


def _orders(layout: Layout, microbatches: int, tried: Sequence[int]) -> list[list[_Step]]:
    """The greedy order of each stage if F, D and W of a chunk take the times `tried`."""
    times = dict(zip("FDW", tried, strict=True))
    stages = [_Stage(layout, microbatches, stage) for stage in range(layout.stages)]
    reads = functools.cache(functools.partial(_reads, layout.chunks - 1))
    ends: dict[_Step, int] = {}
    awake = {0: set(range(layout.stages))}  # by time: stages that may find something new to do
    while awake:
        now = min(awake)
        for place in sorted(awake.pop(now)):
            stage = stages[place]
            if stage.free_at > now:
                continue
            for step in stage.candidates():
                if all(ends.get(read, math.inf) <= now for read in reads(step)):
                    end = ends[step] = now + times[step.kind]
                    stage.begin(step, end)
                    readers = range(max(place - 1, 0), min(place + 2, layout.stages))
                    awake.setdefault(end, set()).update(readers)
                    break
    return [stage.order for stage in stages]


class _Stage:
    """The steps that a stage has begun, in `order`. The stage is busy until `free_at`."""

    def __init__(self, layout: Layout, microbatches: int, stage: int) -> None:
        self.order: list[_Step] = []
        self.free_at = 0
        self._room, self._microbatches = layout.stages, microbatches
        self._down, self._up = layout.chunks_of(stage)
        self._begun = Counter[tuple[str, int]]()  # by kind and chunk
        self._without_w = deque[_Step]()  # each D whose W has not run yet

    def candidates(self) -> Iterator[_Step]:
        """Steps that the stage may run next, best first, even if their inputs are missing."""
        begun, down, up = self._begun, self._down, self._up
        steps = [_Step("D", begun["D", up], up), _Step("D", begun["D", down], down)]
        if steps[1].microbatch < steps[0].microbatch:
            steps.reverse()
        steps.append(_Step("F", begun["F", up], up))
        if begun["F", down] - begun["W", down] < self._room:
            steps.append(_Step("F", begun["F", down], down))
        yield from (step for step in steps if step.microbatch < self._microbatches)
        if self._without_w:
            yield self._without_w[0]._replace(kind="W")

    def begin(self, step: _Step, end: int) -> None:
        self.order.append(step)
        self.free_at = end
        self._begun[step.kind, step.chunk] += 1
        if step.kind == "D":
            self._without_w.append(step)
        elif step.kind == "W":
            self._without_w.popleft()


def _orders_of_w(layout: Layout, microbatches: int) -> list[list[_Step]]:
    """The order of each stage in the W schedule, with each backward split into D and W.

    D and W come before the forward of the same tick, because the forward needs the slot that W frees.
    """
    orders: list[list[_Step]] = [[] for _ in range(layout.stages)]
    for tick in w_schedule(layout, microbatches).ticks:
        for order, cell in zip(orders, tick, strict=True):
            if cell.backward is not None:
                order += [_Step(kind, cell.backward.microbatch, cell.backward.chunk) for kind in "DW"]
            if cell.forward is not None:
                order.append(_Step("F", cell.forward.microbatch, cell.forward.chunk))
    return orders


def _reads(last: int, step: _Step) -> tuple[_Step, ...]:
    """The steps that must end before `step`; `last` is the last chunk."""
    kind, microbatch, chunk = step
    if kind == "F":
        return (_Step("F", microbatch, chunk - 1),) if chunk > 0 else ()
    if kind == "W":
        return (_Step("D", microbatch, chunk),)
    return (_Step("D", microbatch, chunk + 1) if chunk < last else _Step("F", microbatch, chunk),)


def _times_of(layout: Layout, times: dict[str, Fraction], costs: PipelineCosts) -> dict[tuple[str, int], Fraction]:
    """The time of each step for one micro-batch, by kind (F, D or W) and chunk."""
    time_of = {
        (kind, chunk): layers * time for kind, time in times.items() for chunk, layers in enumerate(layout.chunk_layers)
    }
    if not costs.shared_ends:
        time_of["F", 0] += Fraction(costs.embedding)
        time_of["D", layout.chunks - 1] += Fraction(costs.head)
    return time_of


def _task(layout: Layout, time_of: dict[tuple[str, int], Fraction], step: _Step) -> Task:
    return Task(
        time_of[step.kind, step.chunk],
        reads=_reads(layout.chunks - 1, step),
        makes=(step,),
        takes=step.chunk if step.kind == "F" else None,
        frees=step.chunk if step.kind == "W" else None,
    )


def _programs(
    layout: Layout, orders: list[list[_Step]], task_of: Callable[[_Step], Task], shared: Fraction
) -> StagePrograms:
    stages = range(layout.stages)
    return StagePrograms(
        "zbv",
        layout.chunk_layers,
        tuple(sum(layout.chunk_layers[chunk] for chunk in layout.chunks_of(stage)) for stage in stages),
        tuple(tuple(map(task_of, order)) for order in orders),
        shared,
    )
