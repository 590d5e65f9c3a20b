"""From flags to what the planner needs: sizes of the model, speed of the GPU, times of collectives.

The sizes follow from counts of the model's configuration (`DecoderConfig`), without JAX. The speed of a GPU follows
from its description: matrix products and attention reach parts of its peak. `--mfu` replaces that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.shard.groups import groups_of, keys_of, notes_of
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.presets import PRESETS
from dhelix.passes.sharding.collective_times import CollectiveTimes, times_of
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.groups import ParameterGroup
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.sizes import BF16_SUMS, OPS_PER_PARAMETER, TRAINERS, Batch, Matrix, ModelSizes, Module
from dhelix.passes.sharding.step_times import Compute, Job
from dhelix.profiles import hardware as gpus
from dhelix.profiles.estimates.estimator import hardware_of
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.papers import clusters
from dhelix.profiles.profile import Profile

_GB = 1e9


@dataclass(frozen=True)
class Task:
    """What one call of `dhelix shard` plans.

    Attributes:
      job: the model, the batch and the speed of a GPU.
      mesh: all data-parallel GPUs.
      hardware: the GPU.
      link: link of the profile.
      setting: launch setting of the profile's times.
      times: how long collectives take.
      source: where these times come from, in words.
      overlap: what is hidden, with the rates of the GPU; with the planner's for a cluster of a paper.
      limit: bytes of memory of a GPU.
      choices: the factors to choose from; None: all.
      notes: what is measured, scaled or guessed, beside the times of collectives.
      axes: the data-parallel mesh axes, if they are known.
      groups: the groups of parameters that choose factors of their own, and the others; empty if all have the same.
    """

    job: Job
    mesh: Factor
    hardware: Hardware
    link: str
    setting: str
    times: CollectiveTimes
    source: str
    overlap: Overlap
    limit: float
    choices: tuple[Factors, ...] | None = None
    notes: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    groups: tuple[ParameterGroup, ...] = ()


def task_of(chosen: Mapping[str, Any]) -> Task:
    """What the flags ask for.

    Raises:
      DhelixError: the model is missing, or a file cannot be read.
    """
    for name, value in chosen.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DhelixError(f"--{name} {value}: give a finite number")
    if not chosen["model"]:
        raise DhelixError("which model? give --model NAME; `dhelix shard --help` lists the names")
    config = PRESETS[chosen["model"]]
    if chosen["layers"]:
        config = dataclasses.replace(config, layers=chosen["layers"])
    if chosen["groups"] and chosen["split"] == "between":
        raise DhelixError("--groups needs --split inside, as dhelix carries groups out; leave --split out")
    if chosen["vocab"]:
        config = dataclasses.replace(config, vocab=chosen["vocab"])
    seq = chosen["seq"] or config.seq
    hardware, profile, nodes = _machine(chosen)
    mesh = Factor(chosen["gpus_per_node"] or hardware.gpus_per_node, chosen["nodes"] or nodes)
    bandwidths = {f"{name}_bandwidth": _GB * chosen[f"{name}_bandwidth"] for name in ("intra", "inter")
                  if chosen[f"{name}_bandwidth"]}  # fmt: skip
    hardware = dataclasses.replace(hardware, gpus_per_node=mesh.gpus, **bandwidths)
    sizes = model_sizes(chosen["model"], config, seq, TRAINERS[chosen["bytes"]] == BF16_SUMS)
    job = Job(
        sizes,
        Batch(chosen["batch"] or 1, seq, chosen["microbatches"] or 1, chosen["recompute"]),
        compute_of(hardware, sizes, chosen["mfu"]),
        TRAINERS[chosen["bytes"]],
        1e6 * chosen["bucket"],
        chosen["split"] or ("between" if chosen["cluster"] and not chosen["groups"] else "inside"),
    )
    groups = groups_of(job, mesh, config, keys_of(chosen["groups"], config)) if chosen["groups"] else ()
    times, source = _times(hardware, profile, chosen)
    limit = _GB * chosen["memory"] if chosen["memory"] else hardware.memory_bytes
    link = profile.link if profile else chosen["link"]
    section = profile.section(chosen["setting"]) if profile else None
    overlap = Overlap() if chosen["cluster"] else Overlap().on(hardware, section)
    return Task(
        job, mesh, hardware, link, chosen["setting"], times, source, overlap, limit, groups=tuple(groups),
        notes=notes_of(chosen["groups"]),
    )  # fmt: skip


def model_sizes(name: str, config: DecoderConfig, seq: int, automatic: bool = False) -> ModelSizes:
    """The sizes of a model, from the counts of its configuration. Equal layers differ in nothing but their number.

    Args:
      automatic: whether XLA's partitioner makes the collectives. It may exchange rows of the embedding.
    """
    one, two = (dataclasses.replace(config, layers=count).parameter_count for count in (1, 2))
    layer, outside = two - one, 2 * one - two
    attention = min(config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads), layer)
    idle = (config.parameter_count - config.active_parameter_count) // config.layers  # experts that a token skips
    scores = 2 * OPS_PER_PARAMETER * config.heads * config.head_dim * seq
    table = config.vocab * config.hidden
    rows = config.vocab if automatic and not config.tie_embeddings else 0
    return ModelSizes(
        name,
        config.layers,
        (
            Module("attention", attention, OPS_PER_PARAMETER * attention + scores),
            Module("feed-forward", layer - attention, OPS_PER_PARAMETER * (layer - attention - idle)),
        ),
        (Module("embedding", table, 0.0, rows), Module("head", outside - table, OPS_PER_PARAMETER * table)),
        config.hidden,
        config.vocab,
        config.kept_bytes,
        tuple(Matrix(shape[0], math.prod(shape)) for shape in config.layer_shapes.values() if len(shape) > 1),
    )


def compute_of(hardware: Hardware, sizes: ModelSizes, mfu: float | None = None) -> Compute:
    """How fast a GPU computes a model. Causal attention takes half of the operations that `Module.flops` counts.

    Args:
      mfu: share of the peak; None: from the efficiencies of the GPU's description.
    """
    memory = hardware.memory_bandwidth * hardware.memory_efficiency
    if mfu:
        return Compute(hardware.peak_flops * mfu, memory)
    attention, feed_forward = sizes.modules
    scores = sizes.layers * (attention.flops - OPS_PER_PARAMETER * attention.parameters)
    products = sizes.flops - scores
    seconds = products / hardware.gemm_efficiency + scores / 2 / hardware.attention_efficiency
    return Compute(hardware.peak_flops * sizes.flops / seconds, memory)


def _machine(chosen: Mapping[str, Any]) -> tuple[Hardware, Profile | None, int]:
    """The GPU, its profile if there is one, and the usual number of nodes."""
    if chosen["cluster"]:
        if chosen["profile"]:
            raise DhelixError("--cluster and --profile exclude each other; give one of them")
        cluster = clusters.get(chosen["cluster"])
        return cluster.hardware, None, cluster.nodes
    if chosen["profile"]:
        profile = storage.load(chosen["profile"])
        return hardware_of(profile), profile, 1
    described = gpus.describe(chosen["hardware"], chosen["link"])
    return described, storage.find(chosen["hardware"], chosen["link"]), 1


def _times(hardware: Hardware, profile: Profile | None, chosen: Mapping[str, Any]) -> tuple[CollectiveTimes, str]:
    measured = profile.section(chosen["setting"]).collectives if profile else None
    if profile and measured:
        source = f"the profile {profile.hardware} {profile.link} and the GPU's links"
    else:
        source = f"the links of cluster {chosen['cluster']}" if chosen["cluster"] else f"the links of {hardware.name}"
    return times_of(measured, hardware), source
