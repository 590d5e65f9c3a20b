"""The paper's cluster as numbers: four of them fitted to published ZeRO-1 and ZeRO-3 values, one to table V.

    cluster = fit()
    cluster.times(cluster.job(MODELS["llama-7b"], microbatches=1), factors, Overlap()).step      # seconds

AMSP measured its collectives and printed them in figure 3 alone. So bandwidths and a latency are fitted, each to one
published number, by bisection in turn until nothing changes:

    reached share of the peak        ZeRO-1, 7B, 8 GPUs, 63 % MFU
    bandwidth inside a node          ZeRO-3, 13B, 8 GPUs, 47 % MFU
    bandwidth of a node              ZeRO-1, 7B, 1024 GPUs, 36 % MFU
    latency between nodes            ZeRO-3, 7B, 1024 GPUs, 4 % MFU
    bytes of a bucket, U             not printed; 128 MB, since 124 to 140 MB meet table V and VI-D1 best

Both strategies ran in DeepSpeed. They are modelled with nothing hidden: with the reduce-scatter alone exposed, the fit
of the node's bandwidth gives a third of what `hardware.py` has. DeepSpeed gathers tensor by tensor, so that
ZeRO-3 has nine gathers in a layer. The remaining constants are the defaults of the planner: 3 us inside a node, trees
for all-reduces between nodes, rates 0.9 and 0.95 while compute and a collective run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dhelix.passes.sharding.collective_times import Links, LinkTimes
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.overlap import NOTHING, Overlap
from dhelix.passes.sharding.sizes import Batch, ModelSizes, Module, decoder
from dhelix.passes.sharding.step_times import Compute, Job, StepTimes
from dhelix.profiles.hardware import A800
from dhelix.profiles.papers import amsp, clusters
from dhelix.profiles.papers.amsp import MODELS, Model

NODE = 8
BUCKET = 128e6
"""Bytes of a bucket. The paper does not print it."""

_AT_8, _AT_1024 = Factor(NODE), Factor(NODE, 128)
_ROUNDS, _HALVINGS = 12, 60


def sizes_of(model: Model, tensors: bool = False) -> ModelSizes:
    """The planner's sizes of a model of the paper.

    Args:
      tensors: whether each tensor of a layer is gathered by itself, as DeepSpeed does.
    """
    sizes = decoder(
        model.name,
        layers=model.layers,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        attention=model.attention,
        feed_forward=model.feed_forward,
        score_width=model.hidden,
        sequence=amsp.SEQUENCE,
    )
    return replace(sizes, modules=_tensors(model, sizes)) if tensors else sizes


def _tensors(model: Model, sizes: ModelSizes) -> tuple[Module, ...]:
    attention, feed_forward = sizes.modules
    square, wide, norm = model.hidden**2, model.hidden * model.ffn, Module("norm", model.hidden, 0.0)
    return (
        norm,
        *(Module(name, square, attention.flops / 4) for name in ("query", "key", "value", "output")),
        norm,
        *(Module(name, wide, feed_forward.flops / 3) for name in ("gate", "up", "down")),
    )


def published(system: str, model: Model, workload: str, quantity: str = "MFU") -> float:
    """A number of the paper.

    Args:
      workload: a part of the workload's text, such as "1024 GPUs".
    """
    found = [
        number.value
        for number in clusters.get("amsp-a800").numbers
        if number.system == system
        and number.workload.startswith(f"{model.published}, {workload}")
        and number.quantity.startswith(quantity)
    ]
    (value,) = found
    return value


@dataclass(frozen=True)
class Fitted:
    """The cluster of the paper.

    Attributes:
      share: share of the GPU's peak that computation reaches, attention not halved.
      links: bandwidths and latencies.
      bucket: bytes of an all-reduce bucket.
    """

    share: float
    links: Links
    bucket: float = BUCKET

    def job(self, model: Model, microbatches: int, tensors: bool = False, secondary: Factor | None = None) -> Job:
        """A step with `microbatches` micro-batches of one sequence."""
        return Job(
            sizes_of(model, tensors),
            Batch(1, amsp.SEQUENCE, microbatches, model.recompute),
            Compute(A800.peak_flops * self.share, A800.memory_bandwidth * A800.memory_efficiency),
            bucket=self.bucket,
            secondary=secondary,
        )

    def times(self, job: Job, factors: Factors, overlap: Overlap) -> StepTimes:
        """The times of a step."""
        return StepTimes.of(job, factors, LinkTimes(self.links), overlap)

    def mfu(self, job: Job, factors: Factors, overlap: Overlap) -> float:
        """MFU in percent. Recomputation does not count as useful operations."""
        useful = 3.0 * job.sizes.flops * job.batch.tokens * job.batch.microbatches
        return 100.0 * useful / self.times(job, factors, overlap).step / A800.peak_flops


def fit(bucket: float = BUCKET) -> Fitted:
    """The cluster whose ZeRO-1 and ZeRO-3 are those of the paper."""
    small, large = MODELS["llama-7b"], MODELS["llama-13b"]
    zero1 = {mesh: Factors.named("zero1", mesh) for mesh in (_AT_8, _AT_1024)}
    zero3 = {mesh: Factors.named("zero3", mesh) for mesh in (_AT_8, _AT_1024)}
    found = Fitted(0.6, Links(100e9, 100e9, between_latency=1e-5), bucket)

    def missing(model: Model, factors: Factors, goal: float, tensors: bool) -> Callable[[Fitted], float]:
        microbatches = amsp.SEQUENCES // factors.mesh.size
        return lambda at: at.mfu(at.job(model, microbatches, tensors), factors, NOTHING) - goal

    goals = (
        missing(small, zero1[_AT_8], published("ZeRO-1", small, "8 GPUs"), False),
        missing(large, zero3[_AT_8], published("ZeRO-3", large, "8 GPUs"), True),
        missing(small, zero1[_AT_1024], published("ZeRO-1", small, "1024 GPUs"), False),
        missing(small, zero3[_AT_1024], published("ZeRO-3", small, "1024 GPUs"), True),
    )
    setters = (
        lambda at, value: replace(at, share=value),
        lambda at, value: replace(at, links=replace(at.links, within=value)),
        lambda at, value: replace(at, links=replace(at.links, between=value)),
        lambda at, value: replace(at, links=replace(at.links, between_latency=1.0 / value)),
    )
    ranges = ((0.1, 1.0), (1e9, 1e13), (1e9, 1e13), (1.0, 1e8))
    for _ in range(_ROUNDS):
        for goal, setter, (low, high) in zip(goals, setters, ranges, strict=True):
            for _ in range(_HALVINGS):  # MFU grows with each of the four
                middle = (low * high) ** 0.5
                low, high = (low, middle) if goal(setter(found, middle)) > 0.0 else (middle, high)
            found = setter(found, (low * high) ** 0.5)
    return found
