"""How the devices of a mesh exchange a model's arrays: by hand under `shard_map`, by XLA's partitioner, or not at all.

`common.mesh` names the mesh axes. The functions of the layers call a `Parallel` for each exchange. Only this module
knows whether an array `[batch, seq, hidden]` is a shard of the sequence, and whether a sum is partial. With context
parallelism, a device has only its part of each sequence from the start, and `seq` means the length of this part.

The layers of a pipeline are on different stages. All stages can share embedding and head, the *ends* of the model. Each
stage then holds a part of the vocabulary, so that all stages have equal work.

    embedding   [vocab / (tp pp), hidden]   partial sums  -> [b, s / (tp pp), h] -gather-> [b, s / tp, h]
    layers      of this stage               [b, s / tp, h], another chunk of the model on each stage
    head        [hidden, vocab / (tp pp)]   [b, s / tp, h] -slice-> [b, s / (tp pp), h] -gather-> [b, s, h]
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.models.common.context_parallel import Context
from dhelix.models.common.mesh import row_entry


class CollectiveMatmuls(Protocol):
    """Functions that fuse a matmul with the collective of its operand or result, for use under `shard_map`.

    `dhelix.runtime.collective_matmul.CollectiveMatmuls` implements this protocol.
    """

    def all_gather_matmul(self, x: jax.Array, weights: Sequence[jax.Array], axis_name: Any) -> Sequence[jax.Array]:
        """Gathers `x [batch, seq / tp, k]` and multiplies it with each of `weights [k, columns]`.

        Returns:
          The products, `[batch, seq, columns]` each.
        """
        ...

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """Multiplies `x [batch, seq, k / tp]` with `w [k / tp, columns]` and reduce-scatters the product.

        Returns:
          This device's shard of the sum, `[batch, seq / tp, columns]`.
        """
        ...

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """Multiplies `x [rows, k / tp]` with `w [k / tp, columns]` and all-reduces the product.

        Returns:
          The sum, `[rows, columns]`, equal on all devices.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The exchanges of a model on one device, where each exchange is the identity. Subclasses exchange over a mesh.

    Attributes:
      context: how devices share a sequence within attention; None if every device has whole sequences.
    """

    context: Context | None = dataclasses.field(default=None, kw_only=True)

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        """Gathers sequence shards `[batch, seq / tp, hidden]` for the column-parallel matmuls of a block."""
        return x

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        """Reduce-scatters the partial sums of a row-parallel matmul.

        The argument is `[batch, seq, hidden]`, and the result is `[batch, seq / tp, hidden]`.
        """
        return partial_sum

    def gather_matmul(self, equation: str, x: jax.Array, weights: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Gathers sequence shards `[batch, seq / tp, hidden]`, and multiplies them with column-parallel weights.

        Each product is computed when the iterator reaches it. So the code that uses a product comes directly after the
        product in the program.

        Args:
          equation: equation for `jnp.einsum`, which is the same for each weight.
          weights: `[hidden, ...]`.

        Returns:
          An iterator over the products.
        """
        gathered = self.gather_sequence(x)
        return (jnp.einsum(equation, gathered, weight) for weight in weights)

    def row_matmul(self, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Multiplies `x [batch, seq, ...]` with a row-parallel weight `[..., hidden]`. The product is a partial sum.

        `scatter_product` completes the sum. It is a separate method, so that a layer can recompute `x` in its backward
        pass.
        """
        return jnp.einsum(equation, x, weight)

    def scatter_product(self, product: jax.Array) -> jax.Array:
        """Sums the results of `row_matmul` over devices, and scatters the sum: `[batch, seq / tp, hidden]`."""
        return self.scatter_sequence(product)

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        """Sums and scatters the result of a look-up. Rows that are not in this device's shard of a table are zero."""
        return self.scatter_sequence(rows)

    def split_features(self, x: jax.Array) -> jax.Array:
        """Declares that dimension 2 of `x [batch, seq, heads or ffn or vocab, ...]` is split over `tp`."""
        return x

    def gather_features(self, x: jax.Array) -> jax.Array:
        """Gathers a column-parallel result `[batch, seq, features / tp]` to `[batch, seq, features]`."""
        return x

    def to_experts(self, rows: jax.Array) -> jax.Array:
        """Sends the rows of each expert to the device that holds the expert.

        The argument is `[experts, rows, hidden]`, and the result is `[experts / ep, ep * rows, hidden]`.
        """
        return rows

    def from_experts(self, rows: jax.Array) -> jax.Array:
        """Sends the experts' rows back: the inverse of `to_experts`."""
        return rows

    @property
    def gathers_weights(self) -> bool:
        """Whether `whole_weights` gathers any weights."""
        return False

    def whole_weights(self, weights: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Gathers the weights that are split over data-parallel replicas (FSDP)."""
        return weights

    def sequence_shards(self) -> int:
        """Number of devices of a `tp` group, which share a sequence between blocks."""
        return 1

    def own_sequence(self, x: jax.Array) -> jax.Array:
        """This device's part of whole rows `x [batch, seq]`, in the order of `positions`: `[batch, seq / cp]`."""
        return x if self.context is None else self.context.own_part(x)

    def positions(self, seq: int, dtype: Any = jnp.int32) -> jax.Array:
        """The positions of this device's `seq` tokens in their sequence, `[seq]` in `dtype`."""
        if self.context is None:
            return jnp.arange(seq, dtype=dtype)
        return self.context.positions(seq).astype(dtype)

    def mean_over_rows(self, x: jax.Array) -> jax.Array:
        """The mean of `x` over the devices that have different rows of the batch."""
        return x

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of `x` over the shards of the vocabulary."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum of `x` over the shards of the vocabulary."""
        return x

    @property
    def holds_shards(self) -> bool:
        """Whether weights are this device's shards. Otherwise they are whole, in the view of the model's code."""
        return False

    def shard_index(self) -> jax.Array | int:
        """The index of the shard that this device holds, of the vocabulary or of the heads."""
        return 0

    @property
    def ends(self) -> "Parallel":
        """The exchanges of embedding and head: those of the layers, unless the layers form a pipeline."""
        return self

    def to_layers(self, x: jax.Array) -> jax.Array:
        """Converts the embedding's output to the sequence shards of the layers.

        The argument is `[batch, seq / (tp pp), hidden]`, and the result is `[batch, seq / tp, hidden]`.
        """
        return x

    def from_layers(self, x: jax.Array) -> jax.Array:
        """Converts the last layer's output to the sequence shards of the head.

        The argument is zero on all stages but the stage of the last layer.
        """
        return x


SINGLE_DEVICE = Parallel()

GATHERED = "gathered weight"
"""The name for `jax.checkpoint` of weights that a layer has gathered. The backward pass gathers them again."""


@dataclasses.dataclass(frozen=True)
class ManualParallel(Parallel):
    """The exchanges under a `shard_map` over `axis`, as explicit collectives.

    All-gather and reduce-scatter are each other's transpose, whether or not `shard_map` tracks replication. `sum` and
    `max` do not have this property. So only the cross-entropy uses them, because its derivative is written by hand.

    Attributes:
      axis: the mesh axis or axes over which arrays are exchanged.
      pipeline: the mesh axis of the pipeline's stages, if all stages share embedding and head (`PipelineEnds`).
      experts: the axis whose devices hold different experts; None if every device holds all.
      rows: the axes that split the batch.
      split_over_dp: names of the weights that are split over `dp`, with the dimension that is split. Under FSDP, a
        layer gathers them when it needs them. The transpose reduce-scatters their gradients.
      collective_matmuls: if given, these functions replace the matmuls of layers and their collectives.
    """

    axis: str | tuple[str, ...] = "tp"
    pipeline: str | None = None
    experts: str | None = None
    rows: tuple[str, ...] = ("dp",)
    split_over_dp: tuple[tuple[str, int], ...] = ()
    collective_matmuls: CollectiveMatmuls | None = None

    @property
    def ends(self) -> Parallel:
        if self.pipeline is None:
            return self
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        return PipelineEnds(axis=(*axes, self.pipeline), stages=self.pipeline)

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        return lax.psum_scatter(partial_sum, self.axis, scatter_dimension=1, tiled=True)

    def gather_features(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis, axis=2, tiled=True)

    def gather_matmul(self, equation: str, x: jax.Array, weights: Sequence[jax.Array]) -> Iterator[jax.Array]:
        if self.collective_matmuls is None:
            return super().gather_matmul(equation, x, weights)
        flat = [weight.reshape(weight.shape[0], -1) for weight in weights]
        products = self.collective_matmuls.all_gather_matmul(x, flat, self.axis)
        return (y.reshape(*y.shape[:2], *w.shape[1:]) for y, w in zip(products, weights, strict=True))

    def row_matmul(self, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        if self.collective_matmuls is None:
            return super().row_matmul(equation, x, weight)
        flat = x.reshape(*x.shape[:2], -1), weight.reshape(-1, weight.shape[-1])
        return self.collective_matmuls.matmul_reduce_scatter(*flat, self.axis)

    def scatter_product(self, product: jax.Array) -> jax.Array:
        return super().scatter_product(product) if self.collective_matmuls is None else product

    def to_experts(self, rows: jax.Array) -> jax.Array:
        return rows if self.experts is None else lax.all_to_all(rows, self.experts, 0, 1, tiled=True)

    def from_experts(self, rows: jax.Array) -> jax.Array:
        return rows if self.experts is None else lax.all_to_all(rows, self.experts, 1, 0, tiled=True)

    @property
    def gathers_weights(self) -> bool:
        return bool(self.split_over_dp)

    def whole_weights(self, weights: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        split = dict(self.split_over_dp)
        whole = {
            name: checkpoint_name(lax.all_gather(weight, "dp", axis=split[name], tiled=True), GATHERED)
            for name, weight in weights.items()
            if name in split
        }
        return {**weights, **whole}

    def sequence_shards(self) -> int:
        return lax.axis_size(self.axis)

    def mean_over_rows(self, x: jax.Array) -> jax.Array:
        return lax.pmean(x, self.rows)

    def sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis)

    @property
    def holds_shards(self) -> bool:
        return True

    def shard_index(self) -> jax.Array:
        return lax.axis_index(self.axis)


@dataclasses.dataclass(frozen=True)
class TensorParallel(ManualParallel):
    """The exchanges under a `shard_map` over `axis` without sequence parallelism, for inference.

    Each device holds the whole sequence, because a single new token cannot be split. An all-reduce completes a
    row-parallel matmul. This class is for the forward pass only, because `gather_sequence` does not sum cotangents.
    """

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return x

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        return lax.psum(partial_sum, self.axis)

    def gather_matmul(self, equation: str, x: jax.Array, weights: Sequence[jax.Array]) -> Iterator[jax.Array]:
        return Parallel.gather_matmul(self, equation, x, weights)

    def row_matmul(self, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        if self.collective_matmuls is None:
            return super().row_matmul(equation, x, weight)
        rows, columns = x.shape[:2], weight.shape[-1]
        # The tokens of all sequences become rows. So even one token per sequence gives rows to cut into pieces.
        flat = x.reshape(rows[0] * rows[1], -1), weight.reshape(-1, columns)
        return self.collective_matmuls.matmul_all_reduce(*flat, self.axis).reshape(*rows, columns)


@dataclasses.dataclass(frozen=True)
class PipelineEnds(ManualParallel):
    """The exchanges of embedding and head that all stages of a pipeline share.

    `axis` is (tp, pp), so both axes split the vocabulary and the sequence. `pp` splits each `tp` shard further, so
    gathering and scattering over `pp` is contiguous. Only the stage of the first chunk uses the result of the
    embedding, so the cotangents of this result are zero on the other stages. The input of the head comes from the stage
    of the last chunk and is zero on the other stages. So a reduce-scatter over the stages gives each stage its part.
    For the same reason, the transposes of the collectives are the correct derivatives.
    """

    stages: str = "pp"

    def to_layers(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.stages, axis=1, tiled=True)

    def from_layers(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, self.stages, scatter_dimension=1, tiled=True)


@dataclasses.dataclass(frozen=True)
class AutoParallel(Parallel):
    """The exchanges under `jit`, as sharding constraints. XLA's partitioner makes the collectives."""

    mesh: Mesh

    @property
    def rows(self) -> str | tuple[str, ...]:
        """The entry of a spec that splits the rows of the batch."""
        return row_entry(self.mesh)

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.rows)))

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        # The first constraint is to the whole sequence. So the backward pass gathers the cotangent once for both of its
        # matmuls.
        whole = lax.with_sharding_constraint(partial_sum, NamedSharding(self.mesh, PartitionSpec(self.rows)))
        return lax.with_sharding_constraint(whole, NamedSharding(self.mesh, PartitionSpec(self.rows, "tp")))

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        # There is no constraint to the whole sequence here. With it, XLA's partitioner would abort in a pipeline: it
        # cannot partition a look-up if the table is split over one axis, and indices and result only over another axis.
        return lax.with_sharding_constraint(rows, NamedSharding(self.mesh, PartitionSpec(self.rows, "tp")))

    def split_features(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.rows, None, "tp")))

    def gather_features(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.rows)))


def vocab_position(parallel: Parallel, ids: jax.Array, shard_size: int) -> jax.Array:
    """The positions of the token `ids` in this device's shard of the vocabulary.

    A position outside of `[0, shard_size)` means that the shard does not contain the token.
    """
    return ids - jnp.asarray(parallel.shard_index() * shard_size, ids.dtype)
