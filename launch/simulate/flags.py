"""The flags of `dhelix simulate`, what they say of the cluster, and the text that `--help` prints above them.

This module does not import jax.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from absl import flags

from dhelix.errors import DhelixError
from dhelix.launch.shown.json_output import define_json
from dhelix.launch.train import step_flags
from dhelix.passes.simulation.systems import SYSTEMS
from dhelix.profiles.clusters import known
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.clusters.constants import CONSTANTS
from dhelix.profiles.profile import SETTINGS

USAGE = f"""\
usage: dhelix simulate --preset NAME --cluster NAME_OR_FILE [flags]

Simulates a train step on a cluster that need not exist. The step is compiled here for all GPUs of the mesh, without any
GPU, in each way to run it that is compared. Times come from measured profiles where there are some, and from the
constants of the cluster elsewhere. The output says how much of them is a guess.

  dhelix simulate --preset llama-8b --cluster h100-infiniband --mesh dp=8,tp=8
  dhelix simulate --preset llama-66b --cluster dhelix-a800 --mesh cp=2,tp=8 --microbatches 8 --systems xla,strands
  dhelix simulate --search --preset llama-8b --cluster h100-infiniband --batch 512 --out llama-8b-64
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
    flags.DEFINE_bool(
        "search", False, "search the fastest mesh, micro-batch, rematerialization, states and schedule; flags that are "
        "given are fixed", flag_values=values,
    )  # fmt: skip
    count = functools.partial(flags.DEFINE_integer, lower_bound=1, flag_values=values)
    count("simulations", 40, "with --search: the most steps that are simulated, besides XLA's order of the best one")
    count("processes", None, "with --search: steps that are simulated at once (default: one for each core)")
    text("out", None, "with --search: folder for the launch command, the plan and all results")
    define_json(values)


def cluster_of(chosen: Mapping[str, Any]) -> Cluster:
    """The cluster that the flags describe. Raises DhelixError if there is none."""
    cluster = known.find(chosen["cluster"])
    if chosen["nodes"]:
        cluster = cluster.with_nodes(chosen["nodes"])
    values: dict[str, Any] = {}
    for part in chosen["constants"]:
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise DhelixError(f"--constants {part}: give NAME=NUMBER, such as between_gb_per_second=25") from None
    return cluster.with_constants(values, "--constants")
