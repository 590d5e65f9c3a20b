"""Describes how the GEMM of `hopper_gemm` is cut into tiles, half tiles and pieces, and which resources it takes.

result      tiles [tile_m, tile_n], one per block; the `cluster` tiles of a cluster are below each other
tile        two parts, one per compute warpgroup: below each other (`wide` M) or side by side (N)
part        pieces [64, store_columns], which are stored and loaded one by one
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.profiles.collective_matmul.sites import H200_SMS, Tiles

# Axes of the launch: cluster, block in the cluster, warpgroup in the block. No mesh axis may have such a name.
CLUSTERS, RANK, GROUP = "gemm_clusters", "gemm_rank", "gemm_group"
MEMORY_GROUP = 2
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # per thread; 128 * (40 + 2 * 232) of an SM's 65536 registers
SHARED_BYTES = 227 * 1024  # shared memory of an SM that one block may have
PIECE_ROWS = 64  # rows of one wgmma
_MOST_HELD = 64 * 256  # most elements of a part; its sums and the previous rounded part take 192 registers per thread
_HALF_TIME = 0.56  # measured time of a half tile relative to a whole tile
_BARRIER_BYTES = 1024  # more than all barriers take, alignment included
_STEPS_BETWEEN = 4  # the most steps along k between two turns (`Gemm.turn_steps`); chosen by measurement


class Tile(NamedTuple):
    """A block's tile of the result. `row` is in units of tile_m rows, and `column` in units of tile_n columns."""

    row: jax.Array
    column: jax.Array
    first: jax.Array | int = 0  # first row within the tile; not 0 for the second half of a tile


Order = Callable[[jax.Array], Tile]


class Place(NamedTuple):
    """The place of a warpgroup's part of a tile, or of a piece of the part.

    Attributes:
      number: the tile's number, the argument of `order`.
      row, column: row and column of the first element in the whole result.
    """

    number: jax.Array
    row: jax.Array
    column: jax.Array


Store = Callable[[Place, Any, int], None]


@dataclass(frozen=True)
class Gemm:
    """One GEMM, and how it is cut into tiles and pieces.

    Attributes:
      m, n, k: sizes of the whole product.
      dtype: type of operands and result.
      tiles: sizes of the tile of one block. `tiles.wide` is the dimension along which the two compute warpgroups of the
        block split the tile.
      cluster: number of blocks in a cluster. These blocks share the columns of w.
      store_columns: width of the pieces in which a warpgroup stores its part.
      store_slots: number of slots in shared memory for these pieces, per warpgroup.
      halves: whether the tiles of the last round may be cut in two if this shortens the round. A round is one tile on
        each cluster.
      splits: number of blocks that share the contraction of a tile (`split_sums`).
    """

    m: int
    n: int
    k: int
    dtype: str
    tiles: Tiles
    cluster: int = 2
    store_columns: int = 64
    store_slots: int = 2
    halves: bool = True
    splits: int = 1

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the part of a tile that one warpgroup multiplies."""
        wide = self.tiles.wide
        return self.tiles.tile_m // (2 if wide == "M" else 1), self.tiles.tile_n // (2 if wide == "N" else 1)

    @property
    def half_part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of half a tile.

        If the rows of a part are a multiple of 128, the warpgroup keeps half of the rows. Otherwise it keeps half of
        the columns, and warpgroups that were below each other are then side by side.
        """
        rows, columns = self.part
        return (rows // 2, columns) if rows % 128 == 0 else (rows, columns // 2)

    def pieces(self, part: tuple[int, ...]) -> list[tuple[int, int]]:
        """First row and column of each piece in which a warpgroup stores its part of a tile."""
        rows, columns = part
        return [(i, j) for i in range(0, rows, PIECE_ROWS) for j in range(0, columns, self.store_columns)]

    @property
    def turn_steps(self) -> list[int]:
        """The steps along k at which the previous tile's part is processed (turns): one per piece, and two more."""
        turns = len(self.pieces(self.part)) + 2
        between = max(1, min(_STEPS_BETWEEN, (self.steps - 2) // (turns - 1)))
        return [min(1 + between * turn, self.steps - 1) for turn in range(turns)]

    @property
    def cluster_rows(self) -> int:
        """Rows of a cluster's tile."""
        return self.tiles.tile_m * self.cluster

    @property
    def column_tiles(self) -> int:
        return pl.cdiv(self.n, self.tiles.tile_n)

    @property
    def cluster_tiles(self) -> int:
        """Number of tiles that all clusters compute. If the contraction is split, each split counts as a tile."""
        return self.m // self.cluster_rows * self.column_tiles * self.splits

    @property
    def whole_tiles(self) -> int:
        """Number of tiles, over all clusters, that are not cut in two. These tiles come first."""
        left, (rows, columns) = self.cluster_tiles % self.clusters, self.half_part
        fits = self.halves and rows % PIECE_ROWS == 0 and columns % 64 == 0 and columns % self.store_columns == 0
        fits = fits and (self.tiles.wide == "M" or self.part[0] % (2 * PIECE_ROWS) == 0)  # half of the rows is cut off
        return self.cluster_tiles - left if fits and 2 * left <= self.clusters else self.cluster_tiles

    @property
    def rounds(self) -> float:
        """Number of tiles that the busiest cluster multiplies in sequence. A half tile counts as `_HALF_TIME` tiles."""
        whole = math.ceil(self.whole_tiles / self.clusters)
        return whole if self.whole_tiles == self.cluster_tiles else whole + _HALF_TIME

    @property
    def steps(self) -> int:
        """Number of steps along k in one split."""
        return self.k // self.tiles.tile_k // self.splits

    def tile_and_split(self, number: jax.Array) -> tuple[jax.Array, jax.Array | int]:
        """Returns the number of a tile of the result, and the number of its split.

        The argument `number` counts the splits of all tiles, over all clusters.
        """
        if self.splits == 1:
            return number, 0
        return lax.div(number, jnp.int32(self.splits)), lax.rem(number, jnp.int32(self.splits))

    @property
    def clusters(self) -> int:
        """Number of clusters that run at the same time. Each block has an SM of its own."""
        return (self.tiles.sms or H200_SMS) // self.cluster

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block needs."""
        operands = self.tiles.steps * (self.tiles.tile_m + self.tiles.tile_n) * self.tiles.tile_k
        return 2 * (operands + 2 * self.store_slots * PIECE_ROWS * self.store_columns) + _BARRIER_BYTES

    def refusal(self, extra_bytes: int = 0) -> str | None:
        """Returns why this GEMM is impossible; None if it is possible.

        Args:
          extra_bytes: bytes of shared memory that the kernel uses for other purposes.
        """
        tiles, (rows, columns) = self.tiles, self.part
        if self.dtype not in ("bfloat16", "float16"):
            return f"{self.dtype} is neither bfloat16 nor float16"
        beside = 64 if tiles.wide == "N" else self.store_columns  # alignment of the second part in shared memory
        if rows % PIECE_ROWS or columns % self.store_columns or columns % beside or columns > 256:
            return (
                f"tiles {tiles.key} give a warpgroup {rows} x {columns}, but it needs 64 rows and {self.store_columns} "
                "to 256 columns"
            )
        if rows * columns > _MOST_HELD:
            return f"tiles {tiles.key} give a warpgroup {rows} x {columns}, which does not fit into its registers"
        if tiles.tile_k != 64:
            return f"tile_k is {tiles.tile_k}: only 64 fills a swizzle of 128 bytes"
        if tiles.steps < 2 or self.clusters < 1:
            return f"tiles {tiles.key} need at least 2 steps and {self.cluster} SMs"
        if self.m % self.cluster_rows or self.k % tiles.tile_k or self.n % 64 or not (self.m and self.n and self.k):
            return f"{self.m} x {self.k} x {self.n} is not a multiple of {self.cluster_rows} x {tiles.tile_k} x 64"
        if self.k // tiles.tile_k % self.splits:
            return f"{self.k // tiles.tile_k} steps of the contraction do not divide by {self.splits} splits"
        if self.splits > 1 and (self.cluster_tiles > self.clusters or self.whole_tiles < self.cluster_tiles):
            return (
                f"{self.cluster_tiles} tiles and splits are more than the {self.clusters} that run at once, or are cut "
                "in two"
            )
        if (needed := self.shared_bytes + extra_bytes) > SHARED_BYTES:
            return f"tiles {tiles.key} need {needed} bytes of shared memory, but there are {SHARED_BYTES}"
        return None

    def buffers(self) -> dict[str, Any]:
        """The types of the scratch buffers that `load_tiles` and `multiply_tiles` share."""
        tiles = self.tiles
        swizzled = _swizzled(64)
        stored = _swizzled(min(64, self.store_columns))
        free = functools.partial(plgpu.Barrier, num_arrivals=2, num_barriers=tiles.steps)
        if self.cluster > 1:
            free = functools.partial(
                plgpu.ClusterBarrier, collective_axes=(RANK,), num_arrivals=2, num_barriers=tiles.steps
            )
        return dict(
            x=plgpu.SMEM((tiles.steps, tiles.tile_m, tiles.tile_k), self.dtype, transforms=swizzled),
            w=plgpu.SMEM((tiles.steps, tiles.tile_k, tiles.tile_n), self.dtype, transforms=swizzled),
            out=plgpu.SMEM((2, self.store_slots, PIECE_ROWS, self.store_columns), self.dtype, transforms=stored),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.steps),
            free=free(),
        )

    def launch(self) -> dict[str, Any]:
        """Arguments of `plgpu.kernel`: one block per SM, in clusters, three warpgroups each."""
        return dict(
            grid=(self.clusters,),
            grid_names=(CLUSTERS,),
            cluster=(self.cluster,),
            cluster_names=(RANK,),
            num_threads=MEMORY_GROUP + 1,
            thread_name=GROUP,
        )


def _swizzled(columns: int) -> tuple[Any, Any]:
    """The layout in which rows of `columns` elements have no bank conflicts in shared memory."""
    made: Any = plgpu  # type checkers take these classes for abstract ones
    return made.TilingTransform((8, columns)), made.SwizzleTransform(2 * columns)


def banded(rows: int, columns: int, width: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns a function from a tile's number to its row and column in a grid of tiles.

    The order goes through bands of `width` rows. In a band, it goes down one column after another, so that consecutive
    tiles share operands in L2.

    rows = 4, columns = 3, width = 2      0  2  4
                                          1  3  5
                                          6  8 10
                                          7  9 11
    """

    def place(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        band, inside = lax.div(index, jnp.int32(width * columns)), lax.rem(index, jnp.int32(width * columns))
        height = jnp.minimum(jnp.int32(width), rows - band * width)
        return band * width + lax.rem(inside, height), lax.div(inside, height)

    return place
