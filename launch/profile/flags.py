"""The flags of `dhelix profile`, and the text that `--help` prints above them. Imports no jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.defaults import DEFAULT_GPU
from dhelix.launch.train import step_flags
from dhelix.profiles import hardware
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix profile --preset NAME | DUMP | --collectives | --compare FILE [flags]

Measures what the operators and collectives of one train step cost on this machine's GPUs, alone and two at once, and
keeps it in a file. Only what the file lacks is measured; interrupt it whenever you like, the same command goes on.
Without GPUs it says what it would measure, and what is known already.

  dhelix profile --preset llama-8b --layers 4 --mesh dp=1,tp=4 --microbatches 4     # a step of `dhelix train`
  dhelix profile DUMP --settings default,connections1 --heat_map pairs.png          # any step
  dhelix profile --collectives --link no-p2p                                        # tables of collectives
  dhelix profile --compare A.json --out B.json                                      # do two machines agree?

DUMP is a file of XLA_FLAGS=--xla_dump_to=DIR (*after_optimizations.hlo.pb or .txt), or its folder: then the largest
such module."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags on `values`; the flags of the step are those of `dhelix train`."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, flag_values=values)
    step_flags.define(values, None, "all there are")
    switch("interleave", False, "the step with interleaved strands instead of the plain one")
    flags.DEFINE_list("settings", ["default"], f"launch settings, of {', '.join(SETTINGS)}", flag_values=values)
    choice("link", hardware.LINKS[0], list(hardware.LINKS), "how the GPUs reach each other")
    switch("collectives", False, "measure the tables of collectives")
    bases = "the paper's operator bases too, by the model's size; of another size an error lists all"
    flags.DEFINE_list("bases", [], bases, flag_values=values)
    switch("pairs", True, "measure two at once, too")
    switch("force", False, "measure again what is known")
    flags.DEFINE_float("budget_s", None, "stop after so many seconds", lower_bound=1.0, flag_values=values)
    text("out", None, "the profile's file (default: in DHELIX_PROFILES' last folder, or ~/.cache/dhelix/profiles)")
    text("keep", None, "folder to keep the steps in as they were compiled for this machine's GPUs")
    switch("explain", False, "measure nothing, say what would be; what happens without GPUs")
    text("recorded", None, "take measurements out of this profile instead of GPUs; needs --out")
    choice(
        "hardware",
        None,
        hardware.GPUS,
        f"without GPUs: which ones (default: the dump's, or {DEFAULT_GPU})",
    )
    text("compare", None, "say how far the file agrees with this profile; without a step, that alone")
    switch("json", False, "print everything as JSON instead of tables; progress goes to stderr")
    number("top", 8, "how many rows a table shows")
    text(
        "heat_map",
        None,
        "draw how well the longest operators overlap with collectives, a PNG for each setting",
    )
    text("pgle", None, "write the step's times under the first setting as XLA's PGLE cost text (.pbtxt)")
    text("perf_table", None, "write the first setting's collectives as XLA's collective performance table")
