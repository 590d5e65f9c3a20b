"""Describes how an all-gather matmul transfers rows of other devices, and in which order it computes tiles.

    rows of a device       tiles of rows, window by window; in each window chunk by chunk along k
    chunk of a tile        pieces [rows, columns], one TMA copy each; a batch of pieces is counted together
    tiles of the result    own rows first, then the others' rows in the order of arrival

`all_gather_matmul` pulls, waits and multiplies in this order.
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
      chunks: number of chunks along k, for each tile of rows. Each chunk has a counter. A tile of the result can begin
        when the counter of the first chunk is full.
      rows, columns: size of a piece, which one TMA copy moves.
      stages: number of pieces in flight for each block. All but one are loads, because loads take longer than stores.
      batch: number of pieces that are counted together.
    """

    chunks: int = 1
    rows: int = 8
    columns: int = 256
    stages: int = 4
    batch: int = 2

    @property
    def window(self) -> int:
        """Number of tiles of rows that move together: first chunk 0 of all these tiles, then chunk 1, and so on."""
        return 2 if self.chunks == 1 else 8

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block needs for pieces in flight."""
        return 2 * self.stages * self.rows * self.columns


@dataclass(frozen=True)
class GatheredGemm:
    """An all-gather matmul on one device: the GEMM over all rows, and the transfer of the rows."""

    gemm: Gemm
    transfer: Transfer
    devices: int

    @property
    def rows(self) -> int:
        """Rows of each device."""
        return self.gemm.m // self.devices

    @property
    def row_tiles(self) -> int:
        """Number of tiles of rows (`tile_m` rows each) in the rows of each device."""
        return self.rows // self.gemm.tiles.tile_m

    @property
    def chunk_steps(self) -> int:
        return self.gemm.steps // self.transfer.chunks

    @property
    def chunk_pieces(self) -> int:
        """Number of pieces in a chunk of a tile of rows."""
        transfer = self.transfer
        return self.gemm.tiles.tile_m * (self.gemm.k // transfer.chunks) // (transfer.rows * transfer.columns)

    @property
    def chunk_batches(self) -> int:
        """Number of batches of pieces in a chunk; when all have arrived, the counter of the chunk is full."""
        return self.chunk_pieces // self.transfer.batch

    @property
    def batches(self) -> int:
        """Number of batches of pieces in the rows of all devices. The blocks of this device share the work on them."""
        return self.devices * self.row_tiles * self.transfer.chunks * self.chunk_batches

    @property
    def blocks(self) -> int:
        return self.gemm.clusters * self.gemm.cluster

    def refusal(self) -> str | None:
        """Returns why this plan is impossible; None if it is possible."""
        gemm, transfer = self.gemm, self.transfer
        if self.devices < 2:
            return "an axis of one device has nothing to gather"
        if gemm.tiles.splits not in (None, 1):
            return "splits are for products that are summed over devices"
        if gemm.m % self.devices or self.rows % gemm.cluster_rows:
            return f"{self.rows} rows per device are not a multiple of {gemm.cluster_rows}"
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
        """The order of the tiles: first own tiles, then tiles of other devices, which alternate from row to row."""
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
        """The place of a piece: (source, row tile, chunk, first row, first column). Source 0 is the next device.

        Pieces are ordered by window, then by chunk, row tile and source. Own rows come last, as source `devices - 1`.
        They are copied, too, because the gathered x contains them.
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
    """Quotient and remainder of `number` by `by`, as int32."""
    number = jnp.int32(number)  # with JAX_ENABLE_X64 a loop's counter is wider
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
