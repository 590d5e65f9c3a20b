"""A first estimate of a step, in less than a millisecond: which of thousands of choices are worth a simulation.

    estimate = estimator(choice)
    estimate.seconds, estimate.memory, estimate.parts["tensor parallelism"]

    part                    its time, exposed
    compute                 operations of the micro-batches at the efficiencies of the GPU's description, and launches
    tensor parallelism      an all-gather and a reduce-scatter of the activations around both modules of a layer
    context parallelism     keys and values of all other GPUs of a ring
    experts                 two all-to-alls of the routed tokens
    model states            gathers, reductions and broadcasts (`passes/sharding/step_times.py`)
    pipeline                (stages - 1) / chunks micro-batches without work on a stage
    update                  the optimizer's

Backward communicates twice as much as forward; with rematerialization, forward communicates twice. Strands hide a fixed
share of what is between layers, and XLA's order a smaller one. All this is coarse. `layout_search.py` corrects it by
steps that are simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dhelix.passes.sharding import memory as memories
from dhelix.passes.sharding.collective_times import ALL_GATHER, REDUCE_SCATTER, CollectiveTimes
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.sizes import SINGLE, Batch, ModelSizes
from dhelix.passes.sharding.step_times import Compute, Job, StepTimes
from dhelix.passes.simulation.choices import Choice, ModelShape
from dhelix.profiles.hardware import Hardware

_EXPOSED = {"xla": 0.9, "strands": 0.4}
"""Share of the communication between layers that makes the step longer; corrected by simulated steps."""

_KERNELS = 15  # of a layer's forward
_ACTIVATION = 2.0  # bytes of an element
_BUCKET = 256e6


@dataclass(frozen=True)
class Estimate:
    """The estimate of a choice.

    Attributes:
      parts: exposed seconds of each part, by name.
      memory: bytes that a GPU needs.
    """

    parts: dict[str, float]
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimator:
    """Estimates the choices of one model on one cluster.

    Attributes:
      shape: the model.
      compute: how fast a GPU computes it.
      hardware: the GPU, its node and its links.
      times: how long collectives take.
      overlap: how much collectives of states and compute slow each other down.
    """

    shape: ModelShape
    compute: Compute
    hardware: Hardware
    times: CollectiveTimes
    overlap: Overlap

    def __call__(self, choice: Choice) -> Estimate:
        sizes = self._of_a_gpu(choice)
        length = self.shape.sequence // choice.cp
        batch = Batch(choice.sequences, length, choice.microbatches, choice.remat != "none")
        mesh = self._data_mesh(choice)
        job = Job(sizes, batch, self.compute, SINGLE, _BUCKET, "inside")
        named = "dp" if choice.states == "whole" else choice.states
        factors = Factors.named(named, mesh)
        states = StepTimes.of(job, factors, self.times, self.overlap)
        layers = choice.microbatches * sizes.layers * (4 if choice.remat != "none" else 3)
        exposed = _EXPOSED[choice.system] * layers
        between = {
            "tensor parallelism": exposed * self._tensor(choice, batch.tokens),
            "context parallelism": exposed * self._context(choice, batch.tokens),
            "experts": exposed * self._experts(choice, batch.tokens),
        }
        compute = states.compute + layers * _KERNELS * self.hardware.kernel_seconds
        stage = compute + sum(between.values())
        chunks = 1 if choice.pipeline in ("", "1f1b") else 2
        parts = {
            "compute": compute,
            **between,
            "model states": states.exposed,
            "pipeline": stage * (choice.pp - 1) / chunks / choice.microbatches,
            "update": states.update,
        }
        return Estimate(parts, self._memory(choice, job, factors))

    def _of_a_gpu(self, choice: Choice) -> ModelSizes:
        """The sizes of what one GPU holds and computes."""
        shape, tp = self.shape, choice.tp
        whole = shape.sizes
        idle = shape.expert_parameters - shape.expert_parameters // choice.ep
        attention, feed_forward = whole.modules
        modules = (
            replace(attention, parameters=attention.parameters // tp, flops=attention.flops / tp),
            replace(feed_forward, parameters=(feed_forward.parameters - idle) // tp, flops=feed_forward.flops / tp),
        )
        split = tp * choice.pp
        outside = tuple(
            replace(one, parameters=one.parameters // split, flops=one.flops / split) for one in whole.outside
        )
        kept = whole.kept if whole.kept is not None else memories.KEPT * whole.hidden * (1.0 + shape.routed / 2.0)
        return replace(
            whole,
            layers=math.ceil(whole.layers / choice.pp),
            modules=modules,
            outside=outside,
            vocabulary=whole.vocabulary // split,
            hidden=whole.hidden // tp,
            kept=kept / tp,
            matrices=(),
        )

    def _data_mesh(self, choice: Choice) -> Factor:
        """The GPUs over which states are sharded, or over which gradients are reduced."""
        inner, data = choice.tp, choice.dp * choice.cp * choice.ep
        if choice.states != "whole":
            inner, data = choice.tp * choice.cp * choice.ep, choice.dp
        gpus = math.gcd(data, max(self.hardware.gpus_per_node // inner, 1))
        return Factor(gpus, data // gpus)

    def _tensor(self, choice: Choice, tokens: int) -> float:
        """Seconds of a layer's forward."""
        group, size = Factor(choice.tp), _ACTIVATION * tokens * self.shape.sizes.hidden
        return 2.0 * sum(self.times.of(op, size, group, group).seconds for op in (ALL_GATHER, REDUCE_SCATTER))

    def _context(self, choice: Choice, tokens: int) -> float:
        size = _ACTIVATION * 2.0 * tokens * self.shape.kv_width / choice.tp
        return (choice.cp - 1) * size / self._bandwidth(choice.cp * choice.tp)

    def _experts(self, choice: Choice, tokens: int) -> float:
        away = (choice.ep - 1) / choice.ep
        size = _ACTIVATION * tokens / choice.tp * self.shape.routed * self.shape.sizes.hidden * away
        return 2.0 * size / self._bandwidth(choice.ep * choice.cp * choice.tp)

    def _bandwidth(self, span: int) -> float:
        hardware = self.hardware
        return hardware.intra_bandwidth if span <= hardware.gpus_per_node else hardware.inter_bandwidth

    def _memory(self, choice: Choice, job: Job, factors: Factors) -> float:
        """Bytes of a GPU: the formula for a step without a pipeline, with the activations that a pipeline keeps."""
        pipelined = choice.pp > 1
        strands = choice.system == "strands" and not pipelined
        batch = job.batch if strands else replace(job.batch, microbatches=1)
        found = memories.memory(job.sizes, factors, job.kept, batch, job.bucket, job.split)
        if not strands and choice.microbatches > 1:  # sums of gradients beside those of one micro-batch
            found = replace(found, gradients=found.gradients + 4.0 * job.sizes.parameters / factors.gradients.size)
        kept = min(choice.pp + (choice.pipeline != "1f1b"), choice.microbatches) if pipelined else 1
        return found.total + (kept - 1) * found.activations
