"""The U layout and the W schedule, and the other pipeline schedules: data, checks and costs. Start at `schedule.py`."""

from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule, Work

__all__ = ["Cell", "Layout", "Schedule", "Work"]
