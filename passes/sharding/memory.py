"""Memory of one device under given factors: model states, activations, and temporary buffers (AMSP section IV-D).

    D = b_P Phi / |s_p| + b_G Phi / |s_g| + b_O Phi / |s_os| + activations + temporary

Split between tensors, the memory is that of the paper. The paper refers to "existing methodologies" for activations.
Here a layer with flash attention keeps 34 bytes for each token and element of the hidden size. With recomputation, a
layer keeps its input alone, and one layer at a time keeps everything. Temporary buffers are assumed, too: two gathered
layers (one computes, the next arrives), two all-reduce buckets, and logits with their gradients in float32.

Split inside tensors, the memory is that of the program that the decorator compiles, term by term as XLA allocates it.
w are the bytes of the type in which gathered parameters compute, M is the number of micro-batches.

    always     parameters   b_P Phi / |s_os|
               optimizer    b_O Phi / |s_os|
               gradients    b_G Phi / |s_g|          the sums of all micro-batches, if M > 1
                            w Phi / |s_os|           if M = 1; / |s_g| if they are converted for the sum over devices
               gathered     w Phi / |s_p|            what the model reads, if it is not the parameters themselves
                            w Phi / |s_os|           shards that wait for the first forward's gathers, if M > 1
                            w L of one matrix        the largest whose first dimension does not divide by |s_os|: it is
                                                     gathered whole and transposed before backward's gradients are there
               activations  L kept layers
    layers     activations  a kept layer             the gradients of a layer's activations
               gathered     w Phi of a layer         gathered for each strand, if |s_p| > 1
               unreduced    w Phi of a layer         gradients before their reduction, if it runs in backward
    ends       logits       w for each               their gradients take the same memory
               gathered     w Phi outside of layers  if |s_p| > 1
               unreduced    w Phi outside of layers  if |s_g| > 1

Of a table whose rows are exchanged (`sizes.Module.exchanged`), only the rows of a group's tokens are gathered or
unreduced. One strand is at the layers, at the embedding or at the head, so the largest of these counts. Two strands
(M > 1) may be at all of them. The gradients of a single strand take the place of the matrix that was transposed. A
plain step with several micro-batches, without strands, keeps w Phi / |s_g| more: the gradients of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dhelix.passes.sharding.factors import Factor, Factors
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
      activations: what backward needs of forward; split inside, also the gradients of one layer's activations.
      gathered: gathered parameters, or a copy of all parameters in the type of the computation.
      unreduced: buffers of the all-reduce; split inside, gradients that wait for their reduction.
      logits: logits and their gradients.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    unreduced: float = 0.0
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

    def __add__(self, other: Memory) -> Memory:
        """Both at once."""
        return Memory(**{name: size + getattr(other, name) for name, size in self.parts().items()})


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
      bucket: bytes of an all-reduce bucket, AMSP's U. Split inside, gradients are reduced in place.
      split: how optimizer states are split (`step_times.SPLITS`).
    """
    if split == "inside":
        return _of_the_program(sizes, factors, kept, batch)
    phi = float(sizes.parameters)
    return Memory(
        parameters=kept.parameter * phi / factors.parameters.size,
        gradients=kept.gradient * phi / factors.gradients.size,
        optimizer=kept.optimizer * phi / factors.optimizer.size,
        activations=activation_bytes(sizes, batch),
        gathered=_gathered_between(sizes, factors, kept),
        unreduced=_BUCKETS * min(bucket, kept.moved_gradient * phi) if factors.mesh.size > 1 else 0.0,
        logits=_LOGIT * batch.tokens * sizes.vocabulary,
    )


def _gathered_between(sizes: ModelSizes, factors: Factors, kept: StateBytes) -> float:
    if factors.parameters.size > 1:
        largest = max((module.parameters for module in sizes.outside), default=0)
        layers = min(_LAYERS_IN_FLIGHT, sizes.layers)
        return kept.moved_parameter * max(layers * sizes.layer_parameters, largest)
    return kept.moved_parameter * sizes.parameters if kept.copied else 0.0


def _of_the_program(sizes: ModelSizes, factors: Factors, kept: StateBytes, batch: Batch) -> Memory:
    """The memory of a step that splits states inside tensors. The table above has its terms."""
    if batch.microbatches == 1 and kept.moved_gradient <= kept.moved_parameter:
        # Nothing is added up, so gradients are reduced right into the shards of the update. Gradients that are
        # converted for their sum over devices, as in a shard_map, are whole before it.
        factors = replace(factors, gradients=factors.optimizer)
    width, strands = kept.moved_parameter, batch.strands
    activations = batch.tokens * (KEPT * sizes.hidden if sizes.kept is None else sizes.kept)
    held = INPUT * batch.tokens * sizes.hidden if batch.recompute else activations
    gradient = kept.gradient if strands > 1 or not kept.gradient else width
    gradients = gradient * sizes.parameters / factors.gradients.size
    transposed = _transposed(sizes, factors, width)
    always = Memory(
        parameters=kept.parameter * sizes.parameters / factors.optimizer.size,
        gradients=gradients,
        optimizer=kept.optimizer * sizes.parameters / factors.optimizer.size,
        activations=sizes.layers * held,
        gathered=_read(sizes, factors, kept, strands)
        + (transposed if strands > 1 else max(transposed - gradients, 0.0)),
    )
    layers, ends = _passing(sizes, factors, kept, batch, activations)
    return always + (layers + ends if strands > 1 else max(layers, ends, key=lambda found: found.total))


def _passing(
    sizes: ModelSizes, factors: Factors, kept: StateBytes, batch: Batch, activations: float
) -> tuple[Memory, Memory]:
    """What a step needs while it is at the layers, and while it is at the ends.

    Args:
      activations: bytes that a layer keeps.
    """
    width, strands = kept.moved_parameter, batch.strands
    read = width if factors.parameters.size > 1 else 0.0
    written = width if kept.gradient else 0.0
    scattered, one_strand = factors.gradients.size > 1, factors.mesh.size > 1 and strands == 1

    def ends(group: Factor) -> int:
        moved = [module.exchanged(group.size, batch.tokens) or module.parameters for module in sizes.outside]
        return sum(moved) if strands > 1 else max(moved, default=0)

    return (
        Memory(
            activations=activations * (2 if batch.recompute else 1),
            gathered=read * strands * sizes.layer_parameters,
            unreduced=written * sizes.layer_parameters if scattered or one_strand else 0.0,
        ),
        Memory(
            gathered=read * ends(factors.parameters),
            unreduced=written * ends(factors.gradients) if scattered else 0.0,
            logits=width * batch.tokens * sizes.vocabulary,
        ),
    )


def _read(sizes: ModelSizes, factors: Factors, kept: StateBytes, strands: int) -> float:
    """Bytes of what the model reads instead of the parameters themselves, without layers that are gathered in turn."""
    width, shards = kept.moved_parameter, factors.optimizer.size
    if factors.parameters == factors.optimizer:
        return width * sizes.parameters / shards if kept.copied else 0.0
    waiting = width * sizes.parameters / shards if strands > 1 else 0.0
    return width * sizes.parameters / factors.parameters.size + waiting


def _transposed(sizes: ModelSizes, factors: Factors, width: float) -> float:
    if factors.parameters == factors.optimizer:
        return 0.0
    uneven = [matrix.size for matrix in sizes.matrices if matrix.rows % factors.optimizer.size]
    return width * sizes.layers * max(uneven, default=0)
