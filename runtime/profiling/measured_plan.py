"""Reads the times of a plan's segments from a trace of the step that executed the plan.

    with jax.profiler.trace(folder):
        jax.block_until_ready(train_step(state, batch))
    measured = of_trace(plan, folder)
    plan_files.save(measured.plan, "plan.json")       # measured_us next to predicted_us

The program is read from the trace (`traced_modules`), so nothing is compiled. `dhelix plan PLAN --trace FOLDER` does
the same on a machine without GPUs.

A plan contains the orders of bodies, such as the body of a loop. A body is divided into segments of operators. A
segment lasts from the launch of its first operator to the launch of the next segment's first operator. So the times of
all segments add up to the time of the body. The prediction uses the same definition. An operator counts as launched
when two kinds of earlier work in program order have ended: all compute, and all collectives whose `done` instruction
comes earlier. The operator's kernels begin later, because launches take time or their CUDA stream is still busy. If a
body runs several times, the median time of each segment counts.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.plans.plan import Plan, PlanBody
from dhelix.passes.plans.planned_order import find_bodies, heads_of
from dhelix.runtime.processes.launch_settings import GRAPHS
from dhelix.runtime.profiling.traces import trace, traced_modules
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.profiling.traces.executions import of_trace as executions_of
from dhelix.runtime.profiling.traces.module_executions import by_instruction, steps_in

Times = Mapping[Instruction, Sequence[Execution]]


@dataclass(frozen=True)
class Measured:
    """A plan and the times of a step that executed it.

    Attributes:
      plan: the plan with `measured_us` in its segments.
      report: times of compute and communication on the first GPU.
      steps: number of steps in the trace.
      in_order: whether the step ran in the plan's order. False if the plan was refused or another plan was run.
    """

    plan: Plan
    report: trace.TraceReport
    steps: int
    in_order: bool


def of_trace(plan: Plan, path: str | Path) -> Measured:
    """Returns the plan with its segments' times on the first GPU of a trace.

    Args:
      plan: the plan that the traced step executed.
      path: see `trace.load`.

    Raises:
      DhelixError: there is no trace, the trace has no run of this plan's program on a GPU, or the trace does not say
        which instructions its kernels belong to.
    """
    profile = trace.load(path)
    module, found = _ran(plan, traced_modules.load(path), profile)
    measured = of_executions(plan, module, found)
    if all(segment.measured_us is None for body in measured.bodies for segment in body.segments):
        raise DhelixError(
            f"the trace names no instructions of {module.name}, probably because of CUDA graphs: record it with "
            f"XLA_FLAGS=--{GRAPHS}="
        )
    times = by_instruction(module, found)
    return Measured(measured, trace.analyse(profile, module), steps_in(module, times), _in_order(plan, module))


def _ran(plan: Plan, modules: Sequence[HloModule], profile: trace.Profile) -> tuple[HloModule, Sequence[Execution]]:
    """The plan's program that ran, and its executions.

    Several programs of the trace may fit the plan. Then the program whose instructions name the most executions is
    returned.
    """
    fitting = [module for module in modules if _fits(plan, module)]
    if not fitting:
        names = ", ".join(sorted({module.name for module in modules}))
        raise DhelixError(
            f"no program in the trace has the plan's loop bodies ({plan.program}); the trace holds {names}"
        )
    ran: list[tuple[int, HloModule, Sequence[Execution]]] = []
    errors: list[DhelixError] = []
    for module in fitting:
        try:
            gpus = executions_of(profile, module.name)
        except DhelixError as error:  # this module was compiled, but did not run
            errors.append(error)
            continue
        found = gpus[min(gpus)]
        names = {i.name for computation in module.schedule for i in computation.instructions}
        ran.append((sum(e.name in names for e in found), module, found))
    if not ran:
        raise errors[0]
    _, module, found = max(ran, key=lambda each: each[0])
    return module, found


def _fits(plan: Plan, module: HloModule) -> bool:
    try:
        return bool(find_bodies(plan, module))
    except PassRefusal:
        return False


def _in_order(plan: Plan, module: HloModule) -> bool:
    """Whether the program runs each body in the plan's order.

    Several computations may match a body of the plan. It is enough if one of them has the plan's order.
    """
    found: dict[str, bool] = {}
    for body, computation, operators in find_bodies(plan, module):
        place = {instruction: n for n, instruction in enumerate(module.schedule[computation])}
        places = [place[head] for head in heads_of(body, operators)]
        found[body.fingerprint] = found.get(body.fingerprint, False) or places == sorted(places)
    return all(found.values())


def of_executions(plan: Plan, module: HloModule, found: Sequence[Execution]) -> Plan:
    """Returns the plan with its segments' times. Segments of bodies that did not run have None as their time.

    Args:
      plan: the plan.
      module: the compiled step.
      found: executions of the step's instructions on one GPU.

    Raises:
      PassRefusal: the plan is for another program.
    """
    times = by_instruction(module, found)
    ends = sorted(e.end for e in found)
    lengths: dict[str, list[dict[int, float]]] = {}
    for body, computation, operators in find_bodies(plan, module):
        heads = {name: head for head, name in heads_of(body, operators).items()}
        firsts = [next((heads[name] for name in segment.run if name in heads), None) for segment in body.segments]
        lengths.setdefault(body.fingerprint, []).extend(segment_seconds(computation, firsts, times, ends))
    for body in plan.bodies:
        plan = plan.with_body(_measured(body, lengths.get(body.fingerprint, [])))
    return plan


def segment_seconds(
    computation: Computation, firsts: Sequence[Instruction | None], times: Times, ends: Sequence[float]
) -> list[dict[int, float]]:
    """For each execution of a computation, the seconds that each segment took: number of the segment -> seconds.

    Args:
      computation: the computation whose segments are timed.
      firsts: the first instruction of each segment, or None if the program has no instruction of the segment.
      times: executions of the module's instructions.
      ends: the end times of all executions, sorted.
    """
    number = {first: n for n, first in enumerate(firsts) if first is not None}
    sequence = computation.module.schedule[computation]
    counts = Counter(len(times[i]) for i in sequence if i in times)
    often = max(counts, key=lambda count: (counts[count], count), default=0)
    steady = {i for i in sequence if i in times and len(times[i]) == often}  # others: the trace split some executions
    opening = next((i for i in sequence if i in steady and not is_start(i)), None)
    found: list[dict[int, float]] = []
    for execution, opened in enumerate(times[opening] if opening else ()):
        reached = begin = _last_end(ends, opened.start)
        begins: list[tuple[int, float]] = []
        for instruction in sequence:
            if instruction in number:
                begins.append((number[instruction], reached if begins else begin))
            ran = start_of(instruction) if is_done(instruction) else instruction
            if ran in steady and (ran is not instruction or not is_start(instruction)):
                reached = max(reached, times[ran][execution].end)
        found.append({n: end - start for (n, start), (_, end) in pairwise([*begins, (-1, reached)])})
    return found


def _last_end(ends: Sequence[float], start: float) -> float:
    """The time at which the last execution before `start` ended.

    A pause between this end and `start` counts as time of the operator that begins at `start`.
    """
    at = bisect.bisect_right(ends, start)
    return ends[at - 1] if at else start


def _measured(body: PlanBody, found: Sequence[Mapping[int, float]]) -> PlanBody:
    """The body with a measured time for each segment: the median over all executions in `found`."""
    taken = ([seconds[n] for seconds in found if n in seconds] for n in range(len(body.segments)))
    segments = (
        replace(segment, measured_us=1e6 * statistics.median(seconds) if seconds else None)
        for segment, seconds in zip(body.segments, taken, strict=True)
    )
    return replace(body, segments=tuple(segments))
