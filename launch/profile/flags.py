"""The flags of `dhelix profile`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.defaults import DEFAULT_GPU, check_given, check_writable
from dhelix.launch.train import step_flags
from dhelix.profiles import hardware
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix profile --preset NAME | DUMP | --collectives | --compare FILE [flags]

Measures how long the operators and collectives of one train step take on this machine's GPUs, alone and in pairs, and
stores the times in a profile. Only missing times are measured, so an interrupted command continues when run again.
Without GPUs it lists what it would measure and what is already known.

  dhelix profile --preset llama-8b --layers 4 --mesh dp=1,tp=4 --microbatches 4     # a step of `dhelix train`
  dhelix profile DUMP --settings default,connections1 --heat_map pairs.png          # any step
  dhelix profile --collectives --link no-p2p                                        # tables of collectives
  dhelix profile --compare A.json --out B.json                                      # do two machines agree?

DUMP is a file of XLA_FLAGS=--xla_dump_to=DIR (*after_optimizations.hlo.pb or .txt), or its folder, in which the
largest such module is read."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix profile` on `values`. `step_flags` defines the flags that describe the step."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, flag_values=values)
    step_flags.define(values, None, "all devices, as many as possible on tp, or on ep with experts")
    switch("interleave", False, "measure the step with interleaved strands instead of the plain one")
    flags.DEFINE_list(
        "settings", ["default"], f"launch settings to measure, from {', '.join(SETTINGS)}", flag_values=values
    )
    choice("link", hardware.LINKS[0], list(hardware.LINKS), "link between the GPUs")
    switch("collectives", False, "measure tables of collectives by kind and size")
    bases = "also measure the paper's operator bases for these model sizes; an unknown size lists all sizes"
    flags.DEFINE_list("bases", [], bases, flag_values=values)
    switch("pairs", True, "also measure pairs that run at the same time")
    switch("force", False, "measure again what is already known")
    flags.DEFINE_float(
        "budget_s", None, "stop after this many seconds (default: no limit)", lower_bound=1.0, flag_values=values
    )
    text("out", None, "profile file (default: in the last folder of DHELIX_PROFILES, or in ~/.cache/dhelix/profiles)")
    text("keep", None, "folder for the steps as compiled for this machine's GPUs (default: not kept)")
    switch("explain", False, "only list what would be measured (always so without GPUs)")
    text("recorded", None, "take measurements from this profile instead of from GPUs; needs --out")
    choice(
        "hardware",
        None,
        hardware.GPUS,
        f"GPU to assume if this machine has none (default: the dump's, or {DEFAULT_GPU})",
    )
    text("compare", None, "show how well the profile agrees with this one; without a step, do nothing else")
    switch("json", False, "print everything as JSON instead of tables; progress goes to stderr")
    number("top", 8, "largest number of rows in a table")
    text(
        "heat_map",
        None,
        "draw how well the longest operators overlap with collectives; one PNG per launch setting",
    )
    text("pgle", None, "write the step's times under the first setting to this file, as XLA's PGLE cost text (.pbtxt)")
    text(
        "perf_table", None, "write the first setting's collectives to this file, as XLA's collective performance table"
    )


def check(values: flags.FlagValues, arguments: list[str]) -> None:
    """Raises DhelixError if a path does not exist, or a file cannot be written."""
    check_given(arguments[:1], "a dump that exists, or --preset NAME")
    check_given([values.compare], "a profile that exists")
    check_writable((values.heat_map, values.pgle, values.perf_table))
