"""When each cell of a pipeline schedule begins and ends, for the time axis of the chart.

A cell is the work of one stage in one tick. The times follow the rules of `pipeline_fold.evaluate`:

    lockstep        a tick begins when the slowest stage has ended the previous tick, and messages have arrived
    not lockstep    a cell begins when its stage has ended its previous cell, and the cell's inputs have arrived

The times of embedding and head are not included.
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.passes.pipeline_fold.evaluation import programs_of
from dhelix.passes.pipeline_fold.schedule import Cell, Schedule
from dhelix.passes.pipeline_fold.tasks import Label, PipelineCosts
from dhelix.passes.pipeline_fold.transfers import transfers

# Begin and end of the cell of each tick and stage. The values of an idle stage have no meaning.
type Times = Sequence[Sequence[tuple[float, float]]]


def cell_times(schedule: Schedule, costs: PipelineCosts) -> Times:
    """The begin and the end of each cell, in the unit of `costs`. The step begins at 0."""
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
    """`cell_times` of a schedule that does not run in lockstep.

    One pass over the ticks is enough, because `validate` ensures that a message is sent in an earlier tick than the
    tick in which it is read.
    """
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
