"""How a model's arrays are exchanged over the mesh: not at all, by hand under `shard_map`, or by XLA's
partitioner.

Mesh axes are `dp` (data parallel), `tp` (tensor parallel, and sequence parallel between blocks) and, with a
pipeline of layers, `pp`. Layer functions are written once, against `Parallel`: whether `[batch, seq, hidden]`
is a shard of the sequence, and whether a sum is a partial one, is known only here.

The layers of a pipeline lie on different stages. Its ends, embedding and head, belong to none: every stage holds
a part of the vocabulary, so that they unbalance nothing.

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
    """Matmuls with the collective of their operand or result, for use under `shard_map`, such as
    `dhelix.runtime.collective_matmul.CollectiveMatmuls`."""

    def all_gather_matmul(self, x: jax.Array, weights: Sequence[jax.Array], axis_name: Any) -> Sequence[jax.Array]:
        """`x [batch, seq / tp, k]` gathered, times each of `weights [k, columns]`: `[batch, seq, columns]`."""
        ...

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """`x [batch, seq, k / tp]` times `w [k / tp, columns]`, summed, scattered: `[batch, seq / tp, columns]`."""
        ...

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        """`x [rows, k / tp]` times `w [k / tp, columns]`, summed: `[rows, columns]`, the same on all devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Parallel:
    """One device: each exchange is the identity."""

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        """A shard of the sequence `[batch, seq / tp, hidden]` to all of it, for a block's column-parallel
        matmuls."""
        return x

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        """The row-parallel matmul's partial sums `[batch, seq, hidden]` to the sum's `[batch, seq / tp,
        hidden]`."""
        return partial_sum

    def gather_matmul(self, equation: str, x: jax.Array, weights: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """A shard of the sequence `[batch, seq / tp, hidden]`, gathered, times column-parallel weights `[hidden, ...]`.

        `equation` is that of `jnp.einsum` for each of them. A product is made when it is asked for, so that what is
        done with it stands beside it in the program.
        """
        gathered = self.gather_sequence(x)
        return (jnp.einsum(equation, gathered, weight) for weight in weights)

    def row_matmul(self, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`x [batch, seq, ...]` times a row-parallel weight `[..., hidden]`, which `scatter_product` completes.

        In two calls, so that a layer can recompute `x` in its backward.
        """
        return jnp.einsum(equation, x, weight)

    def scatter_product(self, product: jax.Array) -> jax.Array:
        """What `row_matmul` returned, summed and scattered: `[batch, seq / tp, hidden]`."""
        return self.scatter_sequence(product)

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        """What a look-up in this device's shard of a table found, zeros for the rest, likewise."""
        return self.scatter_sequence(rows)

    def split_features(self, x: jax.Array) -> jax.Array:
        """Says that `x [batch, seq, heads or ffn or vocab, ...]` holds this device's share of dimension 2."""
        return x

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over the shards of the vocabulary."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Maximum over the shards of the vocabulary."""
        return x

    def shard_index(self) -> jax.Array | int:
        """Which shard of the vocabulary this device holds."""
        return 0

    @property
    def ends(self) -> "Parallel":
        """How embedding and head are split: as the layers are, unless these form a pipeline."""
        return self

    def to_layers(self, x: jax.Array) -> jax.Array:
        """The ends' shard of the sequence `[batch, seq / (tp pp), hidden]` to the layers' `[batch, seq / tp,
        hidden]`."""
        return x

    def from_layers(self, x: jax.Array) -> jax.Array:
        """The layers' shard of the sequence, zero but on the last layer's stage, to the ends'."""
        return x


SINGLE_DEVICE = Parallel()


@dataclasses.dataclass(frozen=True)
class ManualParallel(Parallel):
    """Under `shard_map` over `axis`: explicit collectives.

    The transpose of all-gather is reduce-scatter and the other way round, which is right whether or not
    `shard_map` tracks replication. `sum` and `max` have no such agreement and are used only inside the
    hand-written derivative of the cross-entropy.

    `pipeline` names the axis whose devices hold different layers; see `PipelineEnds`. With `collective_matmuls`, the
    layers' matmuls and their collectives are its.
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
    """Under `shard_map` over `axis`, without sequence parallelism, as in inference: the sequence is whole on each
    device, and an all-reduce completes a row-parallel matmul.

    A single new token has no sequence to split. For the forward pass alone: `gather_sequence` sums no cotangents.
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
        # Sequences and their tokens are rows alike, so that one token of each still makes rows to cut into pieces.
        flat = x.reshape(rows[0] * rows[1], -1), weight.reshape(-1, columns)
        return self.collective_matmuls.matmul_all_reduce(*flat, self.axis).reshape(*rows, columns)


@dataclasses.dataclass(frozen=True)
class PipelineEnds(ManualParallel):
    """Embedding and head of a pipeline: `axis` is (tp, pp), so both divide vocabulary and sequence.

    The pipeline's part is the inner one of a `tp` shard, which makes gathering and scattering it contiguous.
    The embedding's result is used on the first chunk's stage, and has zero cotangents on the others; the head's
    input comes from the last chunk's stage, and is zero on the others. So the sum over the stages, scattered, is
    each one's part of it, and the derivatives are those of the collectives.
    """

    stages: str = "pp"

    def to_layers(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.stages, axis=1, tiled=True)

    def from_layers(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, self.stages, scatter_dimension=1, tiled=True)


@dataclasses.dataclass(frozen=True)
class AutoParallel(Parallel):
    """Under `jit` with annotated parameters: the same points of the program become sharding constraints."""

    mesh: Mesh

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("dp")))

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        # Whole first, so that the backward gathers the cotangent once for both of its matmuls.
        whole = lax.with_sharding_constraint(partial_sum, NamedSharding(self.mesh, PartitionSpec("dp")))
        return lax.with_sharding_constraint(whole, NamedSharding(self.mesh, PartitionSpec("dp", "tp")))

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        # Not whole first: under a pipeline XLA's partitioner aborts on a look-up whose table is split over one axis,
        # and its indices and result over another one alone.
        return lax.with_sharding_constraint(rows, NamedSharding(self.mesh, PartitionSpec("dp", "tp")))

    def split_features(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("dp", None, "tp")))


def make_mesh(dp: int, tp: int, devices: Sequence[Any] | None = None, pp: int = 1) -> Mesh:
    """A `dp` x `tp` mesh, or with `pp` stages `pp` x `dp` x `tp`; neighbouring devices share a `tp` group, so
    that it stays inside a node."""
    devices = jax.devices() if devices is None else devices
    axes = ({"pp": pp} if pp > 1 else {}) | {"dp": dp, "tp": tp}
    size = math.prod(axes.values())
    if size > len(devices):
        text = " x ".join(f"{name} {extent}" for name, extent in axes.items())
        raise ValueError(f"a mesh of {text} needs {size} devices, and there are {len(devices)}")
    grid = np.array(devices[:size]).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def vocab_position(parallel: Parallel, ids: jax.Array, shard_size: int) -> jax.Array:
    """Where token `ids` fall in this device's shard of the vocabulary; outside of `[0, shard_size)` on the
    others."""
    return ids - jnp.asarray(parallel.shard_index() * shard_size, ids.dtype)
