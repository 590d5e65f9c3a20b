"""Sizes that decide memory and communication of a step: a model's modules, bytes per parameter, and the batch.

    sizes = decoder("llama-7b", layers=32, hidden=4096, attention=4 * 4096**2, feed_forward=3 * 4096 * 11008, ...)
    sizes.parameters                  # Phi of AMSP: 6.7e9
    sizes.modules                     # the K modules of a layer, each gathered by one all-gather

AMSP (arXiv 2311.00257) calls the parameters of the model Phi, those of module i of a layer Phi_i, and has L layers with
K modules. Parameters outside of layers (embedding, head, last norm) are sharded as well. amsp's sum over i leaves them
out; they are `outside` here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dhelix.passes.sharding.factors import ShardingError

OPS_PER_PARAMETER = 2.0
"""Floating-point operations of a forward pass for each token and multiplied parameter."""


@dataclass(frozen=True)
class Module:
    """A part of the model whose parameters are gathered and dropped together.

    Attributes:
      name: readable name, such as `attention`.
      parameters: number of parameters.
      flops: floating-point operations of the forward pass for each token. Backward takes twice as many.
      rows: rows of a table from which each token reads one, if nothing else reads it and devices may exchange rows, as
        XLA does under automatic sharding; else 0.
    """

    name: str
    parameters: int
    flops: float
    rows: int = 0

    def exchanged(self, group: int, tokens: int) -> int:
        """Parameters in the rows that a group of devices exchanges in a micro-batch, instead of the whole table.

        XLA exchanges rows if they are fewer than those of the table, and if the table divides.

        Args:
          group: number of devices that split the table.
          tokens: tokens of a micro-batch on one device.

        Returns:
          The elements of all rows of the group; 0 if the group moves the module itself.
        """
        read = group * tokens
        if group == 1 or read >= self.rows or self.rows % group:
            return 0
        return self.parameters // self.rows * read


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer: its first dimension, and its number of elements."""

    rows: int
    size: int


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model. All of its layers are equal.

    Attributes:
      name: readable name.
      layers: number of layers, AMSP's L.
      modules: the modules of one layer in forward order, AMSP's K modules.
      outside: the modules outside of layers: embedding first, head last.
      hidden: width of the activations between layers.
      vocabulary: number of columns of the logits; 0 if there is no head.
      kept: bytes for each token that backward needs of one layer's forward; None: `memory.KEPT` is assumed.
      matrices: the matrices of one layer; none if unknown.
    """

    name: str
    layers: int
    modules: tuple[Module, ...]
    outside: tuple[Module, ...]
    hidden: int
    vocabulary: int = 0
    kept: float | None = None
    matrices: tuple[Matrix, ...] = ()

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(module.parameters for module in self.modules)

    @property
    def outside_parameters(self) -> int:
        """Parameters outside of layers, Phi_e."""
        return sum(module.parameters for module in self.outside)

    @property
    def parameters(self) -> int:
        """Parameters of the model, Phi."""
        return self.layers * self.layer_parameters + self.outside_parameters

    @property
    def layer_flops(self) -> float:
        """Floating-point operations of a layer's forward pass for each token."""
        return sum(module.flops for module in self.modules)

    @property
    def flops(self) -> float:
        """Floating-point operations of the model's forward pass for each token."""
        return self.layers * self.layer_flops + sum(module.flops for module in self.outside)

    def only(
        self, name: str, modules: Sequence[int], outside: Sequence[int], matrices: tuple[Matrix, ...] = ()
    ) -> ModelSizes:
        """The same model and its compute, with the parameters of a group alone.

        Args:
          name: name of the group.
          modules, outside: how many parameters of each module belong to the group, in the order of this model's.
          matrices: those of `matrices` that belong to it.
        """
        both = ((self.modules, modules), (self.outside, outside))
        inside, ends = (tuple(replace(m, parameters=n) for m, n in zip(*one, strict=True)) for one in both)
        return replace(self, name=name, modules=inside, outside=ends, matrices=matrices)


def decoder(
    name: str,
    *,
    layers: int,
    hidden: int,
    vocabulary: int,
    attention: int,
    feed_forward: int,
    score_width: int,
    sequence: int,
    multiplied: int | None = None,
    tied: bool = False,
) -> ModelSizes:
    """The sizes of a decoder with two modules in a layer, attention and feed-forward.

    Operations are those of Megatron-LM's formula, as AMSP counts MFU: causal attention is not halved.

    Args:
      layers, hidden, vocabulary: as in `ModelSizes`.
      attention, feed_forward: parameters of each module of one layer.
      score_width: heads x width of a head.
      sequence: tokens of a sequence.
      multiplied: parameters of a feed-forward that compute one token; None means all. Experts have fewer.
      tied: whether embedding and head are one table.
    """
    scores = 2 * OPS_PER_PARAMETER * score_width * sequence  # queries with keys, weights with values
    table = vocabulary * hidden
    active = feed_forward if multiplied is None else multiplied
    head = Module("head", hidden + (0 if tied else table), OPS_PER_PARAMETER * table)
    return ModelSizes(
        name,
        layers,
        (
            Module("attention", attention, OPS_PER_PARAMETER * attention + scores),
            Module("feed-forward", feed_forward, OPS_PER_PARAMETER * active),
        ),
        (Module("embedding", table, 0.0), head),
        hidden,
        vocabulary,
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each state, and of what a collective moves.

    Attributes:
      parameter, gradient, optimizer: bytes that are kept, AMSP's b_P, b_G and b_O.
      moved_parameter: bytes that an all-gather or a broadcast moves per parameter, B_p.
      moved_gradient: bytes that a reduction moves per gradient, B_g.
      copied: whether computation needs a copy of what is gathered, because parameters are kept in another type.
    """

    parameter: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0
    moved_parameter: float = 2.0
    moved_gradient: float = 2.0
    copied: bool = False

    def __post_init__(self) -> None:
        if min(self.parameter, self.gradient, self.optimizer) < 0.0:
            raise ShardingError("bytes per parameter are at least 0")


MIXED = StateBytes()
"""bf16 parameters and gradients; fp32 parameters, momentum and variance as optimizer states (AMSP II-C)."""

SINGLE = StateBytes(4.0, 4.0, 8.0, 2.0, 4.0, copied=True)
"""fp32 parameters, gradients and Adam moments; computation in bf16, so that gathers move 2 bytes. Under ZeRO-1
in a `shard_map`, gradients are summed over devices in fp32."""

BF16_SUMS = replace(SINGLE, moved_gradient=2.0)
"""As SINGLE, but gradients are summed over devices in bf16: by XLA's partitioner, or layer by layer in a shard_map."""

FROZEN = replace(MIXED, gradient=0.0, optimizer=0.0)
"""bf16 parameters that are not trained, such as the base of adapters."""

TRAINERS = {"mixed": MIXED, "single": SINGLE, "bf16-sums": BF16_SUMS}
"""Names of the kinds of `StateBytes`."""


@dataclass(frozen=True)
class Batch:
    """What one device computes in a step.

    Attributes:
      sequences: sequences of a micro-batch, AMSP's B.
      length: tokens of a sequence, S.
      microbatches: micro-batches of a step, M.
      recompute: whether backward computes the forward of each layer again.
    """

    sequences: int = 1
    length: int = 4096
    microbatches: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if min(self.sequences, self.length, self.microbatches) < 1:
            raise ShardingError("a step needs at least 1 micro-batch of 1 sequence of 1 token")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one device."""
        return self.sequences * self.length

    @property
    def strands(self) -> int:
        """Micro-batches that are computed at once: two, if there are two."""
        return min(self.microbatches, 2)


def check_names(names: Iterable[str]) -> None:
    """Raises ShardingError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ShardingError(f"{name!r} occurs twice; give each its own name")
        seen.add(name)
