"""The flags of `dhelix shard`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

import functools

from absl import flags

from dhelix.launch.defaults import DEFAULT_GPU
from dhelix.launch.shown.json_output import define_json
from dhelix.launch.train import step_flags
from dhelix.models.presets import PRESETS
from dhelix.passes.sharding.planner import OBJECTIVES
from dhelix.passes.sharding.sizes import TRAINERS
from dhelix.passes.sharding.step_times import SPLITS
from dhelix.profiles import hardware
from dhelix.profiles.papers import clusters
from dhelix.profiles.profile import SETTINGS

WITHOUT_LIVE = (
    "model", "cluster", "nodes", "recompute", "bytes", "bucket", "split", "mfu", "intra_bandwidth", "inter_bandwidth",
    "axes",
)  # fmt: skip
"""Flags that describe what `--live` takes from the step."""
ONLY_LIVE = (
    "preset", "dtype", "remat", "unrolled", "capacity", "mesh", "context", "sharding", "states", "pp", "pipeline",
    "states_group", "chunks_per_stage", "sends_beside", "compare",
)  # fmt: skip
"""Flags of `dhelix train` that have an effect with `--live` alone."""

USAGE = """\
usage: dhelix shard --model NAME [flags]
       dhelix shard --live --preset NAME [flags of dhelix train]

Chooses over how many GPUs of a node, and over how many nodes, parameters, gradients and optimizer states are sharded,
so that a step fits into memory and loses least to communication. With --live, a step of `dhelix train` is compiled for
its memory and compute, on the GPUs at hand or without any. Otherwise nothing is compiled. Nothing is run.

  dhelix shard --model llama-7b --cluster amsp-a800 --nodes 128 --gpus_per_node 8
  dhelix shard --model llama-8b --hardware H200 --nodes 4 --microbatches 8 --bytes single --chart shard.svg
  dhelix shard --model llama-30b --cluster amsp-a800 --recompute --json            # or --json FILE
  dhelix shard --model llama-7b --cluster amsp-a800 --factors 8x1,8x1,8x1         # what other factors cost
  dhelix shard --model llama-7b --nodes 2 --groups embedding,head --out plan.json # factors for each group
  dhelix shard --live --preset llama-8b --layers 4 --mesh dp=8 --out plan.json   # for dhelix train --plan plan.json

Times of collectives come from a profile of the GPU, and from the links' bandwidths where nothing was measured."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix shard` on `values`."""
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    real = functools.partial(flags.DEFINE_float, flag_values=values, lower_bound=1e-3)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    switch = functools.partial(flags.DEFINE_bool, flag_values=values)
    switch("live", False, "plan for the step of `dhelix train` that --preset, --mesh and its other flags describe")
    choice("model", None, list(PRESETS), "model to shard")
    number("layers", None, "number of layers (default: the model's)")
    choice("cluster", None, list(clusters.ALL), "cluster of a paper, instead of --hardware")
    choice("hardware", DEFAULT_GPU, hardware.GPUS, "GPU to plan for")
    choice("link", hardware.LINKS[0], list(hardware.LINKS), "link between the GPUs of a server")
    choice("setting", "default", list(SETTINGS), "launch setting of the profile's times")
    text("profile", None, "file with a profile of this machine, which also names the GPU and the link")
    number("nodes", None, "number of nodes (default: the cluster's, or 1)")
    number("gpus_per_node", None, "GPUs of a node (default: the cluster's or the GPU's)")
    real("intra_bandwidth", None, "GB/s of each GPU inside a node where nothing was measured (default: of the GPU)")
    real("inter_bandwidth", None, "GB/s of each GPU between nodes where nothing was measured (default: of the GPU)")
    number("batch", None, "sequences of a micro-batch on one GPU (default: 1); with --live, of a step on all GPUs")
    number("vocab", None, "vocabulary size (default: the model's)")
    number("seq", None, "tokens of a sequence (default: the model's)")
    number("microbatches", None, "micro-batches of a step (default: 1; with --live 4, as in `dhelix train`)")
    switch("recompute", False, "whether backward computes the forward of each layer again")
    choice(
        "bytes",
        "mixed",
        list(TRAINERS),
        "mixed: bf16 parameters and gradients, fp32 states; single: all in fp32; "
        "bf16-sums: single, with gradients summed over devices in bf16, as XLA does under automatic sharding",
    )
    real("memory", None, "GB of memory of a GPU that may be used (default: all of it)")
    real("bucket", 256.0, "MB of an all-reduce bucket")
    real("mfu", None, "share of the GPU's peak that compute reaches, attention not halved (default: of the GPU)")
    choice("objective", OBJECTIVES[0], list(OBJECTIVES), "minimise exposed communication, or the sum of all of it")
    choice(
        "split", None, list(SPLITS),
        "between: whole tensors for each owner of optimizer states; inside: a piece of each (default: inside, as "
        "dhelix executes it; with --cluster between, as in the paper)",
    )  # fmt: skip
    _define_choices(values)
    switch("strict", False, "fail if a time of the chosen factors was not measured")
    flags.DEFINE_list(
        "topology", [], "JSON file with the leaf switch of each node, dump of NCCL_TOPO_DUMP_FILE, or both: also order "
        "nodes and GPUs", flag_values=values,
    )  # fmt: skip
    text("chart", None, "draw memory against exposed time of all factors to this .png or .svg file")
    text("out", None, "write the factors to this plan file")
    flags.DEFINE_list(
        "axes", [], "with --out: your data-parallel mesh axes, the major one first (default: dp, or dp_1,dp_0, ...)",
        flag_values=values,
    )  # fmt: skip
    number("top", 8, "largest number of rows in a table")
    define_json(values)
    of_step = flags.FlagValues()
    step_flags.define(of_step, None, "4 GPUs, on dp")
    for name in (name for name in ONLY_LIVE if name != "compare"):
        of_step[name].help = f"with --live: {of_step[name].help}"
        values[name] = of_step[name]


def _define_choices(values: flags.FlagValues) -> None:
    """Defines the flags that say for what factors are chosen, or which ones to show."""
    help_text = "with --live: compile choices whose times are within 10 % as they would run; their programs decide"
    flags.DEFINE_bool("compare", True, help_text, flag_values=values)
    flags.DEFINE_list(
        "factors", [], "evaluate P,G,OS, each GPUsxNODES such as 8x1, instead of choosing them", flag_values=values
    )
    flags.DEFINE_list(
        "groups", [], "choose factors for each of these groups of parameters, and for the others: keys such as "
        "embedding, head, layers, experts, 'layers/*norm'", flag_values=values,
    )  # fmt: skip
