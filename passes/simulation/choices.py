"""All ways to run a model's step on a number of GPUs: a search chooses among them.

    found, left_out = choices(shape, Space(gpus=64, gpus_per_node=8, batch=512))
    found[0]                  # Choice(pp=1, dp=64, ep=1, cp=1, tp=1, sequences=1, ...)
    left_out                  # {"tp does not divide 8 key-value heads": 96, ...}: what cannot run, and how often

A choice fixes the mesh, the micro-batch, rematerialization, how model states are sharded, the pipeline's schedule, and
the system (`systems.py`) that orders operators. Sizes of axes are powers of two, but for dp, which takes the GPUs that
are left. All choices have the same number of GPUs and the same batch. So the number of micro-batches follows from the
others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.sharding.sizes import ModelSizes

PIPELINES = {"xla": ("1f1b", "interleaved"), "strands": ("w", "interleaved_si", "dualpipev")}
"""The pipeline schedules that a system may have. Strands need schedules with SI blocks."""

STATES = ("whole", "zero1", "zero2", "zero3")
REMAT = ("none", "full")
SEQUENCES = (1, 2, 4, 8)
_AXES = ("pp", "dp", "ep", "cp", "tp")


@dataclass(frozen=True, order=True)
class Choice:
    """One way to run a step.

    Attributes:
      pp, dp, ep, cp, tp: sizes of the mesh axes.
      sequences: sequences of a micro-batch on one GPU (with cp and tp, on each group of cp x tp GPUs).
      microbatches: micro-batches of a step.
      remat: rematerialization.
      states: how model states are sharded over dp; "whole" if they are not.
      pipeline: schedule of the pipeline; "" without one.
      system: name of the system that orders operators.
    """

    pp: int
    dp: int
    ep: int
    cp: int
    tp: int
    sequences: int
    microbatches: int
    remat: str
    states: str
    pipeline: str
    system: str

    @property
    def mesh(self) -> str:
        """The mesh in words: "dp 8 x tp 8"."""
        sizes = (f"{axis} {size}" for axis, size in self.axes.items() if size > 1)
        return " x ".join(sizes) or "one GPU"

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        return {axis: getattr(self, axis) for axis in _AXES}

    def __str__(self) -> str:
        plural = "es" if self.microbatches > 1 else ""
        words = [self.mesh, f"{self.microbatches} micro-batch{plural} of {self.sequences}", f"remat {self.remat}"]
        words += [f"states {self.states}", *([self.pipeline] if self.pipeline else []), self.system]
        return ", ".join(words)

    def traits(self) -> dict[str, str]:
        """What may be chosen one by one, by its name, as text. `dp` and `microbatches` follow from the others."""
        return {
            **{axis: str(getattr(self, axis)) for axis in ("pp", "ep", "cp", "tp")},
            "micro-batch": str(self.sequences),
            "remat": self.remat,
            "states": self.states,
            "schedule": " ".join(filter(None, (self.pipeline, self.system))),
        }


@dataclass(frozen=True)
class ModelShape:
    """What decides how a model can be split, and what its parts cost.

    Attributes:
      sizes: parameters and operations of its modules. Operations of experts are those that compute a token.
      sequence: tokens of a sequence.
      heads, kv_heads: attention heads, and those of keys and values.
      kv_width: width of the keys of all heads.
      experts: number of routed experts in a layer; 0 without experts.
      routed: experts that compute a token, times the capacity factor.
      expert_parameters: parameters of all routed experts of one layer.
    """

    sizes: ModelSizes
    sequence: int
    heads: int
    kv_heads: int
    kv_width: int
    experts: int = 0
    routed: float = 0.0
    expert_parameters: int = 0


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    Attributes:
      gpus, gpus_per_node: the cluster.
      batch: sequences of a step.
      systems: names of systems, of PIPELINES.
      fixed: traits that are given: sizes of axes by their names, and `sequences`, `microbatches`, `remat`, `states` and
        `pipeline`.

    Raises:
      DhelixError: a number is below 1.
    """

    gpus: int
    gpus_per_node: int
    batch: int
    systems: tuple[str, ...] = ("xla", "strands")
    fixed: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.gpus, self.gpus_per_node, self.batch) < 1:
            raise DhelixError("a search needs at least one GPU and one sequence of a batch")


def choices(shape: ModelShape, space: Space) -> tuple[list[Choice], dict[str, int]]:
    """All choices that the model's sizes allow, in a fixed order, and how many the other ones are, by the reason.

    Raises:
      DhelixError: nothing is left. The message says why.
    """
    found, left_out = list[Choice](), Counter[str]()
    for choice in _all(shape, space):
        if reason := _obstacle(choice, shape, space):
            left_out[reason] += 1
        else:
            found.append(choice)
    if not found:
        given = math.prod(int(space.fixed.get(axis, 1)) for axis in _AXES)
        unfilled = (
            f"the given sizes need {given} GPUs" if given > space.gpus else "the given sizes do not fill the GPUs"
        )
        most = max(left_out, key=lambda reason: left_out[reason], default=unfilled)
        raise DhelixError(
            f"no way to run {shape.sizes.name} with {space.batch} sequences a step on {space.gpus} GPUs: above all, "
            f"{most}; give fewer flags, another --batch, or another number of --nodes"
        )
    return found, dict(sorted(left_out.items()))


def _all(shape: ModelShape, space: Space) -> Iterator[Choice]:
    """Every combination whose mesh has all GPUs and whose micro-batches have the whole batch."""
    fixed = space.fixed

    def values(name: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fixed[name],) if name in fixed else usual

    powers = tuple(2**n for n in range(space.gpus.bit_length()))
    within = tuple(size for size in powers if size <= space.gpus_per_node)
    experts = tuple(size for size in powers if size <= shape.experts) if shape.experts else (1,)
    pipelines = [(1, "", system) for system in space.systems]
    pipelines += [
        (pp, pipeline, system)
        for pp, system in product(powers[1:], space.systems)
        for pipeline in values("pipeline", PIPELINES.get(system, ()))
    ]
    for (pp, pipeline, system), ep, cp, tp in product(
        pipelines, values("ep", experts), values("cp", powers), values("tp", within)
    ):
        if pp != fixed.get("pp", pp):
            continue
        dp, left = divmod(space.gpus, pp * ep * cp * tp)
        if left or dp == 0 or dp != fixed.get("dp", dp):
            continue
        for sequences, remat, states in product(
            values("sequences", SEQUENCES), values("remat", REMAT), values("states", STATES)
        ):
            microbatches, left = divmod(space.batch, dp * ep * sequences)
            if left or microbatches == 0 or microbatches != fixed.get("microbatches", microbatches):
                continue
            yield Choice(pp, dp, ep, cp, tp, sequences, microbatches, remat, states, pipeline, system)


def _obstacle(choice: Choice, shape: ModelShape, space: Space) -> str:
    """Why a choice cannot run, or has no point; empty if it can."""
    sizes, chunks = shape.sizes, choice.pp * (1 if choice.pipeline == "1f1b" else 2)
    if shape.kv_heads % choice.tp or shape.heads % choice.tp:
        return f"tp does not divide {shape.kv_heads} key-value heads"
    if shape.sequence % (2 * choice.cp * choice.tp):
        return "cp and tp do not divide the sequence"
    if choice.cp > 1 and shape.sequence // choice.cp < 1024:
        return "cp leaves less than 1,024 tokens of a sequence to a GPU"
    if shape.experts and shape.experts % choice.ep:
        return f"ep does not divide {shape.experts} experts"
    if choice.pp > 1 and sizes.layers % chunks and shape.experts:
        return "layers with experts do not divide into chunks"
    if choice.pp > 1 and chunks > sizes.layers:
        return "there are fewer layers than chunks of the pipeline"
    if choice.pp > 1 and choice.microbatches < choice.pp:
        return "fewer micro-batches than stages leave most of the pipeline idle"
    if choice.pp == 1 and choice.system == "strands" and choice.microbatches < 2:
        return "two strands need two micro-batches"
    if choice.states != "whole" and choice.dp == 1:
        return "states are sharded over dp, and dp is 1"
    if choice.cp * choice.tp > space.gpus_per_node and choice.cp * choice.tp % space.gpus_per_node:
        return "cp x tp does not fill nodes"
    return ""
