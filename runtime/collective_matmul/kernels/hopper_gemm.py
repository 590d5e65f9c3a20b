"""The GEMM that Mosaic-GPU kernels for Hopper share: a persistent, warp-specialised loop over output tiles.

    block = 3 warpgroups                       cluster = `cluster` blocks below each other: same columns,
      0, 1   multiply: wgmma, store tiles      next rows; each loads its share of a tile of w and
      2      warp 0 loads tiles, 1-3 are free  multicasts it to all (half the traffic from L2)

    tile i of a cluster      load_tiles (warp 0)                       multiply_tiles (warpgroups 0 and 1)
      tile = order(...)        before_step(tile, k): wait for data       wait full[slot], wgmma, free the slot before
      for k in steps           wait free[slot]                           ...
                               rows of x, columns of w -> slot           store(tile, piece, row, column), piece by piece
                                                                         after_tile(tile)

The ring of `steps` slots runs on from tile to tile: while a tile is stored, the next one is loaded. Tiles left for a
last round that would fill half of the SMs or less are cut in two along the rows, and all clusters share them:

    3 clusters, 4 tiles      0 0 0 0 | 3 3 3 3      ->      0 0 0 0 | 3 3       time of a tile and a half instead of two
                             1 1 1 1 |                      1 1 1 1 | 3'3'
                             2 2 2 2 |                      2 2 2 2 |

What differs between the kernels is in hooks: `order` (which tile comes when), `load_rows` (where rows of x lie) with
`before_step` (when they are there), `store` (where a piece of the result goes) and `after_tile` (whom to tell).

Contract: x [m, k] @ w [k, n], both row-major, accumulated in float32, bfloat16 or float16; `Gemm.refusal` says why
sizes or tiles cannot be had. Columns beyond n of the last tile are loaded as zeros and not stored.

Use, inside the body of a `plgpu.kernel` that `Gemm.launch` describes:

    buffers = scratch, from scratch_types=dict(buffers=gemm.buffers())
    @pl.when(lax.axis_index(GROUP) == MEMORY_GROUP)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: load_tiles(gemm, buffers, order, load_rows, w))
    @pl.when(lax.axis_index(GROUP) < MEMORY_GROUP)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        multiply_tiles(gemm, buffers, order, store)
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

from dhelix.profiles.collective_matmul import Tiles

# Axes of the launch: cluster, block in it, warpgroup in that. No mesh may have an axis of such a name.
CLUSTERS, RANK, GROUP = "gemm_clusters", "gemm_rank", "gemm_group"
MEMORY_GROUP = 2
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # per thread; 128 * (40 + 2 * 232) of the 65536 of an SM
SHARED_BYTES = 227 * 1024  # of an SM, what one block may have
H200_SMS = 132
_PIECE_ROWS = 64  # what one wgmma gives
_HALF_TIME = 0.56  # of a half, in times of a tile
_BARRIER_BYTES = 1024  # more than all barriers take, alignment included


class Tile(NamedTuple):
    """A tile of the result of one block: in units of tile_m rows and of tile_n columns, over the whole result."""

    row: jax.Array
    column: jax.Array
    first: jax.Array | int = 0  # of its rows, those from here on: a half begins in the middle


Order = Callable[[jax.Array], Tile]


@dataclass(frozen=True)
class Gemm:
    """One GEMM and how it is cut.

    Attributes:
      m, n, k: of the whole product.
      dtype: of operands and result.
      tiles: of one block; `wide` says along which dimension its two warpgroups split it.
      cluster: blocks that share the columns of w.
      store_columns: width of the pieces in which a warpgroup stores its part.
      store_slots: such pieces in flight for each warpgroup.
      halves: cut tiles in two where that shortens the last round.
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

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the part of a tile that one warpgroup multiplies."""
        wide = self.tiles.wide
        return self.tiles.tile_m // (2 if wide == "M" else 1), self.tiles.tile_n // (2 if wide == "N" else 1)

    @property
    def half_part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of half a tile: below each other only where 64 rows are left."""
        rows, columns = self.part
        return (rows // 2, columns) if rows % 128 == 0 else (rows, columns // 2)

    @property
    def cluster_rows(self) -> int:
        """Rows of the tile of a cluster."""
        return self.tiles.tile_m * self.cluster

    @property
    def column_tiles(self) -> int:
        return pl.cdiv(self.n, self.tiles.tile_n)

    @property
    def cluster_tiles(self) -> int:
        """Tiles of all clusters together."""
        return self.m // self.cluster_rows * self.column_tiles

    @property
    def whole_tiles(self) -> int:
        """Tiles of all clusters that are not cut in two: the first ones."""
        left, (rows, columns) = self.cluster_tiles % self.clusters, self.half_part
        fits = self.halves and rows % _PIECE_ROWS == 0 and columns % 64 == 0 and columns % self.store_columns == 0
        return self.cluster_tiles - left if fits and 2 * left <= self.clusters else self.cluster_tiles

    @property
    def rounds(self) -> float:
        """Tiles that the busiest cluster multiplies, one after the other; half a tile counts as what it takes.

        4096x8192x2560 by 128x256 on an H200 (2026-11-21): 254 us with 2 tiles and a half, 297 us with 3.
        """
        whole = math.ceil(self.whole_tiles / self.clusters)
        return whole if self.whole_tiles == self.cluster_tiles else whole + _HALF_TIME

    @property
    def steps(self) -> int:
        """Steps along k."""
        return self.k // self.tiles.tile_k

    @property
    def clusters(self) -> int:
        """Clusters that run, on an SM for each block."""
        return (self.tiles.sms or H200_SMS) // self.cluster

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        operands = self.tiles.steps * (self.tiles.tile_m + self.tiles.tile_n) * self.tiles.tile_k
        return 2 * (operands + 2 * self.store_slots * _PIECE_ROWS * self.store_columns) + _BARRIER_BYTES

    def refusal(self, extra_bytes: int = 0) -> str | None:
        """Why this GEMM cannot be had, None if it can; `extra_bytes` of shared memory go to others."""
        tiles, (rows, columns) = self.tiles, self.part
        if self.dtype not in ("bfloat16", "float16"):
            return f"{self.dtype} is neither bfloat16 nor float16"
        if rows % _PIECE_ROWS or columns % self.store_columns or columns > 256:
            return (
                f"tiles {tiles.key} give a warpgroup {rows} x {columns}: 64 rows, {self.store_columns} to 256 columns"
            )
        if tiles.tile_k != 64:
            return f"tile_k is {tiles.tile_k}: only 64 fills a swizzle of 128 bytes"
        if tiles.steps < 2 or self.clusters < 1:
            return f"tiles {tiles.key} need 2 steps or more and {self.cluster} SMs or more"
        if self.m % self.cluster_rows or self.k % tiles.tile_k or self.n % 64 or not (self.m and self.n and self.k):
            return f"{self.m} x {self.k} x {self.n} is no multiple of {self.cluster_rows} x {tiles.tile_k} x 64"
        if (needed := self.shared_bytes + extra_bytes) > SHARED_BYTES:
            return f"tiles {tiles.key} need {needed} bytes of shared memory, of {SHARED_BYTES}"
        return None

    def buffers(self) -> dict[str, Any]:
        """What the hooks' functions below share, as scratch of the kernel."""
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
            out=plgpu.SMEM((2, self.store_slots, _PIECE_ROWS, self.store_columns), self.dtype, transforms=stored),
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
    """How rows of so many elements lie in shared memory without bank conflicts."""
    made: Any = plgpu  # these classes are abstract to type checkers
    return made.TilingTransform((8, columns)), made.SwizzleTransform(2 * columns)


def banded(rows: int, columns: int, width: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Walks a grid in bands of `width` rows, down the rows of a band first: neighbours in time share operands in L2.

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


def load_tiles(
    gemm: Gemm,
    buffers: Any,
    order: Order,
    load_rows: Callable[[Tile, jax.Array, Any, Any], None],
    w: Any,
    before_step: Callable[[Tile, jax.Array], None] = lambda tile, step: None,
) -> None:
    """Keeps the ring of operand tiles filled; for one warp of the memory warpgroup.

    Args:
      gemm, buffers: as allocated.
      order: tile of the cluster from its number; its rows are in units of `cluster_rows`.
      load_rows: (tile, step, destination, barrier), copies as many rows of x as the destination has, from row
        `tile.first` of the tile on, at that step of k, with one `plgpu.copy_gmem_to_smem` that arrives at the barrier.
      w: [k, n] in global memory.
      before_step: (tile, step), called before anything of that step is loaded; may wait.
    """
    tiles = gemm.tiles

    def step_of_tile(number: jax.Array, tile: Tile, height: int, step: jax.Array) -> None:
        count = number * gemm.steps + step
        slot = lax.rem(count, jnp.int32(tiles.steps))
        before_step(tile, step)
        pl.when(count >= tiles.steps)(lambda: plgpu.barrier_wait(buffers["free"].at[slot]))
        load_rows(tile, step, buffers["x"].at[slot, pl.ds(0, height)], buffers["full"].at[slot])
        plgpu.copy_gmem_to_smem(
            w.at[pl.ds(step * tiles.tile_k, tiles.tile_k), pl.ds(tile.column * tiles.tile_n, tiles.tile_n)],
            buffers["w"].at[slot],
            buffers["full"].at[slot],
            collective_axes=(RANK,) if gemm.cluster > 1 else None,
        )

    def load_tile(number: jax.Array, tile: Tile, height: int) -> None:
        pl.loop(0, gemm.steps)(functools.partial(step_of_tile, number, tile, height))

    number_of_tiles = _each_tile(gemm, order, load_tile)
    # A block must not leave while another one of its cluster may still write into it or arrive at its barriers.
    total = number_of_tiles * gemm.steps
    for back in range(tiles.steps, 0, -1):
        pl.when(total >= back)(
            lambda back=back: plgpu.barrier_wait(buffers["free"].at[lax.rem(total - back, jnp.int32(tiles.steps))])
        )


def multiply_tiles(
    gemm: Gemm,
    buffers: Any,
    order: Order,
    store: Callable[[Any, jax.Array, jax.Array], None],
    after_tile: Callable[[Tile], None] = lambda tile: None,
) -> None:
    """Multiplies and stores what `load_tiles` loads, in the same order; for both compute warpgroups.

    Args:
      gemm, buffers, order: as in `load_tiles`.
      store: (piece, row, column), copies a piece of 64 x `store_columns` in shared memory to where elements from
        (row, column) of the result on belong, with one `plgpu.copy_smem_to_gmem`.
      after_tile: (tile), called when all pieces of this warpgroup's part of a tile, or of a half, are on their way, not
        there: wait with `plgpu.wait_smem_to_gmem(0)` before telling anybody.
    """
    group = lax.axis_index(GROUP)

    def multiply_tile(number: jax.Array, tile: Tile, height: int) -> None:
        rows, columns = gemm.part if height == gemm.tiles.tile_m else gemm.half_part
        row, column = (group * rows, 0) if rows < height else (0, group * columns)
        result = product(gemm, buffers, number, (row, column), (rows, columns)).astype(gemm.dtype)
        first = tile.row * gemm.tiles.tile_m + tile.first + row, tile.column * gemm.tiles.tile_n + column
        _store_pieces(gemm, buffers["out"].at[group], result, functools.partial(_shifted, store, first))
        after_tile(tile)

    _each_tile(gemm, order, multiply_tile)
    plgpu.wait_smem_to_gmem(0)


def product(
    gemm: Gemm,
    buffers: Any,
    number: jax.Array,
    first: tuple[jax.Array | int, jax.Array | int],
    part: tuple[int, int],
    at_step: Callable[[jax.Array], None] = lambda step: None,
) -> jax.Array:
    """A warpgroup's part of the tile that is loaded as the `number`-th, in float32, as it lies in registers.

    Args:
      gemm, buffers: as in `load_tiles`.
      first: row and column of the part in the tile of a block.
      part: its rows and columns.
      at_step: called in each step along k, while that step is multiplied.
    """
    full, free, slots = buffers["full"], buffers["free"], jnp.int32(gemm.tiles.steps)
    rows, columns = (pl.ds(*span) for span in zip(first, part, strict=True))

    def multiply(sums: Any) -> jax.Array:
        @pl.loop(0, gemm.steps)
        def _(step: jax.Array) -> None:
            count = number * gemm.steps + step
            slot = lax.rem(count, slots)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(sums, buffers["x"].at[slot, rows], buffers["w"].at[slot, :, columns])
            plgpu.wgmma_wait(1)  # the one before is done with its slot, while this one runs
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(count - 1, slots)]))
            at_step(step)

        result = sums[...]
        plgpu.barrier_arrive(free.at[lax.rem((number + 1) * gemm.steps - 1, slots)])
        return result

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(part, jnp.float32))


def _each_tile(gemm: Gemm, order: Order, visit: Callable[[jax.Array, Tile, int], None]) -> jax.Array:
    """Visits (running number, tile of this block, rows) for all tiles of this cluster, a half at the end; returns their
    number."""
    cluster, rank, height = lax.axis_index(CLUSTERS), lax.axis_index(RANK), gemm.tiles.tile_m
    whole = lax.div(gemm.whole_tiles - cluster + (gemm.clusters - 1), jnp.int32(gemm.clusters))
    halves = 2 * (gemm.cluster_tiles - gemm.whole_tiles)

    @pl.loop(0, whole)
    def _(number: jax.Array) -> None:
        row, column, _ = order(cluster + number * gemm.clusters)
        visit(number, Tile(row * gemm.cluster + rank, column), height)

    if not halves:
        return whole

    @pl.when(cluster < halves)
    def _() -> None:
        row, column, _ = order(gemm.whole_tiles + lax.div(cluster, jnp.int32(2)))
        first = lax.rem(cluster, jnp.int32(2)) * (height // 2)
        visit(whole, Tile(row * gemm.cluster + rank, column, first), height // 2)

    return whole + jnp.where(cluster < halves, 1, 0)


def _store_pieces(gemm: Gemm, slots: Any, result: jax.Array, store: Callable[[Any, int, int], None]) -> None:
    rows, columns = result.shape
    places = [(i, j) for i in range(0, rows, _PIECE_ROWS) for j in range(0, columns, gemm.store_columns)]
    if len(places) % gemm.store_slots:  # the slots do not go round: begin anew
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, (i, j) in enumerate(places):
        piece = slots.at[number % gemm.store_slots]
        plgpu.wait_smem_to_gmem(gemm.store_slots - 1, wait_read_only=True)
        piece[...] = result[i : i + _PIECE_ROWS, j : j + gemm.store_columns]
        plgpu.commit_smem()
        store(piece, i, j)


def _shifted(store: Callable[..., None], first: tuple[jax.Array, jax.Array], piece: Any, row: int, column: int) -> None:
    store(piece, first[0] + row, first[1] + column)
