"""The GEMM that Mosaic-GPU kernels for Hopper share: a persistent, warp-specialised loop over output tiles.

    block = 3 warpgroups                       cluster = `cluster` blocks below each other: same columns,
      0, 1   multiply: wgmma, store tiles      next rows; each loads its share of a tile of w and
      2      warp 0 loads tiles, 1-3 are free  multicasts it to all (half the traffic from L2)

    tile i of a cluster      load_tiles (warp 0)                       multiply_tiles (warpgroups 0 and 1)
      tile = order(...)        before_step(tile, k): wait for data       wait full[slot], wgmma, free the previous slot
      for k in steps           wait free[slot]                           every few steps: process a piece of tile i - 1,
                               rows of x, columns of w -> slot           for example store it

The ring of `steps` slots for operands continues from tile to tile. A finished tile is processed while the next tile is
multiplied (`held_parts`). Until then, it stays in registers, rounded, so it takes half as many registers as its float32
sums. Immediate stores would be slower: two of four pieces would have to leave shared memory before the next tile
begins, on all SMs at once. This delay is longest if results go to another GPU.

A round is one tile on each cluster. If the last round would occupy half of the clusters or less, its tiles are cut in
two along the rows:

    3 clusters, 4 tiles      0 0 0 0 | 3 3 3 3      ->      0 0 0 0 | 3 3       time of a tile and a half instead of two
                             1 1 1 1 |                      1 1 1 1 | 3'3'
                             2 2 2 2 |                      2 2 2 2 |

The kernels differ in their hooks: `order` (order of the tiles), `load_rows` (source of the rows of x), `before_step`
(waits for these rows), `behind` and `finish` (process a finished tile).

Contract: the GEMM computes x [m, k] @ w [k, n]. Both operands are row-major, in bfloat16 or float16. Sums are
accumulated in float32. `Gemm.refusal` says why sizes or tiles are impossible. Columns of the last tile beyond n are
loaded as zeros and not stored.

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
        storing = Storing(gemm, buffers["out"].at[group], store)
        multiply_tiles(gemm, buffers, order, storing.behind, storing.finish)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from dhelix.runtime.collective_matmul.kernels.gemm_tiles import (
    CLUSTERS,
    GROUP,
    RANK,
    Gemm,
    Order,
    Place,
    Tile,
)
from dhelix.runtime.collective_matmul.kernels.held_parts import Held


def load_tiles(
    gemm: Gemm,
    buffers: Any,
    order: Order,
    load_rows: Callable[[Tile, jax.Array, Any, Any], None],
    w: Any,
    before_step: Callable[[Tile, jax.Array], None] = lambda tile, step: None,
) -> None:
    """Keeps the ring of operand tiles filled. Runs in one warp of the memory warpgroup.

    Args:
      gemm: the GEMM.
      buffers: allocated as `gemm.buffers()`.
      order: a function from a number to a tile of the cluster. The tile's row is in units of `cluster_rows`.
      load_rows: a function (tile, step, destination, barrier) that copies rows of x at this step along k. It copies as
        many rows as `destination` has, from row `tile.first` of the tile on. It uses one `plgpu.copy_gmem_to_smem`,
        which arrives at the barrier.
      w: [k, n] in global memory.
      before_step: a function (tile, step) that is called before the loads of this step. It may wait.
    """
    tiles = gemm.tiles

    def step_of_tile(number: jax.Array, first: jax.Array | int, tile: Tile, height: int, step: jax.Array) -> None:
        count = number * gemm.steps + step
        slot, step = lax.rem(count, jnp.int32(tiles.steps)), first + step
        before_step(tile, step)
        pl.when(count >= tiles.steps)(lambda: plgpu.barrier_wait(buffers["free"].at[slot]))
        load_rows(tile, step, buffers["x"].at[slot, pl.ds(0, height)], buffers["full"].at[slot])
        plgpu.copy_gmem_to_smem(
            w.at[pl.ds(step * tiles.tile_k, tiles.tile_k), pl.ds(tile.column * tiles.tile_n, tiles.tile_n)],
            buffers["w"].at[slot],
            buffers["full"].at[slot],
            collective_axes=(RANK,) if gemm.cluster > 1 else None,
        )

    def load_tile(number: jax.Array, index: jax.Array, tile: Tile, height: int, nothing: None) -> None:
        first = gemm.tile_and_split(index)[1] * gemm.steps
        pl.loop(0, gemm.steps)(functools.partial(step_of_tile, number, first, tile, height))

    number_of_tiles = _each_tile(gemm, order, load_tile, None)
    # A block must not exit while another block of its cluster may still write into it or arrive at its barriers.
    total = number_of_tiles * gemm.steps
    for back in range(tiles.steps, 0, -1):
        pl.when(total >= back)(
            lambda back=back: plgpu.barrier_wait(buffers["free"].at[lax.rem(total - back, jnp.int32(tiles.steps))])
        )


def multiply_tiles(
    gemm: Gemm,
    buffers: Any,
    order: Order,
    behind: Callable[[Held, int], None],
    finish: Callable[[Held], None],
    complete: Callable[[jax.Array, jax.Array], jax.Array] = lambda number, sums: sums,
) -> None:
    """Multiplies the tiles that `load_tiles` loads, in the same order. Runs in both compute warpgroups.

    Args:
      gemm, buffers, order: see `load_tiles`.
      behind: a function (held, turn) that is called for each part of a tile, at the `gemm.turn_steps` of the next tile.
        While it waits, nothing is multiplied.
      finish: a function (held) that is called for the last part, instead of `behind`, because no tile follows.
      complete: a function from the number of a tile and the float32 sums of a part to new sums. It is applied before
        sums are rounded.
    """
    group = lax.axis_index(GROUP)

    def multiply(number: jax.Array, index: jax.Array, tile: Tile, height: int, held: Held) -> Held:
        """Multiplies a tile and processes the previous tile's part, `held`, meanwhile."""
        rows, columns = gemm.part if height == gemm.tiles.tile_m else gemm.half_part
        row, column = (group * rows, 0) if rows < height else (0, group * columns)

        def at_step(step: jax.Array) -> None:
            for turn, its_step in enumerate(gemm.turn_steps):
                pl.when((number > 0) & (step == its_step))(functools.partial(behind, held, turn))

        sums = complete(index, product(gemm, buffers, number, (row, column), (rows, columns), at_step))
        first = tile.row * gemm.tiles.tile_m + tile.first + row, tile.column * gemm.tiles.tile_n + column
        return Held(sums.astype(gemm.dtype), Place(index, *first))

    nothing = plgpu.layout_cast(jnp.zeros(gemm.part, gemm.dtype), plgpu.Layout.WGMMA)
    _each_tile(gemm, order, multiply, Held(nothing, Place(*[jnp.int32(0)] * 3)), finish)
    plgpu.wait_smem_to_gmem(0)


def product(
    gemm: Gemm,
    buffers: Any,
    number: jax.Array,
    first: tuple[jax.Array | int, jax.Array | int],
    part: tuple[int, int],
    at_step: Callable[[jax.Array], None] = lambda step: None,
) -> jax.Array:
    """A warpgroup's part of the `number`-th loaded tile, in float32 registers.

    Args:
      gemm, buffers: see `load_tiles`.
      number: running number of the tile in this cluster.
      first: the first row and column of the part, within the tile of a block.
      part: numbers of rows and columns of the part.
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
            plgpu.wgmma_wait(1)  # the previous wgmma is done with its slot; this one still runs
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(count - 1, slots)]))
            at_step(step)

        result = sums[...]
        plgpu.barrier_arrive(free.at[lax.rem((number + 1) * gemm.steps - 1, slots)])
        return result

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(part, jnp.float32))


def _each_tile[C](
    gemm: Gemm,
    order: Order,
    visit: Callable[[jax.Array, jax.Array, Tile, int, C], C],
    carry: C,
    finish: Callable[[C], None] | None = None,
) -> jax.Array:
    """Visits all tiles of this cluster: first the whole tiles, then a half tile if there is one.

    `visit` gets (running number, number for `order`, tile of this block, rows, carry) and returns the next carry.
    `finish` gets the last carry. Returns the number of visited tiles.
    """
    cluster, rank, height = lax.axis_index(CLUSTERS), lax.axis_index(RANK), gemm.tiles.tile_m
    whole = lax.div(gemm.whole_tiles - cluster + (gemm.clusters - 1), jnp.int32(gemm.clusters))
    halves = 2 * (gemm.cluster_tiles - gemm.whole_tiles)

    def visit_whole(number: jax.Array, carry: C) -> C:
        index = cluster + number * gemm.clusters
        row, column, _ = order(index)
        return visit(number, index, Tile(row * gemm.cluster + rank, column), height, carry)

    carry = lax.fori_loop(0, whole, visit_whole, carry)
    if finish is not None:
        pl.when((whole > 0) & (cluster >= halves))(lambda: finish(carry))
    if not halves:
        return whole

    @pl.when(cluster < halves)
    def _() -> None:
        index = gemm.whole_tiles + lax.div(cluster, jnp.int32(2))
        row, column, _ = order(index)
        first = lax.rem(cluster, jnp.int32(2)) * (height // 2)
        last = visit(whole, index, Tile(row * gemm.cluster + rank, column, first), height // 2, carry)
        if finish is not None:
            finish(last)

    return whole + jnp.where(cluster < halves, 1, 0)


def fence_proxies() -> None:
    """Orders an acquire (generic proxy) before later TMA loads of this thread (asynchronous proxy)."""

    @plgpu.inline_mgpu()
    def fence(*_: Any) -> None:
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    fence()
