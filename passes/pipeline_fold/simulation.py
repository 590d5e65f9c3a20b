"""Computes when the stages of a pipeline are done. Each stage runs its tasks in order and waits only for messages.

A task starts as soon as its stage has ended the previous task and the inputs of the task have arrived. An input from
the same stage arrives at once. An input from another stage arrives a time `send` after the other stage has made it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.tasks import Label, StagePrograms


def makespan(programs: StagePrograms, send: Fraction) -> Fraction:
    """Time from the start of the first task to the end of the last task.

    Args:
      send: time from the end of a task to the arrival of its result on another stage.

    Raises:
      DhelixError: the stages deadlock.
    """
    orders = programs.orders
    # Integers, in multiples of 1 / unit, are as exact as fractions and much faster.
    unit = math.lcm(send.denominator, *{task.time.denominator for order in orders for task in order})
    delay = int(send * unit)
    made: dict[Label, tuple[int, int]] = {}
    position, clock = [0] * len(orders), [0] * len(orders)
    runs = True
    while runs:
        runs = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order) and all(label in made for label in order[position[stage]].reads):
                task = order[position[stage]]
                arrivals = [end + delay * (maker != stage) for maker, end in map(made.__getitem__, task.reads)]
                length = task.time.numerator * (unit // task.time.denominator)
                clock[stage] = max([clock[stage], *arrivals]) + length
                made |= {label: (stage, clock[stage]) for label in task.makes}
                position[stage] += 1
                runs = True
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            raise DhelixError(f"{programs.name}: stage {stage} waits forever for {order[position[stage]].reads}")
    return Fraction(max(clock), unit)


def busy_times(programs: StagePrograms) -> list[Fraction]:
    """The total time of each stage's tasks, without waiting."""
    return [sum((task.time for task in order), Fraction(0)) for order in programs.orders]


def peak_residuals(programs: StagePrograms, stage: int, weights: Sequence[int]) -> int:
    """The peak of the live residuals on `stage`.

    Args:
      weights: for each chunk, the weight of its residuals for one micro-batch, such as its number of layers.
    """
    live = peak = 0
    for task in programs.orders[stage]:
        takes = 0 if task.takes is None else weights[task.takes]
        frees = 0 if task.frees is None else weights[task.frees]
        peak = max(peak, live, live + takes - (frees if task.hands_over else 0))
        live += takes - frees
    return peak
