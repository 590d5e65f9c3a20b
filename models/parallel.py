"""How a model's arrays are exchanged over the mesh: not at all, by hand under `shard_map`, or by XLA's partitioner.

Mesh axes are `dp` (data parallel), `tp` (tensor parallel, and sequence parallel between blocks) and, with a pipeline of
layers, `pp`. Layer functions are written once, against `Parallel`. Only this module knows whether `[batch, seq,
hidden]` is a shard of the sequence, and whether a sum is partial.

The layers of a pipeline are on different stages. The pipeline's ends, embedding and head, belong to no single stage:
every stage holds a part of the vocabulary, which keeps the stages balanced.

    embedding   [vocab / (tp pp), hidden]   partial sums  -> [b, s / (tp pp), h] -gather-> [b, s / tp, h]
    layers      of this stage               [b, s / tp, h], another chunk of the model on each stage
    head        [hidden, vocab / (tp pp)]   [b, s / tp, h] -slice-> [b, s / (tp pp), h] -gather-> [b, s, h]
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class CollectiveMatmuls(Protocol):
    """Matmuls fused with the collective of their operand or result, for use under `shard_map`.

    `dhelix.runtime.collective_matmul.CollectiveMatmuls` implements this protocol.
    """

    def all_gather_matmul(self, x: jax.Array, weights: Sequence[jax.Array], axis_name: Any) -> Sequence[jax.Array]:
        """Gathers `x [batch, seq / tp, k]` and multiplies it with each of `weights [k, columns]`: `[batch, seq,
        columns]`.
        """
        ...

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """`x [batch, seq, k / tp]` times `w [k / tp, columns]`, reduce-scattered: `[batch, seq / tp, columns]`."""
        ...

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """`x [rows, k / tp]` times `w [k / tp, columns]`, all-reduced: `[rows, columns]`, equal on all devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Parallel:
    """One device: each exchange is the identity. Subclasses exchange over a mesh."""

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        """Gathers the sequence shard `[batch, seq / tp, hidden]` for a block's column-parallel matmuls."""
        return x

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        """Reduce-scatters row-parallel partial sums, `[batch, seq, hidden]` to `[batch, seq / tp, hidden]`."""
        return partial_sum

    def gather_matmul(self, equation: str, x: jax.Array, weights: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Gathers the sequence shard `[batch, seq / tp, hidden]`, and multiplies it with column-parallel weights.

        Products are computed lazily, so that the code that uses a product follows it directly in the program.

        Args:
          equation: `jnp.einsum`'s, for each weight.
          weights: `[hidden, ...]`.

        Returns:
          An iterator over the products.
        """
        gathered = self.gather_sequence(x)
        return (jnp.einsum(equation, gathered, weight) for weight in weights)

    def row_matmul(self, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`x [batch, seq, ...]` times a row-parallel weight `[..., hidden]`. `scatter_product` completes it.

        These are two calls so that a layer can recompute `x` in its backward.
        """
        return jnp.einsum(equation, x, weight)

    def scatter_product(self, product: jax.Array) -> jax.Array:
        """The result of `row_matmul`, summed and scattered: `[batch, seq / tp, hidden]`."""
        return self.scatter_sequence(product)

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        """Sums and scatters a look-up in this device's shard of a table, whose other rows are zero."""
        return self.scatter_sequence(rows)

    def split_features(self, x: jax.Array) -> jax.Array:
        """States that `x [batch, seq, heads or ffn or vocab, ...]` holds this device's share of dimension 2."""
        return x

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over the shards of the vocabulary."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Maximum over the shards of the vocabulary."""
        return x

    def shard_index(self) -> jax.Array | int:
        """The shard of the vocabulary that this device holds."""
        return 0

    @property
    def ends(self) -> "Parallel":
        """How embedding and head are split: like the layers, unless these form a pipeline."""
        return self

    def to_layers(self, x: jax.Array) -> jax.Array:
        """From the ends' sequence shard `[batch, seq / (tp pp), hidden]` to the layers' `[batch, seq / tp, hidden]`."""
        return x

    def from_layers(self, x: jax.Array) -> jax.Array:
        """From the layers' sequence shard to the ends'. The input is zero on all stages but the last layer's."""
        return x


SINGLE_DEVICE = Parallel()


@dataclasses.dataclass(frozen=True)
class ManualParallel(Parallel):
    """Under `shard_map` over `axis`: explicit collectives.

    All-gather and reduce-scatter are each other's transpose, whether or not `shard_map` tracks replication. `sum` and
    `max` lack this property. So they are used only inside the cross-entropy, whose derivative is hand-written.

    Attributes:
      pipeline: the axis whose devices hold different layers; see `PipelineEnds`.
      collective_matmuls: replaces the layers' matmuls and their collectives.
    """

    axis: str | tuple[str, ...] = "tp"
    pipeline: str | None = None
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

    def sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis)

    def shard_index(self) -> jax.Array:
        return lax.axis_index(self.axis)


@dataclasses.dataclass(frozen=True)
class TensorParallel(ManualParallel):
    """Under `shard_map` over `axis`, without sequence parallelism, for inference.

    Each device holds the whole sequence, because a single new token cannot be split. An all-reduce completes a
    row-parallel matmul. Use it for the forward pass only: `gather_sequence` does not sum cotangents.
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
        # Sequences and tokens both become rows, so that even one token per sequence gives rows to cut into pieces.
        flat = x.reshape(rows[0] * rows[1], -1), weight.reshape(-1, columns)
        return self.collective_matmuls.matmul_all_reduce(*flat, self.axis).reshape(*rows, columns)


@dataclasses.dataclass(frozen=True)
class PipelineEnds(ManualParallel):
    """Embedding and head of a pipeline: `axis` is (tp, pp), so both axes split vocabulary and sequence.

    `pp` splits the inside of a `tp` shard, so gathering and scattering over `pp` is contiguous. Only the first chunk's
    stage uses the embedding's result; its cotangents are zero on the other stages. The head's input comes from the last
    chunk's stage and is zero on the others. So a reduce-scatter over the stages gives each stage its part, and the
    derivatives are those of the collectives.
    """

    stages: str = "pp"

    def to_layers(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.stages, axis=1, tiled=True)

    def from_layers(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, self.stages, scatter_dimension=1, tiled=True)


@dataclasses.dataclass(frozen=True)
class AutoParallel(Parallel):
    """Under `jit` with annotated parameters: each exchange is a sharding constraint."""

    mesh: Mesh

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("dp")))

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        # Constrain to the whole sequence first, so that the backward gathers the cotangent once for both its matmuls.
        whole = lax.with_sharding_constraint(partial_sum, NamedSharding(self.mesh, PartitionSpec("dp")))
        return lax.with_sharding_constraint(whole, NamedSharding(self.mesh, PartitionSpec("dp", "tp")))

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        # No constraint to the whole sequence: under a pipeline, XLA's partitioner aborts on a look-up whose table is
        # split over one axis, and whose indices and result are split only over another.
        return lax.with_sharding_constraint(rows, NamedSharding(self.mesh, PartitionSpec("dp", "tp")))

    def split_features(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("dp", None, "tp")))


def make_mesh(dp: int, tp: int, devices: Sequence[Any] | None = None, pp: int = 1) -> Mesh:
    """A `dp` x `tp` mesh, or `pp` x `dp` x `tp` with `pp` stages.

    Neighbouring devices form a `tp` group, so that it stays inside a node.

    Raises:
      ValueError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    axes = ({"pp": pp} if pp > 1 else {}) | {"dp": dp, "tp": tp}
    size = math.prod(axes.values())
    if size > len(devices):
        text = " x ".join(f"{name} {extent}" for name, extent in axes.items())
        raise ValueError(f"a mesh of {text} needs {size} devices, but there are {len(devices)}")
    grid = np.array(devices[:size]).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def vocab_position(parallel: Parallel, ids: jax.Array, shard_size: int) -> jax.Array:
    """Positions of token `ids` in this device's vocabulary shard; outside of `[0, shard_size)` if it lacks them."""
    return ids - jnp.asarray(parallel.shard_index() * shard_size, ids.dtype)
