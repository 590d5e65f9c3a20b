"""Memory of one device under given factors: model states, activations, and temporary buffers (AMSP section IV-D).

    D = b_P Phi / |s_p| + b_G Phi / |s_g| + b_O Phi / |s_os| + activations + temporary

The paper refers to "existing methodologies" for activations and gives no formula. `activation_bytes` is assumed: a
layer with flash attention keeps 34 bytes for each token and element of the hidden size. With recomputation, a layer
keeps its input alone, and one layer at a time keeps everything.

Temporary buffers, assumed as well: two gathered layers (one computes, the next arrives), two all-reduce buckets, and
logits with their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dhelix.passes.sharding.factors import Factors
from dhelix.passes.sharding.sizes import Batch, ModelSizes, StateBytes

KEPT, INPUT = 34.0, 2.0
"""Bytes of a layer's activations for each token and element of the hidden size: of all, and of the layer's input."""

_LOGIT = 8.0  # bytes: logits and their gradients in float32
_LAYERS_IN_FLIGHT = 2
_BUCKETS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by what they hold.

    Attributes:
      parameters, gradients, optimizer: the model states.
      activations: what backward needs of forward.
      gathered: gathered parameters, or a copy of all parameters in the type of the computation.
      buckets: buffers of the all-reduce.
      logits: logits and their gradients.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    buckets: float = 0.0
    logits: float = 0.0

    @property
    def states(self) -> float:
        """Bytes of the three model states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All bytes, AMSP's D."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The names of the parts with their bytes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def activation_bytes(sizes: ModelSizes, batch: Batch) -> float:
    """Bytes that backward needs of forward, for the micro-batch that is in flight. Assumed, see above."""
    layer = float(batch.tokens * sizes.hidden)
    if batch.recompute:
        return INPUT * layer * sizes.layers + KEPT * layer
    return KEPT * layer * sizes.layers


def memory(
    sizes: ModelSizes, factors: Factors, kept: StateBytes, batch: Batch, bucket: float, split: str = "between"
) -> Memory:
    """The memory of one device.

    Args:
      kept: bytes per parameter.
      bucket: bytes of an all-reduce bucket, AMSP's U.
      split: how optimizer states are split (`step_times.SPLITS`). Split inside, parameters are stored like optimizer
        states, and what the model reads of them is a gathered copy.
    """
    phi, inside = float(sizes.parameters), split == "inside"
    return Memory(
        parameters=kept.parameter * phi / (factors.optimizer if inside else factors.parameters).size,
        gradients=kept.gradient * phi / factors.gradients.size,
        optimizer=kept.optimizer * phi / factors.optimizer.size,
        activations=activation_bytes(sizes, batch),
        gathered=_gathered(sizes, factors, kept, inside),
        buckets=_BUCKETS * min(bucket, kept.moved_gradient * phi) if factors.mesh.size > 1 else 0.0,
        logits=_LOGIT * batch.tokens * sizes.vocabulary,
    )


def _gathered(sizes: ModelSizes, factors: Factors, kept: StateBytes, inside: bool) -> float:
    if inside and factors.parameters != factors.optimizer:
        return kept.moved_parameter * sizes.parameters / factors.parameters.size
    if factors.parameters.size > 1:
        largest = max((module.parameters for module in sizes.outside), default=0)
        layers = min(_LAYERS_IN_FLIGHT, sizes.layers)
        return kept.moved_parameter * max(layers * sizes.layer_parameters, largest)
    return kept.moved_parameter * sizes.parameters if kept.copied else 0.0
