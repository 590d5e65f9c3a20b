"""Flags that several commands share. They describe the train step, and how it is interleaved.

`define` defines the flags that describe the step, for `dhelix train`, `dhelix plan` and `dhelix profile`.
`define_options` defines flags for options of `StepOptions`. `dhelix train` has a flag for every option that allows a
flag. `dhelix plan` has only the flags for the order of operators and for the profile.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from absl import flags

from dhelix.launch.train.options import Options
from dhelix.models.presets import PRESETS
from dhelix.passes.pipeline_fold import SCHEDULES
from dhelix.runtime.step import options as step_options
from dhelix.runtime.step.options import StepOptions

_NAMES = (
    "preset", "layers", "seq", "vocab", "dtype", "remat", "unrolled", "capacity", "microbatches", "mesh", "context",
    "sharding", "states", "states_group", "pp", "pipeline", "chunks_per_stage", "sends_beside", "batch",
)  # fmt: skip


def define(values: flags.FlagValues, preset: str | None, mesh: str) -> None:
    """Defines on `values` the flags that describe the train step.

    Args:
      preset: default of `--preset`.
      mesh: words for the help text: the mesh that an empty `--mesh` stands for.
    """
    number = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    default = Options()
    choice("preset", preset, list(PRESETS), "model preset")
    number("layers", None, "number of layers (default: the preset's)")
    number("seq", None, "sequence length (default: the preset's)")
    number("vocab", None, "vocabulary size (default: the preset's)")
    choice(
        "dtype", None, ["float32", "bfloat16", "float16"], "data type that layers compute in (default: the preset's)"
    )
    text("remat", None, "rematerialization: none, full or a policy of jax.checkpoint_policies (default: the preset's)")
    flags.DEFINE_bool(
        "unrolled",
        default.unrolled,
        "write the layers out one after the other, instead of scanning over stacked layers; often faster for experts",
        flag_values=values,
    )
    flags.DEFINE_float(
        "capacity",
        None,
        "capacity factor of experts (default: the preset's)",
        lower_bound=0.0,
        flag_values=values,
    )
    number("microbatches", default.microbatches, "number of micro-batches per step")
    text(
        "mesh",
        default.mesh,
        f"devices on the axes dp, cp and tp, with experts also on ep, such as dp=2,tp=4 (default: {mesh})",
    )
    choice(
        "context",
        None,
        ["ring", "scanned-ring", "all-gather"],
        "with cp in --mesh: how devices exchange keys and values within attention; scanned-ring is the ring as a loop, "
        "for large cp (default: ring)",
    )
    choice(
        "sharding",
        default.sharding,
        ["shard_map", "auto", "fsdp"],
        "who inserts collectives: shard_map (the model's code), auto (XLA; not with experts or cp), fsdp (parameters "
        "also split over dp; by XLA, with experts or cp by the model's code; not with --pp)",
    )
    states = "how model states are sharded over dp: zero1 and others, or a plan file; groups of parameters may differ"
    text("states", None, f"{states}: zero3,embedding=zero1 (default: as --sharding says)")
    number("states_group", None, "devices of dp over which --states shards, such as those of a node (default: all)")
    number("pp", default.pp, "number of pipeline stages; each stage has the devices of --mesh")
    choice("pipeline", None, list(SCHEDULES), "pipeline schedule (default: w, which interleaves two strands)")
    number("chunks_per_stage", None, "chunks per stage of the interleaved schedules (default: 2)")
    flags.DEFINE_bool(
        "sends_beside",
        default.sends_beside,
        "let messages of lockstep schedules overlap with the last layers of a tick; for slow links, needs more memory",
        flag_values=values,
    )
    number("batch", None, "number of sequences per step (default: one per micro-batch and shard of dp and ep)")


def define_options(values: flags.FlagValues, names: Collection[str] | None = None) -> None:
    """Defines flags for the options of `StepOptions` that allow a flag. If given, `names` limits them to some options.

    Every flag has the default None, so that a command can tell which flags were given. For an option whose flag was not
    given, the step uses the default of `StepOptions`.
    """
    for name, flag in step_options.flags().items():
        if names is not None and name not in names:
            continue
        if flag.choices:
            flags.DEFINE_enum(name, None, list(flag.choices), flag.help, flag_values=values)
        elif flag.least is not None:
            flags.DEFINE_integer(name, None, flag.help, lower_bound=flag.least, flag_values=values)
        elif isinstance(getattr(StepOptions, name), bool):
            flags.DEFINE_bool(name, None, flag.help, flag_values=values)
        else:
            flags.DEFINE_string(name, None, flag.help, flag_values=values)


def given(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `StepOptions` whose flags were given, by name."""
    return {name: chosen[name] for name in step_options.flags() if chosen.get(name) is not None}


def options(chosen: Mapping[str, Any], plain: bool = False) -> Options:
    """The `Options` of the step that the flags describe."""
    return Options(**{name: chosen[name] for name in _NAMES}, plain=plain)


def words(options: Options) -> list[str]:
    """Flags that describe the step. Defaults are left out, but for the model and the number of micro-batches."""
    found, usual = list[str](), Options()
    for name in _NAMES:
        value = getattr(options, name)
        if value is True:
            found.append(f"--{name}")
        elif name in ("preset", "microbatches") or value != getattr(usual, name):
            found += [f"--{name}", str(value)]
    return found
