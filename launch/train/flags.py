"""The flags of `dhelix train`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.train import step_flags
from dhelix.launch.train.options import Options

USAGE = """\
usage: dhelix train [flags]

Trains a Llama or mixture-of-experts model on the bytes of a text. Micro-batches are interleaved as two strands
unless --plain is given.

  dhelix train --cpu_devices 8 --mesh dp=2,tp=4              # try it without a GPU
  dhelix train --cpu_devices 8 --mesh dp=2,cp=2,tp=2         # devices share sequences (context parallelism)
  dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2       # folded pipeline of two stages
  dhelix train --preset llama-8b --microbatches 16 --data corpus.txt --checkpoint_dir run1 --save_every 100
  dhelix train ... --checkpoint_dir run1 --resume            # continue run1"""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix train` on `values`."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values)
    real = functools.partial(flags.DEFINE_float, lower_bound=0.0, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, default=False, flag_values=values)
    default = Options()
    step_flags.define(values, default.preset, "all devices, as many as possible on tp, or on ep with experts")
    number(
        "steps",
        default.steps,
        "number of the last step, where the learning-rate schedule ends; keep it when you resume",
        1,
    )
    real("lr", default.lr, "peak learning rate")
    number("warmup", None, "warm-up steps (default: a tenth of the steps, at most 100)", 0)
    number("seed", default.seed, "seed of the initial parameters and of the batches", 0)
    switch("plain", help="train without dhelix's passes")
    switch("interleave", help="train with interleaved strands (the default)")
    step_flags.define_options(values)
    text("data", None, "file or folder to train on (default: the Python standard library)")
    text("trace", None, "folder for a profiler trace of the last step, without CUDA graphs (see `dhelix plan --trace`)")
    text("checkpoint_dir", None, "folder for checkpoints (default: none)")
    number("save_every", None, "steps between checkpoints (default: one checkpoint at the end)", 1)
    switch("resume", help="continue from the newest checkpoint")
    real("peak_tflops", None, "peak TFLOP/s of one device, for MFU (default: known for common GPUs)")
    switch("json", help="print the results as JSON; progress goes to stderr")
    number("cpu_devices", None, "run on this many CPU devices", 1)
    switch("distributed", help="run as one of several processes; Slurm and Kubernetes need no further flags")
    text("coordinator", None, "with --distributed: host:port of process 0")
    number("num_processes", None, "with --distributed: number of processes", 1)
    number("process_id", None, "with --distributed: number of this process, from 0", 0)
