"""Describes a GEMM that is summed over devices: owners and order of the tiles, and the layout of received parts.

The owner of a tile is the device that sums it.

    product         one block for each owner; the blocks are below each other or side by side
    order           tiles of other devices first, then own tiles in between and at the end: `SummedGemm.job`
    staged          other devices' parts of this device's tiles, piece by piece: `SummedGemm.staged_shape`

`summed_matmul` multiplies, sends and sums in this order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import gemm_tiles
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import Gemm, Tile

MOST_DEVICES = 8
MANY_DEVICES = 5  # from here on, slots and rendezvous take so much that other numbers are better
_REGISTERS = gemm_tiles.MEMORY_REGISTERS, gemm_tiles.COMPUTE_REGISTERS
_REGISTERS_OF_MANY = 56, 224
_SMALL_PART = 64 * 128  # elements of a part that leaves registers of the multiplying warpgroups unused


class Job(NamedTuple):
    """A cluster's tile and its owner.

    Attributes:
      turn: tells the owner, which is the device `turn + 1` places further on. So `devices - 1` is this device.
      tile: the tile's number among its owner's tiles.
      row, column: position in the whole product, in tiles of a cluster.
    """

    turn: jax.Array
    tile: jax.Array
    row: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class SummedGemm:
    """A GEMM with its sum over devices.

    Attributes:
      gemm: the local product.
      devices: number of devices on the axis.
      scatter: whether each device keeps only its rows.
      shots: with 2 shots, parts go to their owners. With 1 shot, all parts go to all devices (all-reduce only).
      lead: number of tiles of each other device before the first own tile. As many own tiles come after the last tile
        of another device. The number must be at least 1; otherwise owners wait for each other forever. None: as many
        as all clusters compute at once, so that parts have arrived when they are needed.
    """

    gemm: Gemm
    devices: int
    scatter: bool
    shots: int = 2
    lead: int | None = None

    @property
    def owners(self) -> int:
        return 1 if self.shots == 1 else self.devices

    @property
    def by_rows(self) -> bool:
        """Whether owners' blocks are below each other; otherwise they are side by side."""
        return self.scatter or self.gemm.m % (self.owners * self.gemm.cluster_rows) == 0

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one owner's block, in tiles of a cluster."""
        rows, columns = self.gemm.m // self.gemm.cluster_rows, self.gemm.column_tiles
        return (rows // self.owners, columns) if self.by_rows else (rows, columns // self.owners)

    @property
    def tiles(self) -> int:
        """Number of tiles (of a whole cluster) that one device owns."""
        return self.block[0] * self.block[1]

    @property
    def own_behind(self) -> int:
        """Number of own tiles after the last tile of another device: `lead`, limited by the number of tiles."""
        return min(self.tiles, self.gemm.clusters if self.lead is None else self.lead)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First row and column of each piece in which a warpgroup's part of a tile is sent."""
        return self.gemm.pieces(self.gemm.part)

    @property
    def staged_shape(self) -> tuple[int, ...]:
        """Shape of the received parts, [source, block's tile, warpgroup, piece, row, column]. A piece is contiguous."""
        sources = self.devices if self.shots == 1 else self.devices - 1
        tiles = self.tiles * self.gemm.cluster
        return sources, tiles, 2, len(self.pieces), gemm_tiles.PIECE_ROWS, self.gemm.store_columns

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the loading and of the multiplying warpgroups.

        Beside the loads, one warp of the loading warpgroup holds the stamps of all devices (`device_barrier`).
        """
        rows, columns = self.gemm.part
        many = self.devices >= MANY_DEVICES and rows * columns <= _SMALL_PART
        return _REGISTERS_OF_MANY if many else _REGISTERS

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.gemm.m // self.devices if self.scatter else self.gemm.m, self.gemm.n

    def refusal(self) -> str | None:
        """Returns why this plan is impossible; None if it is possible."""
        gemm, n = self.gemm, self.devices
        if n < 2:
            return "an axis of one device has nothing to sum"
        if n > MOST_DEVICES:
            return f"{n} devices are more than {MOST_DEVICES}, the most whose parts fit into shared memory"
        if self.lead is not None and self.lead < 1:
            return f"a lead of {self.lead} puts own tiles before those of others that they wait for"
        if gemm.splits > 1 and self.shots == 2:
            return "splits are for products that all devices send to all, in one wave of tiles"
        if self.scatter and gemm.m % (n * gemm.cluster_rows):
            return f"{gemm.m} rows over {n} devices are not a multiple of {gemm.cluster_rows} each"
        if not self.by_rows and (gemm.m % gemm.cluster_rows or gemm.n % (n * gemm.tiles.tile_n)):
            return f"{gemm.m} x {gemm.n} do not divide over {n} devices into {gemm.cluster_rows} x {gemm.tiles.tile_n}"
        if reason := gemm.refusal():
            return reason
        if self.shots == 2 and gemm.store_slots < n:
            return f"{gemm.store_slots} slots of shared memory are too few for pieces of {n} devices"
        return None

    def order(self, me: jax.Array) -> gemm_tiles.Order:
        """The order of tiles, for `hopper_gemm`."""

        def order(number: jax.Array) -> Tile:
            job = self.job(me, number)
            return Tile(job.row, job.column)

        return order

    def job(self, me: jax.Array, number: jax.Array) -> Job:
        """The number-th job of device `me`. Relative to `me`, the order of jobs is the same on all devices.

        The order begins with `own_behind` tiles of each other device; the devices take turns. Then each round has one
        tile of every other device and one own tile. The remaining own tiles come at the end. The own tile's place in a
        round moves on with every wave, so that no block gets only own tiles. In the example, 2.0 is tile 0 of the
        device two places further on, and 0.0 is an own tile.

            3 devices, 4 tiles each, own_behind = 2      1.0 2.0 1.1 2.1 | 0.0 1.2 2.2 | 0.1 1.3 2.3 | 0.2 0.3
        """
        i32 = jnp.int32
        number, _ = self.gemm.tile_and_split(number)
        n, others, lead = self.devices, self.devices - 1, self.own_behind
        rounds = self.tiles - lead
        rest = number - others * lead
        round_, place = lax.div(rest, i32(n)), lax.rem(rest, i32(n))
        slot = lax.rem(lax.div(round_ * n, i32(self.gemm.clusters)), i32(n))
        mixed = (rest >= 0) & (rest < n * rounds)
        own = (rest >= n * rounds) | (mixed & (place == slot))
        other = jnp.where(rest < 0, number, others * (lead + round_) + place - (place > slot).astype(i32))
        own_tile = jnp.where(mixed, round_, rest - others * rounds)
        turn = jnp.where(own, others, lax.rem(other, i32(others)))
        tile = jnp.where(own, own_tile, lax.div(other, i32(others)))
        if self.shots == 1:
            turn, tile = i32(others), number
        row, column = gemm_tiles.banded(*self.block, self.gemm.tiles.group)(tile)
        shift = lax.rem(me + 1 + turn, i32(n)) if self.shots == 2 else i32(0)
        if self.by_rows:
            return Job(turn, tile, row + shift * self.block[0], column)
        return Job(turn, tile, row, column + shift * self.block[1])


def gemm_for(site: Site, tiles: Tiles, shots: int = 2) -> Gemm:
    """Returns the local product of `site`. Its blocks form no clusters unless `tiles` says so.

    With two shots, a warpgroup has a slot for a piece of each device. Pieces are as wide as shared memory allows next
    to the operands. For this width, there are as many slots as possible.
    """
    cluster, splits = tiles.cluster or 1, tiles.splits or 1
    gemm = Gemm(site.rows, site.columns, site.contraction, site.dtype, tiles, cluster, halves=False, splits=splits)
    least = max(2, site.axis_size if shots == 2 else 2)
    for columns in (64, 32, 16):
        narrow = replace(gemm, store_columns=columns)
        for slots in range(max(least, len(narrow.pieces(gemm.part))), least - 1, -1):
            if (made := replace(narrow, store_slots=slots)).refusal() is None:
                return made
    return gemm
