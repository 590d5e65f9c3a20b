"""The flags of `dhelix tune`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.train import step_flags
from dhelix.profiles import hardware
from dhelix.profiles.profile import SETTINGS

NCCL = "nccl"
"""The implementation without collective matmuls."""

STEP_OPTIONS = ("schedule", "plan", "profile", "skew", "memory_limit", "max_in_flight", "collective_matmul")
"""Options of `strand_interleave` that have a flag: they decide what collectives overlap with."""

USAGE = """\
usage: dhelix tune --preset NAME [flags]

Tunes how NCCL runs each collective of a train step, together with the computation that it overlaps (Lagom): algorithm,
protocol and channels of each collective, and buffers, channels and threads of the whole process. It measures the step
on this machine's GPUs. NCCL's defaults stay where nothing is faster. Then it orders the step for the tuned collectives
and tunes again, as long as this gains.

  dhelix tune --preset llama-8b --layers 8 --mesh tp=2 --settings connections1 --out tuned.json    # needs GPUs
  dhelix tune --plan plan.json --preset llama-8b --layers 8 --mesh tp=2 --out plan.json            # needs GPUs
  dhelix train --plan tuned.json --preset llama-8b --layers 8 --mesh tp=2                          # needs GPUs

The same command goes on where an interrupted one stopped. For a step of your own, call dhelix.tune."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix tune` on `values`. `step_flags` defines the flags that describe the step."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    real = functools.partial(flags.DEFINE_float, flag_values=values)
    step_flags.define(values, None, "all devices, as many as possible on tp, or on ep with experts")
    step_flags.define_options(values, STEP_OPTIONS)
    flags.DEFINE_list(
        "settings",
        None,
        f"launch settings to tune under, from {', '.join(SETTINGS)} (default: connections1, and what "
        "is usually the fastest over --link)",
        flag_values=values,
    )
    flags.DEFINE_list(
        "implementations",
        None,
        "what carries out collectives next to matrix products: nccl, or collective matmuls as --collective_matmul has "
        "them, such as auto or ring; all are measured (default: nccl,auto; with --collective_matmul that one)",
        flag_values=values,
    )
    flags.DEFINE_enum("link", hardware.LINKS[0], list(hardware.LINKS), "link between the GPUs", flag_values=values)
    flags.DEFINE_bool(
        "process", True, "also tune buffers, channels and threads of the whole process", flag_values=values
    )
    flags.DEFINE_bool(
        "order", True, "also order the step anew for the tuned collectives, and tune again", flag_values=values
    )
    real("minutes", 10.0, "time after which the search stops with the best so far", lower_bound=0.0)
    real("patience_s", 90.0, "a measurement that takes longer than this counts as failed", lower_bound=1.0)
    text("records", None, "file of measurements, from which an interrupted command goes on (default: in ~/.cache)")
    flags.DEFINE_bool("force", False, "measure again what is already known", flag_values=values)
    text("out", None, "plan file to write; with --plan, the plan with settings of collectives added")
    text("picture", None, "draw times of computation and communication over channels and chunks to this .png or .svg")
    flags.DEFINE_bool("json", False, "print everything as JSON; progress goes to stderr", flag_values=values)
