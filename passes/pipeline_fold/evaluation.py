"""The cost of a schedule: step time, bubble, and the residuals and parameters that each stage holds.

The two kinds of schedules are timed as they run:

    lockstep        A tick lasts until its slowest stage is done. Stages without work compute, too, and their results
                    are masked. All chunks take as long as the longest chunk. Messages arrive before the next tick.
    not lockstep    A task waits only for the previous task of its stage and for messages, as in the literature
                    (`simulation.makespan`). In the executor's program, a stage also waits until the receivers of its
                    messages are ready (`message_times.py`).

The bubble is idle time over ideal time, without the gain of co-execution. For W and 1F1B with equal chunks, P stages
and M micro-batches, the bubble is (P - 1) / M. It does not depend on the times of a forward and a backward.
`idle_share` is the idle fraction of the step with co-execution.

All times are exact fractions in the unit of the costs; `float(...)` makes them printable.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dhelix.passes.pipeline_fold.message_times import meeting_time
from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule
from dhelix.passes.pipeline_fold.simulation import busy_times, makespan, peak_residuals
from dhelix.passes.pipeline_fold.tasks import PipelineCosts, StagePrograms, Task, task
from dhelix.passes.pipeline_fold.transfers import transfers


@dataclass(frozen=True)
class Evaluation:
    """The cost of a schedule. Times are in the unit of the costs.

    Attributes:
      step_time: time of the step, with co-execution.
      ideal_time: average work of a stage, without co-execution. This would be the step time if no stage ever waited.
      bubble_fraction: idle time over ideal time, without co-execution.
      idle_share: idle time over `step_time`, both with co-execution. Masked work counts as idle time.
      co_executed_share: fraction of the cells (a stage in a tick) that are SI blocks. Cells without work count, too.
      peak_residual_slots: by stage, the largest number of chunks whose residuals are live at once.
      peak_residual_layers: by stage, the largest number of layers whose residuals are live at once, each for one
        micro-batch.
      stage_layers: by stage, the number of layers whose parameters the stage holds.
    """

    name: str
    step_time: Fraction
    ideal_time: Fraction
    bubble_fraction: Fraction
    idle_share: Fraction
    co_executed_share: Fraction
    peak_residual_slots: tuple[int, ...]
    peak_residual_layers: tuple[int, ...]
    stage_layers: tuple[int, ...]


def evaluate(
    schedule: Schedule, costs: PipelineCosts, *, meetings: bool = False, sends_beside: bool = False
) -> Evaluation:
    """The cost of a valid schedule (`validation.validate`).

    Args:
      costs: times of layers, embedding, head and messages.
      meetings: whether senders wait for receivers, as in the executor's program. In lockstep, senders always wait.
      sends_beside: whether late messages overlap with loops over layers (`message_times.meeting_time`). This has an
        effect only with `meetings`, and not in lockstep.
    """

    def timed(costs: PipelineCosts) -> tuple[StagePrograms, Fraction]:
        programs = programs_of(schedule, costs)
        if schedule.lockstep:
            return programs, _lockstep_time(schedule, costs) + programs.shared
        if meetings:
            return programs, meeting_time(schedule, costs, sends_beside)
        return programs, makespan(programs, Fraction(costs.send)) + programs.shared

    timing, plain_costs = timed(costs), costs.without_gain()
    plain = timing if plain_costs is costs else timed(plain_costs)
    return _evaluation(*timing, *plain, len(schedule.ticks))


def evaluate_programs(programs: StagePrograms, plain: StagePrograms, costs: PipelineCosts) -> Evaluation:
    """The cost of a pipeline that is given by the tasks of its stages, without a `Schedule`.

    `bidirectional.bidirectional` and `zero_bubble_v.zero_bubble_v` make such pipelines.

    Args:
      programs: the pipeline, made with `costs`.
      plain: the same pipeline, made with `costs.without_gain()`.
    """
    step = makespan(programs, Fraction(costs.send)) + programs.shared
    plain_step = step if plain is programs else makespan(plain, Fraction(costs.send)) + plain.shared
    return _evaluation(programs, step, plain, plain_step, max(map(len, programs.orders)))


def programs_of(schedule: Schedule, costs: PipelineCosts) -> StagePrograms:
    """The tasks of each stage in order, with the times of `costs`. Each stage runs only its own layers."""
    layout, stages = schedule.layout, range(schedule.layout.stages)
    return StagePrograms(
        schedule.name,
        layout.chunk_layers,
        tuple(sum(layout.chunk_layers[chunk] for chunk in layout.chunks_of(stage)) for stage in stages),
        tuple(
            tuple(_task(layout, tick[stage], costs) for tick in schedule.ticks if tick[stage] != Cell())
            for stage in stages
        ),
        costs.of_ends(schedule.microbatches) / layout.stages if costs.shared_ends else Fraction(0),
    )


def _task(layout: Layout, cell: Cell, costs: PipelineCosts) -> Task:
    forward, backward = (work and (work.microbatch, work.chunk) for work in (cell.forward, cell.backward))
    same_slot = cell.forward is not None and cell.backward is not None and cell.forward.slot == cell.backward.slot
    return task(layout.chunk_layers, forward, backward, costs, same_slot)


def _lockstep_time(schedule: Schedule, costs: PipelineCosts) -> Fraction:
    """The time of a lockstep schedule.

    If any stage has a forward in a tick, all stages compute one, with as many layers as the longest chunk has. The same
    holds for backwards.
    """
    layers = schedule.layout.padded
    total = Fraction(0) if costs.shared_ends else costs.of_ends(schedule.microbatches)
    for number, tick in enumerate(schedule.ticks):
        forward = any(cell.forward is not None for cell in tick)
        backward = any(cell.backward is not None for cell in tick)
        total += costs.of_pair(layers * forward, layers * backward)
        total += Fraction(costs.send) * any(transfers(schedule, number))
    return total


def _evaluation(
    programs: StagePrograms, step: Fraction, plain: StagePrograms, plain_step: Fraction, ticks: int
) -> Evaluation:
    stages = range(len(programs.orders))
    blocks = sum(task.co_executed for order in programs.orders for task in order)
    busy, ideal = (sum(busy_times(each), Fraction(0)) / len(stages) + each.shared for each in (programs, plain))
    chunks = (1,) * len(programs.chunk_layers)
    return Evaluation(
        name=programs.name,
        step_time=step,
        ideal_time=ideal,
        bubble_fraction=(plain_step - ideal) / ideal,
        idle_share=(step - busy) / step,
        co_executed_share=Fraction(blocks, len(stages) * ticks),
        peak_residual_slots=tuple(peak_residuals(programs, stage, chunks) for stage in stages),
        peak_residual_layers=tuple(peak_residuals(programs, stage, programs.chunk_layers) for stage in stages),
        stage_layers=programs.stage_layers,
    )
