"""The U layout and the W schedule, and the other pipeline schedules: data, checks and costs. Start at `schedule.py`."""

from dhelix.passes.pipeline_fold.layouts import (
    fold_layout,
    interleaved_layout,
    linear_layout,
    model_order,
    storage_order,
)
from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule, Work
from dhelix.passes.pipeline_fold.slots import scratch
from dhelix.passes.pipeline_fold.transfers import transfers
from dhelix.passes.pipeline_fold.validation import validate
from dhelix.passes.pipeline_fold.w_schedule import w_schedule

__all__ = [
    "Cell",
    "Layout",
    "Schedule",
    "Work",
    "fold_layout",
    "interleaved_layout",
    "linear_layout",
    "model_order",
    "scratch",
    "storage_order",
    "transfers",
    "validate",
    "w_schedule",
]
