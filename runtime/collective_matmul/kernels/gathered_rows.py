"""How rows of other devices come to an all-gather matmul: in pieces and chunks, in which order, and tiles behind them.

    rows of a device       tiles of rows; window by window of them, in each chunk by chunk along k
    chunk of a tile        pieces [rows, columns], what one TMA copy moves; some are counted together, as a batch
    tiles of the result    own rows first, then the others' in the order in which they arrive

`all_gather_matmul` pulls, waits and multiplies by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.collective_matmul.kernels import gemm_tiles
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import Gemm, Tile


@dataclass(frozen=True)
class Transfer:
    """How rows are pulled from device to device.

    Attributes:
      chunks: counters for each tile of rows, along k: a tile of the result can begin when the first one is full.
      rows, columns: of a piece, what one TMA copy moves.
      stages: pieces in flight for each block; all but one are loads, which take longer than stores.
      batch: pieces that are counted together.
    """

    chunks: int = 1
    rows: int = 8
    columns: int = 256
    stages: int = 4
    batch: int = 2

    @property
    def window(self) -> int:
        """Tiles of rows that are moved together, chunk by chunk."""
        return 2 if self.chunks == 1 else 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return 2 * self.stages * self.rows * self.columns


@dataclass(frozen=True)
class GatheredGemm:
    """An all-gather matmul on one device: the GEMM over all rows, and how rows come."""

    gemm: Gemm
    transfer: Transfer
    devices: int

    @property
    def rows(self) -> int:
        """Of each device."""
        return self.gemm.m // self.devices

    @property
    def row_tiles(self) -> int:
        """Of each device, tiles of one block."""
        return self.rows // self.gemm.tiles.tile_m

    @property
    def chunk_steps(self) -> int:
        return self.gemm.steps // self.transfer.chunks

    @property
    def chunk_pieces(self) -> int:
        """Pieces of a tile of rows in a chunk."""
        transfer = self.transfer
        return self.gemm.tiles.tile_m * (self.gemm.k // transfer.chunks) // (transfer.rows * transfer.columns)

    @property
    def chunk_batches(self) -> int:
        """What one counter counts."""
        return self.chunk_pieces // self.transfer.batch

    @property
    def batches(self) -> int:
        """Of all blocks, from all devices."""
        return self.devices * self.row_tiles * self.transfer.chunks * self.chunk_batches

    @property
    def blocks(self) -> int:
        return self.gemm.clusters * self.gemm.cluster

    def refusal(self) -> str | None:
        gemm, transfer = self.gemm, self.transfer
        if self.devices < 2:
            return "an axis of one device has nothing to gather"
        if gemm.tiles.splits not in (None, 1):
            return "splits are for products that are summed over devices"
        if gemm.m % self.devices or self.rows % gemm.cluster_rows:
            return f"{self.rows} rows on each device are no multiple of {gemm.cluster_rows}"
        if (
            gemm.steps % transfer.chunks
            or (gemm.k // transfer.chunks) % transfer.columns
            or gemm.tiles.tile_m % transfer.rows
            or self.chunk_pieces % transfer.batch
        ):
            pieces = f"{transfer.batch} pieces of {transfer.rows} x {transfer.columns}"
            return f"{pieces} do not fill {transfer.chunks} chunks of k = {gemm.k}"
        return gemm.refusal(transfer.shared_bytes)

    def order(self, me: jax.Array) -> gemm_tiles.Order:
        """Own tiles first, then those of the others: row tile by row tile, one of each device in turn."""
        own_rows = self.rows // self.gemm.cluster_rows
        columns, band, peers = self.gemm.column_tiles, self.gemm.tiles.group, self.devices - 1
        own_place = gemm_tiles.banded(own_rows, columns, band)
        other_place = gemm_tiles.banded(own_rows * peers, columns, band)

        def order(number: jax.Array) -> Tile:
            own_row, own_column = own_place(number)
            other, other_column = other_place(number - own_rows * columns)
            own = number < own_rows * columns
            step = jnp.where(own, 0, lax.rem(other, jnp.int32(peers)) + 1)
            row = jnp.where(own, own_row, lax.div(other, jnp.int32(peers)))
            source = lax.rem(me + step, jnp.int32(self.devices))
            return Tile(source * own_rows + row, jnp.where(own, own_column, other_column))

        return order

    def piece(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """(source, row tile, chunk, first row, first column) of a piece; sources count from the next device on.

        Window by window, in it chunk by chunk, in that row tile by row tile, in that one source after the other, and
        then along k. Own rows, for who wants them gathered, come after all that as source `devices - 1`.
        """
        transfer, tile_m, peers = self.transfer, self.gemm.tiles.tile_m, self.devices - 1
        window = math.gcd(transfer.window, self.row_tiles)
        unit, inside = divided(number, self.chunk_pieces)
        others = peers * self.row_tiles * transfer.chunks
        own = unit >= others
        tile, source = divided(unit, peers)
        tile = jnp.where(own, unit - others, tile)
        first, rest = divided(tile, window * transfer.chunks)
        chunk, row_tile = divided(rest, window)
        row_tile = first * window + row_tile
        down, across = divided(inside, self.gemm.k // transfer.chunks // transfer.columns)
        row = row_tile * tile_m + down * transfer.rows
        column = chunk * (self.gemm.k // transfer.chunks) + across * transfer.columns
        return jnp.where(own, peers, source), row_tile, chunk, row, column


def divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    number = jnp.int32(number)  # with JAX_ENABLE_X64 a loop's counter is wider
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
