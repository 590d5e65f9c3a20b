"""The flags of `dhelix fold`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.shown.json_output import define_json
from dhelix.models.presets import PRESETS
from dhelix.passes.pipeline_fold import SCHEDULES

USAGE = """\
usage: dhelix fold [flags]

Shows how a pipeline lays out its layers on stages and schedules its micro-batches, and compares what all schedules
cost. By default: the W schedule on the U layout, where each stage runs one micro-batch's forward together with
another one's backward. Nothing is compiled or run.

  dhelix fold --layers 32 --stages 4 --microbatches 12 --out fold.svg
  dhelix fold --preset phi-moe-42b --stages 4 --microbatches 12 --schedule 1f1b
  dhelix fold --layers 30 --stages 4 --microbatches 12 --si_gain 0.2 --json            # or --json FILE

Times may be in any unit; the defaults are in forward passes of one layer."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix fold` on `values`. The defaults are those of DHelix figure 8 (arXiv 2411.15871)."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    real = functools.partial(flags.DEFINE_float, flag_values=values, lower_bound=0.0)
    flags.DEFINE_enum("preset", None, list(PRESETS), "model preset that gives the number of layers", flag_values=values)
    number("layers", None, "number of layers of the model (default: the preset's, or 32)")
    number("stages", 4, "number of pipeline stages")
    number("microbatches", 12, "number of micro-batches per step")
    flags.DEFINE_enum("schedule", "w", list(SCHEDULES), "schedule to show", flag_values=values)
    number("chunks_per_stage", 2, "chunks per stage of the interleaved schedules")
    real("forward", 1.0, "time of one layer's forward pass")
    real("backward", 2.0, "time of one layer's backward pass")
    gain = "fraction of a layer's forward plus backward time that co-execution of both strands saves"
    real("si_gain", 0.0, gain, upper_bound=1.0)
    real("send", 0.0, "time of one message between stages")
    flags.DEFINE_string("out", None, "draw the schedule to this .png or .svg file", flag_values=values)
    define_json(values)
