"""When each cell of a pipeline schedule begins and ends, as `evaluate` times it: the time axis of the chart.

    lockstep        a tick begins when the slowest stage has ended the last tick, and messages have arrived
    not lockstep    a cell begins when its stage has ended its last cell, and the cell's inputs have arrived

Embedding and head are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.passes.pipeline_fold.evaluation import programs_of
from dhelix.passes.pipeline_fold.schedule import Cell, Schedule
from dhelix.passes.pipeline_fold.tasks import Label, PipelineCosts
from dhelix.passes.pipeline_fold.transfers import transfers

# Begin and end for each tick and stage; meaningless for an idle stage.
type Times = Sequence[Sequence[tuple[float, float]]]


def cell_times(schedule: Schedule, costs: PipelineCosts) -> Times:
    """Begin and end of each cell, in the unit of `costs`, from 0."""
    return _of_lockstep(schedule, costs) if schedule.lockstep else _of_messages(schedule, costs)


def _of_lockstep(schedule: Schedule, costs: PipelineCosts) -> Times:
    layers, clock, times = schedule.layout.padded, 0.0, []
    for number, cells in enumerate(schedule.ticks):
        forward, backward = any(cell.forward for cell in cells), any(cell.backward for cell in cells)
        end = clock + float(costs.of_pair(layers * forward, layers * backward))
        times.append([(clock, end)] * len(cells))
        clock = end + float(costs.send) * any(transfers(schedule, number))
    return times


def _of_messages(schedule: Schedule, costs: PipelineCosts) -> Times:
    """One pass suffices: `validate` ensures that every message is sent in an earlier tick than it is read."""
    tasks = [iter(order) for order in programs_of(schedule, costs).orders]
    clock, made, times = [0.0] * len(tasks), dict[Label, tuple[int, float]](), []
    for cells in schedule.ticks:
        row = []
        for stage, cell in enumerate(cells):
            begin = clock[stage]
            if cell != Cell():
                task = next(tasks[stage])
                arrivals = (end + float(costs.send) * (at != stage) for at, end in map(made.__getitem__, task.reads))
                begin = max([begin, *arrivals])
                clock[stage] = begin + float(task.time)
                made |= {label: (stage, clock[stage]) for label in task.makes}
            row.append((begin, clock[stage]))
        times.append(row)
    return times
