"""How a model's arrays are exchanged over the mesh: not at all, by hand under `shard_map`, or by XLA's
partitioner.

Mesh axes are `dp` (data parallel) and `tp` (tensor parallel, and sequence parallel between blocks). Layer
functions are written once, against `Parallel`: whether `[batch, seq, hidden]` is a shard of the sequence, and
whether a sum is a partial one, is known only here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


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


SINGLE_DEVICE = Parallel()


@dataclasses.dataclass(frozen=True)
class ManualParallel(Parallel):
    """Under `shard_map` over `axis`: explicit collectives.

    The transpose of all-gather is reduce-scatter and the other way round, which is right whether or not
    `shard_map` tracks replication. `sum` and `max` have no such agreement and are used only inside the
    hand-written derivative of the cross-entropy.
    """

    axis: str = "tp"

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    def scatter_sequence(self, partial_sum: jax.Array) -> jax.Array:
        return lax.psum_scatter(partial_sum, self.axis, scatter_dimension=1, tiled=True)

    def sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis)

    def shard_index(self) -> jax.Array:
        return lax.axis_index(self.axis)


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

    def split_features(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("dp", None, "tp")))


def make_mesh(dp: int, tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A `dp` x `tp` mesh; neighbouring devices share a `tp` group, so that it stays inside a node."""
    devices = jax.devices() if devices is None else devices
    if dp * tp > len(devices):
        raise ValueError(f"a mesh of dp {dp} x tp {tp} needs {dp * tp} devices, and there are {len(devices)}")
    grid = np.array(devices[: dp * tp]).reshape(dp, tp)
    return Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))


def vocab_position(parallel: Parallel, ids: jax.Array, shard_size: int) -> jax.Array:
    """Where token `ids` fall in this device's shard of the vocabulary; outside of `[0, shard_size)` on the
    others."""
    return ids - jnp.asarray(parallel.shard_index() * shard_size, ids.dtype)
