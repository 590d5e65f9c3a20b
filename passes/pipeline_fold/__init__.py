"""Pipeline schedules as data: layouts of layers on stages, the W schedule and other schedules, checks, and costs.

`schedule.py` explains the terms.
"""

from dhelix.passes.pipeline_fold.evaluation import Evaluation, evaluate, evaluate_programs
from dhelix.passes.pipeline_fold.layouts import (
    fold_layout,
    interleaved_layout,
    linear_layout,
    model_order,
    storage_order,
)
from dhelix.passes.pipeline_fold.loop_trips import Trips, trips_of
from dhelix.passes.pipeline_fold.phases import Messages, Pattern, Phase, patterns, phases
from dhelix.passes.pipeline_fold.schedule import Cell, Layout, Schedule, Work
from dhelix.passes.pipeline_fold.schedules.bidirectional import bidirectional
from dhelix.passes.pipeline_fold.schedules.catalogue import INTERLEAVED, LOCKSTEP, SCHEDULES, layout_of, make_schedule
from dhelix.passes.pipeline_fold.schedules.dual_pipe_v import dual_pipe_v
from dhelix.passes.pipeline_fold.schedules.interleaved_si import interleaved_si
from dhelix.passes.pipeline_fold.schedules.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from dhelix.passes.pipeline_fold.schedules.w_schedule import w_schedule
from dhelix.passes.pipeline_fold.schedules.zero_bubble_v import zero_bubble_v
from dhelix.passes.pipeline_fold.slots import scratch
from dhelix.passes.pipeline_fold.tasks import PipelineCosts, StagePrograms
from dhelix.passes.pipeline_fold.transfers import transfers
from dhelix.passes.pipeline_fold.validation import validate

__all__ = [
    "Cell",
    "Evaluation",
    "INTERLEAVED",
    "LOCKSTEP",
    "Layout",
    "Messages",
    "Pattern",
    "Phase",
    "PipelineCosts",
    "SCHEDULES",
    "Schedule",
    "StagePrograms",
    "Trips",
    "Work",
    "bidirectional",
    "dual_pipe_v",
    "evaluate",
    "evaluate_programs",
    "fold_layout",
    "interleaved_layout",
    "interleaved_si",
    "interleaved_one_forward_one_backward",
    "layout_of",
    "linear_layout",
    "make_schedule",
    "model_order",
    "one_forward_one_backward",
    "patterns",
    "phases",
    "scratch",
    "storage_order",
    "transfers",
    "trips_of",
    "validate",
    "w_schedule",
    "zero_bubble_v",
]
