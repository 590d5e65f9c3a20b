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

    `pipeline` names the axis whose devices hold different layers; see `PipelineEnds`.
    """

    axis: str | tuple[str, ...] = "tp"
    pipeline: str | None = None

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

    def sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis)

    def shard_index(self) -> jax.Array:
        return lax.axis_index(self.axis)


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
