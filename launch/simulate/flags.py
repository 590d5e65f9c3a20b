"""The flags of `dhelix simulate`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.shown.json_output import define_json
from dhelix.launch.train import step_flags
from dhelix.passes.simulation.systems import SYSTEMS
from dhelix.profiles.clusters import known
from dhelix.profiles.clusters.constants import CONSTANTS
from dhelix.profiles.profile import SETTINGS

USAGE = f"""\
usage: dhelix simulate --preset NAME --cluster NAME_OR_FILE [flags]

Simulates a train step on a cluster that need not exist. The step is compiled here for all GPUs of the mesh, without any
GPU, in each way to run it that is compared. Times come from measured profiles where there are some, and from the
constants of the cluster elsewhere. The output says how much of them is a guess.

  dhelix simulate --preset llama-8b --cluster h100-infiniband --mesh dp=8,tp=8
  dhelix simulate --preset llama-66b --cluster dhelix-a800 --mesh cp=2,tp=8 --microbatches 8 --systems xla,strands
  dhelix simulate --preset llama-8b --cluster h100-roce --nodes 128 --constants between_gb_per_second=25 --json

Clusters: {", ".join(known.names())}; or a JSON file, as docs/guide/simulate.md shows.
Systems: {"; ".join(f"{name} ({system.words})" for name, system in SYSTEMS.items())}."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix simulate` on `values`."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    names = functools.partial(flags.DEFINE_list, flag_values=values)
    factor = functools.partial(flags.DEFINE_float, lower_bound=1.0, upper_bound=100.0, flag_values=values)
    step_flags.define(values, None, "all GPUs of the cluster on one axis")
    text("cluster", "h100-infiniband", "the cluster: a name, or a JSON file")
    flags.DEFINE_integer("nodes", None, "number of nodes (default: the cluster's)", lower_bound=1, flag_values=values)
    names("constants", [], f"other constants, such as between_gb_per_second=25: {', '.join(CONSTANTS)}")
    names("systems", ["blocking", "xla", "strands"], f"ways to run the step, of {', '.join(SYSTEMS)}")
    text("profile", None, "file with measured times of the cluster's GPU (default: the shipped ones and your own)")
    flags.DEFINE_enum(
        "setting", "default", list(SETTINGS), "launch setting whose times in the profile are used", flag_values=values
    )
    factor("slowest_gpu", 1.0, "how many times longer the slowest GPU computes, for which all others wait")
    factor("slowest_link", 1.0, "how many times longer collectives take until their slowest part has arrived")
    define_json(values)
