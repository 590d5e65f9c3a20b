"""The schedules that the executor can run, by name.

name             layout         chunks of a stage    program
w                fold           2                    lockstep, SI blocks
interleaved_si   interleaved    `chunks_per_stage`   lockstep, SI blocks
1f1b             linear         1                    branches
interleaved      interleaved    `chunks_per_stage`   branches
dualpipev        fold           2                    branches, SI blocks

An SI block is a forward and a backward that a stage co-executes.
"""

from __future__ import annotations

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import fold_layout, interleaved_layout, linear_layout
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule
from dhelix.passes.pipeline_fold.schedules.dual_pipe_v import dual_pipe_v
from dhelix.passes.pipeline_fold.schedules.interleaved_si import interleaved_si
from dhelix.passes.pipeline_fold.schedules.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from dhelix.passes.pipeline_fold.schedules.w_schedule import w_schedule

_MAKERS = {
    "w": w_schedule,
    "interleaved_si": interleaved_si,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved_one_forward_one_backward,
    "dualpipev": dual_pipe_v,
}
SCHEDULES = tuple(_MAKERS)
LOCKSTEP = ("w", "interleaved_si")
"""Schedules in which all stages run SI blocks in the same ticks. Their programs have no branches."""
INTERLEAVED = ("interleaved_si", "interleaved")
"""Schedules for which the user chooses the number of chunks per stage."""


def layout_of(name: str, layers: int, stages: int, chunks_per_stage: int = 2) -> Layout:
    """The layout that schedule `name` needs. Raises DhelixError for an unknown name, or if a chunk would be empty.

    Args:
      chunks_per_stage: number of chunks per stage of an interleaved schedule. Other schedules have a fixed number.
    """
    _check(name)
    if name == "1f1b":
        return linear_layout(layers, stages)
    if name in INTERLEAVED:
        return interleaved_layout(layers, stages, chunks_per_stage)
    return fold_layout(layers, stages)


def make_schedule(name: str, layout: Layout, microbatches: int) -> Schedule:
    """Makes the schedule `name`, one of SCHEDULES. `layout` comes from `layout_of`.

    Raises:
      DhelixError: the name is unknown, the schedule needs another layout, or there is no micro-batch.
    """
    _check(name)
    return _MAKERS[name](layout, microbatches)


def _check(name: str) -> None:
    if name not in _MAKERS:
        raise DhelixError(f"there is no pipeline schedule {name!r}: take one of {', '.join(SCHEDULES)}")
