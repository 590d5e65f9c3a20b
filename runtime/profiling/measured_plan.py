"""What the segments of a plan took: its predictions beside a trace of the step that carried it out.

    with jax.profiler.trace(folder):
        jax.block_until_ready(train_step(state, batch))
    compiled = train_step.lower(state, batch).compile()
    pairing_plan_json.save(of_trace(plan, folder, compiled), "plan.json")       # measured_us beside predicted_us

A segment is measured from the start of its first computation to that of the next segment's, so a collective that is
launched before and waits does not count twice. Segments in which nothing computes have no time of their own; theirs is
in the segment before. Of a body that runs several times the median counts.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from dhelix.passes.collectives import find_collective
from dhelix.passes.hlo import HloModule
from dhelix.passes.pairing_plan import PairingPlan, PlanBody
from dhelix.passes.planned_order import find_bodies, heads_of
from dhelix.runtime import trace
from dhelix.runtime.lowering import compiled_module
from dhelix.runtime.profiling.executions import Execution
from dhelix.runtime.profiling.executions import of_trace as executions_of


def of_trace(plan: PairingPlan, folder: str | Path, compiled: jax.stages.Compiled) -> PairingPlan:
    """The plan with what its segments took on the first GPU of a trace.

    Args:
      folder: of `jax.profiler.trace`.
      compiled: the step that ran.

    Raises:
      DhelixError: no trace there, none of this step, or a plan for another one.
    """
    module = compiled_module(compiled)
    found = executions_of(trace.load(folder), module.name)
    return of_executions(plan, module, found[min(found)])


def of_executions(plan: PairingPlan, module: HloModule, found: Sequence[Execution]) -> PairingPlan:
    """The plan with what its segments took.

    Args:
      module: the compiled step.
      found: executions of its instructions on one GPU.

    Raises PassRefusal if the plan is for another program.
    """
    starts: dict[str, list[float]] = {}
    for execution in sorted(found, key=lambda e: e.start):
        starts.setdefault(execution.name, []).append(execution.start)
    last = max((e.end for e in found), default=0.0)
    for body, _, operators in find_bodies(plan, module):
        names = {name: head for head, name in heads_of(body, operators).items()}
        anchors = []
        for segment in body.segments:
            computing = (names[name].name for name in segment.run if find_collective(names[name]) is None)
            anchors.append(next((starts[name] for name in computing if name in starts), []))
        plan = plan.with_body(_measured(body, anchors, last))
    return plan


def _measured(body: PlanBody, anchors: Sequence[Sequence[float]], last: float) -> PlanBody:
    """`anchors`: starts of each segment's first computation, in every iteration; empty where nothing computes."""
    timed = [n for n, found in enumerate(anchors) if found]
    lengths: dict[int, list[float]] = {n: [] for n in timed}
    for iteration, begin in enumerate(anchors[timed[0]] if timed else ()):
        again = iteration + 1 < len(anchors[timed[0]])
        end = anchors[timed[0]][iteration + 1] if again else last
        inside = [(n, _first(anchors[n], begin, end)) for n in timed]
        points = [(n, start) for n, start in inside if start is not None] + [(-1, end)]
        for (number, start), (_, following) in zip(points, points[1:], strict=False):
            lengths[number].append(following - start)
    segments = tuple(
        replace(segment, measured_us=1e6 * statistics.median(lengths[n]) if lengths.get(n) else None)
        for n, segment in enumerate(body.segments)
    )
    return replace(body, segments=segments)


def _first(starts: Sequence[float], begin: float, end: float) -> float | None:
    """The first of the ordered `starts` from `begin` on and before `end`."""
    at = bisect.bisect_left(starts, begin)
    return starts[at] if at < len(starts) and starts[at] < end else None
