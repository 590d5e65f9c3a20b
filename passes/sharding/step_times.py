"""Time of a step's communication under given factors, and how much of it stays exposed (AMSP IV-C and V-C).

    times = StepTimes.of(job, factors, collective_times, Overlap())
    times.total, times.exposed, times.step        # seconds: of all collectives, of what stays exposed, of the step

The paper's equations, with its misprints corrected. t is `CollectiveTimes`, B_p and B_g the bytes moved per parameter
and gradient, U the bytes of a bucket. / divides meshes by components.

    T_p    M * (sum over modules of 2 t(AG, B_p Phi_i, s_p) + t(RS, B_g Phi_i, s_p))           0 if |s_p| = 1
    T_os0  n * t(AR, B_g Phi / (|s_p| n), s_dp / s_p)    n = ceil(B_g Phi / (U |s_p|))         0 if s_p = s_dp
    T_os1  (|s_os| / |s_p|) * t(BC, B_p Phi / |s_os|, s_os / s_p)                              0 if s_os = s_p
           t(AG, B_p Phi / |s_p|, s_os / s_p) if tensors are split inside
    T_g    (M - 1) * T_os0 over s_g / s_p instead of s_dp / s_p                                0 if s_g = s_p

If tensors are split inside, a device needs only its pieces of a reduced gradient. So dhelix scatters, unlike AMSP:

    T_os0  n * (t(RS, b, s_os / s_p) + t(AR, b |s_p| / |s_os|, s_dp / s_os))                   b: bytes of a bucket
    T_g    (M - 1) * n * t(RS, b, s_g / s_p)

Under automatic sharding, XLA exchanges rows of a table that is only looked up (`Module.exchanged`). b are the bytes of
the rows of all tokens of a group. For this table, a micro-batch has

    T_p    t(RS, b, s_p) instead of the gather, and t(AG, b, s_p) instead of the reduce-scatter
    T_os0  t(AG, b, s_os) instead of the reduce-scatter, if |s_p| = 1, and M = 1 or s_g = s_os; T_g alike

Other modules outside of layers stay gathered until their backward, and two strands without a loop gather them once. So
T_p has one gather of them for each micro-batch, and one in all if M <= 2.

Corrections: the sum goes from 1 to K and includes modules outside of layers. Both printed factors s_p1 / s_p1 are
s_dp1 / s_p1 and s_os1 / s_p1. A device holds Phi / |s_p| gradients, so the number of buckets is divided by |s_p|. Here
buckets are equal; the printed U for each would count the last one as full. The all-reduce of T_os0 is the data-parallel
reduction, so that every plan has it.

What stays exposed follows the executor's rules (V-C; `overlap.py`). As a baseline, ZeRO++ (III-B) gathers over
`Job.secondary` in backward, and over s_p in forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dhelix.passes.sharding import overlap as hiding
from dhelix.passes.sharding.collective_times import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    Basis,
    CollectiveTimes,
)
from dhelix.passes.sharding.factors import ONE, Factor, Factors, ShardingError
from dhelix.passes.sharding.overlap import Overlap, Stretch
from dhelix.passes.sharding.sizes import MIXED, Batch, ModelSizes, Module, StateBytes

SPLITS = ("between", "inside")
"""How optimizer states are split over a group: whole tensors for each owner, or an even piece of each tensor."""

_OF_ROWS = {ALL_GATHER: REDUCE_SCATTER, REDUCE_SCATTER: ALL_GATHER}
"""What moves the rows of a table instead: each device looks up its own, and adds up the gradients of its own."""

PARTS = ("forward gather", "backward gather", "reduce-scatter", "all-reduce", "broadcast", "accumulation")
"""Names of the parts of the communication. The first three are T_p, then T_os0, T_os1 and T_g."""


@dataclass(frozen=True)
class Compute:
    """How fast a device computes. It is the same for all factors.

    Attributes:
      flops: floating-point operations per second that a step reaches, counted as in `Module.flops`.
      memory_bandwidth: bytes per second that the optimizer's update reaches.
    """

    flops: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Job:
    """What a plan is made for.

    Attributes:
      sizes: the model.
      batch: what a device computes in a step.
      compute: how fast it computes.
      kept: bytes per parameter.
      bucket: bytes of an all-reduce bucket, U.
      split: one of SPLITS.
      secondary: the part over which backward gathers, as ZeRO++ does; None means that of the parameters.
      rest: bytes that a compiled step needs beyond the formulas of `memory.py`; negative if it needs less. None: not
        compiled.
      share, layer_share: for a group of parameters, its share of the model's parameters and of a layer's. It may hide
        its collectives behind this share of the compute beside them, so that groups do not hide behind the same.
    """

    sizes: ModelSizes
    batch: Batch
    compute: Compute
    kept: StateBytes = MIXED
    bucket: float = 256e6
    split: str = "between"
    secondary: Factor | None = None
    rest: float | None = None
    share: float = 1.0
    layer_share: float = 1.0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ShardingError(f"split {self.split!r} is unknown; use one of {', '.join(SPLITS)}")
        if self.bucket <= 0.0:
            raise ShardingError("a bucket has more than 0 bytes")

    def forward_seconds(self, module: Module) -> float:
        """Time of a module's forward pass on one micro-batch."""
        return module.flops * self.batch.tokens / self.compute.flops

    @property
    def forward(self) -> float:
        """Time of a micro-batch's forward pass, in seconds."""
        return self.sizes.flops * self.batch.tokens / self.compute.flops

    @property
    def backward(self) -> float:
        """Time of a micro-batch's backward pass, in seconds; with the second forward of recomputation."""
        layers = self.sizes.layers * self.sizes.layer_flops * self.batch.tokens / self.compute.flops
        return 2.0 * self.forward + (layers if self.batch.recompute else 0.0)

    def update_seconds(self, factors: Factors) -> float:
        """Time of the optimizer's update: it reads states and gradients, writes states and parameters, and clears
        the gradients. Split inside, a single micro-batch adds nothing up, so it needs no cleared gradients."""
        kept = self.kept
        touched = (2.0 * kept.optimizer + kept.gradient + kept.parameter) / factors.optimizer.size
        cleared = kept.gradient / factors.gradients.size
        if self.split == "inside" and self.batch.microbatches == 1:
            cleared = 0.0
        return (touched + cleared) * self.sizes.parameters / self.compute.memory_bandwidth


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the communication: seconds in all, and exposed. Exposed time includes how much it slows compute."""

    name: str
    total: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Sent:
    """Equal collectives of a step.

    Attributes:
      op, size, group: as in `CollectiveTimes.of`.
      inner: the part of the mesh between neighbours of a group: groups of copies skip the devices of a copy.
      count: how many of them every device takes part in.
    """

    op: str
    size: float
    group: Factor
    inner: Factor
    count: float


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in seconds.

    Attributes:
      parts: communication, a part for each of PARTS.
      compute: forward and backward of all micro-batches, while nothing communicates.
      update: the optimizer's update.
      basis: seconds of communication by where their times come from.
      sent: the collectives.
    """

    parts: tuple[Part, ...]
    compute: float
    update: float
    basis: dict[Basis, float] = field(default_factory=dict)
    sent: tuple[Sent, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of all collectives, AMSP's T."""
        return sum(part.total for part in self.parts)

    @property
    def exposed(self) -> float:
        """Seconds by which communication makes the step longer."""
        return sum(part.exposed for part in self.parts)

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.compute + self.update + self.exposed

    @property
    def guessed(self) -> float:
        """Share of `total` that comes from a formula alone."""
        return self.basis.get(Basis.GUESSED, 0.0) / self.total if self.total else 0.0

    @property
    def scaled(self) -> float:
        """Share of `total` that comes from another mesh, size or collective."""
        return self.basis.get(Basis.SCALED, 0.0) / self.total if self.total else 0.0

    @property
    def moved(self) -> dict[str, float]:
        """Bytes that a device's collectives take or give, by kind, as `passes.analysis.collectives` counts them."""
        found: dict[str, float] = {}
        for one in self.sent:
            found[one.op] = found.get(one.op, 0.0) + one.count * one.size
        return {op: size for op, size in found.items() if size}

    @classmethod
    def of(cls, job: Job, factors: Factors, times: CollectiveTimes, overlap: Overlap | None = None) -> StepTimes:
        """The times of a step of `job` under `factors`."""
        step = _Step(job, factors, times, overlap or Overlap())
        gathers = step.parameters()
        forward, *backward = (part.total / job.batch.microbatches for part in gathers)
        busy = sum(backward) if step.overlap.gather else 0.0  # else they run while nothing computes
        parts = (*gathers, step.all_reduce(busy), step.broadcast(forward), step.accumulation(busy))
        compute = job.batch.microbatches * (job.forward + job.backward)
        return cls(parts, compute, job.update_seconds(factors), step.basis, tuple(step.sent))


class _Step:
    """The computation of `StepTimes`."""

    def __init__(self, job: Job, factors: Factors, times: CollectiveTimes, overlap: Overlap) -> None:
        self.job, self.factors, self.times, self.overlap = job, factors, times, overlap
        self.basis: dict[Basis, float] = {}
        self.sent: list[Sent] = []

    def _read(
        self, op: str, size: float, group: Factor, inner: Factor = ONE, count: float = 1, together: int = 1
    ) -> float:
        """The time of one collective (of `together` ones as one launch), which the step runs `count` times."""
        found = self.times.of(op, size, group, self.factors.mesh, together)
        if found.seconds and count:
            self.basis[found.basis] = self.basis.get(found.basis, 0.0) + count * found.seconds
            self.sent.append(Sent(op, size, group, inner, count * together))
        return found.seconds

    def _modules(self, op: str, moved: float, group: Factor, outside: float) -> tuple[Sequence[float], Sequence[float]]:
        """The times for each module of a layer, and for each module outside of layers, in one micro-batch.

        Args:
          outside: how often a step runs the collectives of modules outside of layers.
        """

        sizes, m = self.job.sizes, self.job.batch.microbatches

        def end(module: Module) -> float:
            if moved and outside and self._exchanged(module, group):
                return self._rows(_OF_ROWS[op], [module], group, m)
            return outside / m * self._read(op, moved * module.parameters, group, count=outside)

        inside = [self._read(op, moved * module.parameters, group, count=m * sizes.layers) for module in sizes.modules]
        return inside, [end(module) for module in sizes.outside]

    def _exchanged(self, module: Module, group: Factor) -> int:
        """`Module.exchanged`, where the program does so."""
        return module.exchanged(group.size, self.job.batch.tokens) if self.job.split == "inside" else 0

    def _rows(self, op: str, modules: Sequence[Module], group: Factor, count: int) -> float:
        """The time of the collectives of the rows of `modules`, in the type of the computation."""
        width = self.job.kept.moved_parameter
        return sum(self._read(op, width * self._exchanged(module, group), group, count=count) for module in modules)

    def _reduced_by_rows(self, shards: Factor) -> list[Module]:
        """The modules of whose gradients each micro-batch gathers rows over `shards`.

        A sum of several micro-batches is reduced whole.
        """
        factors, sums = self.factors, self.job.batch.microbatches > 1
        if factors.parameters.size > 1 or (sums and factors.gradients != factors.optimizer):
            return []
        return [module for module in self.job.sizes.outside if self._exchanged(module, shards)]

    def parameters(self) -> tuple[Part, Part, Part]:
        """T_p: gathers of forward and backward, and the reduce-scatter."""
        job, group, kept = self.job, self.factors.parameters, self.job.kept
        m, layers, inside = job.batch.microbatches, job.sizes.layers, job.split == "inside"
        forward = 1 if inside and m == job.batch.strands else m
        found = [
            self._modules(ALL_GATHER, kept.moved_parameter, group, forward),
            self._modules(ALL_GATHER, kept.moved_parameter, job.secondary or group, 0 if inside else m),
            self._modules(REDUCE_SCATTER, kept.moved_gradient if kept.gradient else 0.0, group, m),
        ]
        totals = [m * (layers * sum(modules) + sum(ends)) for modules, ends in found]
        stretch = Stretch(
            [job.layer_share * job.forward_seconds(module) for module in job.sizes.modules],
            [job.forward_seconds(module) for module in job.sizes.outside],
            layers,
            1 if self.strands else m,
            job.batch.recompute,
        )
        across = group.nodes > 1
        exposed = (
            hiding.forward_gathers(stretch, *found[0], self.overlap, across),
            *hiding.backward(stretch, found[1], found[2], self.overlap, across),
        )
        if (
            self.strands
        ):  # the first forward and the last backward are alone; all others have another strand beside them
            each = sum(totals) / m
            window = job.share * (job.forward + job.backward)
            beside = min(hiding.paired(window, each, self.overlap, across), sum(exposed))
            shares = [total / sum(totals) if each else 0.0 for total in totals]
            exposed = tuple(one + (m - 1) * beside * share for one, share in zip(exposed, shares, strict=True))
        first, second, third = (Part(*row) for row in zip(PARTS, totals, exposed, strict=False))
        return first, second, third

    @property
    def strands(self) -> bool:
        """Whether two micro-batches are computed at once: dhelix splits tensors inside, and makes strands."""
        return self.job.split == "inside" and self.job.batch.strands > 1 and self.overlap.gather

    def _buckets(self, group: Factor, shards: Factor, count: int) -> tuple[int, float]:
        """The number of buckets, and the time of one, of which each device of `shards` needs a piece."""
        gradients = self.job.kept.moved_gradient * self.job.sizes.parameters / self.factors.parameters.size
        if group.size == 1 or not self.job.kept.gradient or not count:
            return 0, 0.0
        number, inner = max(math.ceil(gradients / self.job.bucket), 1), self.factors.parameters
        if self.job.split == "between":
            return number, self._read(ALL_REDUCE, gradients / number, group, inner, count * number)
        rows = self.job.kept.moved_gradient * sum(module.parameters for module in self._reduced_by_rows(shards))
        scatter = self._read(REDUCE_SCATTER, (gradients - rows) / number, shards, inner, count * number)
        part = gradients / number / shards.size
        copies = self._read(ALL_REDUCE, part, group / shards, inner * shards, count * number)
        return number, scatter + copies

    def _reduction(self, name: str, group: Factor, shards: Factor, count: int, busy: float) -> Part:
        """Reductions over `group` that `count` micro-batches run under their backward."""
        number, one = self._buckets(group, shards, count)
        beside = self._same_links(group, busy)
        backward, sizes = self.job.share * self.job.backward, self.job.sizes
        early = not sizes.layer_parameters and not sum(module.parameters for module in sizes.outside[:1])
        exposed = hiding.all_reduce(backward, number, one, self.overlap, group.nodes > 1, beside, early)
        looked_up = self._reduced_by_rows(shards) if number else []
        rows = self._rows(ALL_GATHER, looked_up, shards, count)  # backward ends with them, so nothing hides them
        return Part(name, count * (number * one + rows), count * (exposed + rows))

    def _same_links(self, group: Factor, busy: float) -> float:
        """`busy`, the seconds of gathers or reduce-scatters, if they use the links of `group`, and else 0."""
        return busy if (self.factors.parameters.nodes > 1) == (group.nodes > 1) else 0.0

    def all_reduce(self, busy: float) -> Part:
        """T_os0: gradients of the last micro-batch, over all copies of the parameters.

        Args:
          busy: seconds of the gathers and reduce-scatters of a micro-batch's backward.
        """
        held = self.factors.parameters
        return self._reduction("all-reduce", self.factors.mesh / held, self.factors.optimizer / held, 1, busy)

    def accumulation(self, busy: float) -> Part:
        """T_g: gradients of the other micro-batches, where gradients are sharded more than parameters."""
        group = self.factors.gradients / self.factors.parameters
        count = self.job.batch.microbatches - 1
        part = self._reduction("accumulation", group, group, count, busy)
        if not self.strands:
            return part
        compute = self.job.share * (self.job.forward + self.job.backward)
        window = max(compute - self._same_links(group, busy), 0.0)
        beside = hiding.paired(window, part.total / count, self.overlap, group.nodes > 1)
        return replace(part, exposed=min(part.exposed, count * beside))

    def broadcast(self, busy: float) -> Part:
        """T_os1: updated parameters, from the devices that updated them.

        Args:
          busy: seconds of the gathers of a micro-batch's forward.
        """
        job, factors = self.job, self.factors
        group = factors.optimizer / factors.parameters
        updated = job.kept.optimizer or job.split == "inside"  # inside, all parameters are shards between steps
        if group.size == 1 or not updated:
            return Part("broadcast", 0.0, 0.0)
        moved = job.kept.moved_parameter * job.sizes.parameters / factors.parameters.size
        if job.split == "inside":
            seconds = self._read(ALL_GATHER, moved, group, factors.parameters)
        else:
            seconds = self._read(BROADCAST, moved / group.size, group, factors.parameters, together=group.size)
        sizes = job.sizes
        first = (sizes.layer_parameters + (sizes.outside[0].parameters if sizes.outside else 0)) / sizes.parameters
        beside = self._same_links(group, busy) if self.overlap.gather else 0.0
        exposed = hiding.broadcast(job.share * job.forward, first, seconds, self.overlap, group.nodes > 1, beside)
        return Part("broadcast", seconds, exposed)
