"""The flags of `dhelix run`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from dhelix.launch.train import step_flags
from dhelix.runtime.step import options as step_options

USAGE = """\
usage: dhelix run [flags] SCRIPT [its arguments]
       dhelix run [flags] -m MODULE [its arguments]

Runs a training program that nobody decorated. Each program that it compiles is looked at. Steps with a loop over
micro-batches and collectives run as two interleaved strands; all others compile from the same bytes as without dhelix.
At the end, a report says which were changed, and which were left alone and why.

  dhelix run train.py --steps 100
  dhelix run --only train_step --schedule list -m my_project.train config.yaml
  eval "$(dhelix run --env)"; srun python train.py          # for launchers of many processes

The program's exit code, output and traceback are its own. DHELIX=off switches everything off."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix run` on `values`."""
    names = step_options.flags().keys() - {"verify"}
    step_flags.define_options(values, names)
    flags.DEFINE_list("only", [], "change only functions of these names, such as train_*", flag_values=values)
    flags.DEFINE_list("skip", [], "leave functions of these names alone", flag_values=values)
    text = "TOML file with only, skip, [options], and [functions.NAME] for options of single functions"
    flags.DEFINE_string("options", None, text, flag_values=values)
    flags.DEFINE_string("report", None, "write the report to this file, as JSON", flag_values=values)
    flags.DEFINE_bool("quiet", False, "print no report at the end", flag_values=values)
    words = "print the environment variables as shell commands instead of running anything"
    flags.DEFINE_bool("env", False, words, flag_values=values)


def split(values: flags.FlagValues, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides the arguments of the command line into those of `dhelix run`, and the program with its own arguments."""
    n = 0
    while n < len(arguments):
        word = arguments[n]
        if word == "--":
            return list(arguments[:n]), list(arguments[n + 1 :])
        if word == "-m" or not word.startswith("-"):
            break
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        takes_value = "=" not in word and name in values and not values[name].boolean
        n += 2 if takes_value else 1
    return list(arguments[:n]), list(arguments[n:])
