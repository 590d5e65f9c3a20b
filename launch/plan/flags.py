"""The flags of `dhelix plan`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.defaults import DEFAULT_GPU, check_given, check_writable, define_inter_bandwidth
from dhelix.launch.train import step_flags
from dhelix.profiles import hardware
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix plan --preset NAME | DUMP | PLAN --trace DIR [flags]

Plans, from measured costs and without a GPU, which operators of the two strands run together. Writes the plan for
people and for `dhelix train --plan` or strand_interleave(plan=...).

  dhelix plan --preset llama-8b --layers 8 --mesh tp=4 --microbatches 16 --out plan.json --picture plan.png
  dhelix plan --preset llama-8b --layers 8 --mesh tp=4 --link no-p2p --settings default,connections1
  dhelix plan --preset llama-8b --layers 8 --mesh tp=4 --bound   # how much other orders could save at most
  dhelix plan DUMP --json                                        # any compiled step
  dhelix plan plan.json --trace DIR                              # measured times of segments (dhelix train --trace)

DUMP is a file of XLA_FLAGS=--xla_dump_to=DIR (*after_optimizations.hlo.pb or .txt), or its folder."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix plan` on `values`. `step_flags` defines the flags that describe the step."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    step_flags.define(values, None, "4 GPUs, on tp, or on ep with experts")
    choice("link", hardware.LINKS[0], list(hardware.LINKS), "link between the GPUs")
    choice("hardware", None, hardware.GPUS, f"GPU to plan for (default: the dump's, or {DEFAULT_GPU})")
    number("gpus_per_node", None, "GPUs per node (default: 8; with --link two-nodes, half of the step's GPUs)")
    define_inter_bandwidth(values)
    flags.DEFINE_list(
        "settings",
        [],
        f"launch settings to plan for, from {', '.join(SETTINGS)} (default: all in the profile)",
        flag_values=values,
    )
    step_flags.define_options(values, ("schedule", "profile", "memory_limit", "max_in_flight"))
    flags.DEFINE_list(
        "skew",
        [],
        "numbers of layers to try by which the strands are apart, such as 0,2 (default: 0)",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "bound", False, "prove how much other orders could save at most (takes minutes)", flag_values=values
    )
    text("trace", None, "folder of a profiler trace: show how long the plan's segments took in it, without planning")
    text("out", None, "write the plan to this file")
    text("picture", None, "draw the pairing to this PNG file")
    flags.DEFINE_bool("json", False, "print everything as JSON; progress goes to stderr", flag_values=values)
    number("top", 12, "largest number of rows in a table")


def check(values: flags.FlagValues, arguments: list[str]) -> None:
    """Raises DhelixError if a path does not exist, or a file cannot be written."""
    if not values.preset:  # with a dump and a preset, the dump is the mistake
        check_given(arguments[:1], "a plan that exists" if values.trace else "a dump that exists, or --preset NAME")
    check_given([values.trace], "a folder of jax.profiler.trace")
    check_writable((values.out, values.picture))
