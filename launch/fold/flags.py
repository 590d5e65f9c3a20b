"""The flags of `dhelix fold`, and the text that `--help` prints above them. Imports no jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.passes.pipeline_fold import SCHEDULES

USAGE = """\
usage: dhelix fold [flags]

Shows the U layout and the W schedule of a pipeline whose stages run one micro-batch forward beside another one
backward, and what it and other schedules cost. Nothing is compiled and nothing runs.

  dhelix fold --layers 32 --stages 4 --microbatches 12 --out fold.svg
  dhelix fold --layers 32 --stages 4 --microbatches 12 --schedule 1f1b
  dhelix fold --layers 30 --stages 4 --microbatches 12 --si_gain 0.2 --json            # or --json FILE

Times are in any unit; by default, in forward passes of one layer."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags on `values`. The defaults are those of DHelix figure 8 (arXiv 2411.15871)."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    real = functools.partial(flags.DEFINE_float, flag_values=values, lower_bound=0.0)
    number("layers", 32, "layers of the model")
    number("stages", 4, "pipeline stages")
    number("microbatches", 12, "micro-batches per step")
    flags.DEFINE_enum("schedule", "w", list(SCHEDULES), "the schedule that is shown", flag_values=values)
    number("chunks_per_stage", 2, "of the interleaved schedules")
    real("forward", 1.0, "time of one layer's forward pass")
    real("backward", 2.0, "time of one layer's backward pass")
    gain = "share of both that is gained where one strand goes forward beside the other one backward"
    real("si_gain", 0.0, gain, upper_bound=1.0)
    real("send", 0.0, "time of a message between stages")
    flags.DEFINE_string("out", None, "draw the schedule to this file, a .png or .svg", flag_values=values)
    _define_json(values)


def _define_json(values: flags.FlagValues) -> None:
    """Defines `--json`: a switch, as in other commands, that may also name a file."""
    words = "print everything as JSON; with --json=FILE, write it to that file"
    flag = flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "json", None, words)
    flag.boolean = True  # tells absl that the value may be left out
    flags.DEFINE_flag(flag, values)
