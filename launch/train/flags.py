"""The flags of `dhelix train`, and the text that `--help` prints above them. Imports no jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.train import step_flags
from dhelix.launch.train.options import Options

USAGE = """\
usage: dhelix train [flags]

Trains a Llama on text, byte by byte, its micro-batches interleaved as two strands, or --plain.

  dhelix train --cpu_devices 8 --mesh dp=2,tp=4              # tries it out, without a GPU
  dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2       # layers on two stages, folded
  dhelix train --preset llama-8b --microbatches 16 --data corpus.txt --checkpoint_dir run1 --save_every 100
  dhelix train ... --checkpoint_dir run1 --resume            # goes on where run1 stopped"""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags on `values`."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values)
    real = functools.partial(flags.DEFINE_float, lower_bound=0.0, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, default=False, flag_values=values)
    default = Options()
    step_flags.define(values, default.preset, "all there are")
    number("steps", default.steps, "number of the last step, where the learning rate ends; keep it to resume", 1)
    real("lr", default.lr, "highest learning rate")
    number("warmup", None, "steps of warm-up (default: a tenth, at most 100)", 0)
    number("seed", default.seed, "of the initial parameters and of the batches", 0)
    switch("plain", help="without the passes")
    switch("interleave", help="with interleaved strands (the default)")
    step_flags.define_options(values)
    text("data", None, "file or folder to train on (default: the Python standard library)")
    text("trace", None, "record the last step in this folder, without CUDA graphs; see `dhelix plan --trace`")
    text("checkpoint_dir", None, "folder for checkpoints (default: none)")
    number("save_every", None, "steps between checkpoints (default: one at the end)", 1)
    switch("resume", help="go on from the newest checkpoint")
    real("peak_tflops", None, "of one device, for MFU (default: known for common GPUs)")
    switch("json", help="print the results as JSON; progress goes to stderr")
    number("cpu_devices", None, "run on so many CPU devices", 1)
    switch("distributed", help="several processes; under Slurm and Kubernetes they find each other")
    text("coordinator", None, "host:port of process 0, with --distributed")
    number("num_processes", None, "with --distributed", 1)
    number("process_id", None, "with --distributed", 0)
