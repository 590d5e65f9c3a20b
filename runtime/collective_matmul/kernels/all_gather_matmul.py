"""All-gather and GEMM in one Mosaic-GPU kernel for Hopper: a device pushes its rows to all others while it multiplies.

    out = all_gather(x) @ w       x [m, k] this device's rows, w [k, n], out [devices * m, n] in global row order

    device 0                                             device 1
      own tiles       x0 @ w       |  push x0 --------->   gathered[0]     (TMA: x -> shared memory -> peer)
      others' tiles   gathered[1] @ w   <---------- push x1  |
                      as soon as the counter of these rows is full

One persistent grid (`hopper_gemm`) walks all tiles of the result: own rows first, then the others' in the order in
which they arrive, without a break between devices. Warp 0 of a block's memory warpgroup loads tiles and, before rows of
another device, waits for their counter; warp 1 of the first `Push.copiers` blocks sends this device's rows, piece by
piece and straight to all peers: there is no ring, and no device waits for a step of another one.

Counters: `arrived[source, tile of rows, chunk of k]` on the receiver. A sender adds 1 per piece after its write has
completed (`wait_smem_to_gmem`, then a release at system scope); the receiver acquires at system scope and fences the
proxies before its TMA reads what a peer wrote. XLA zeroes the counters before each call and then lets all devices meet,
so no write comes early; each device waits for all rows that it gets, so none comes late.

Legality: one axis of the mesh, NVLink or other peer access between its devices, no NVSHMEM. The kernel takes its SMs
until all peers have sent: no collective of NCCL may be in flight beside it on any of these devices, or each may wait
for SMs that the other holds. Bitwise deterministic: every element is summed by one block in the order of k.

Cost: max(GEMM over all rows, (devices - 1) * bytes of x over the link) and about ten microseconds; DistFuse (section 3)
calls it immediate communication, here before the GEMM instead of after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import hopper_gemm
from dhelix.runtime.collective_matmul.kernels.hopper_gemm import CLUSTERS, GROUP, MEMORY_GROUP, RANK, Gemm, Tile

DEFAULT_TILES = Tiles(128, 256, 64, 4, "M", 8)
_LOAD_WARP, _PUSH_WARP = 0, 1


@dataclass(frozen=True)
class Push:
    """How a device sends its rows.

    Attributes:
      copiers: blocks that send; None is all of them.
      rows, columns: of a piece, what one TMA copy moves.
      stages: pieces in flight for each block.
      chunks: counters for each tile of rows, along k: a tile of the result can begin when the first one is full.
      window: tiles of rows that are sent together, chunk by chunk.
    """

    copiers: int | None = None
    rows: int = 16
    columns: int = 256
    stages: int = 2
    chunks: int = 1
    window: int = 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return 2 * self.stages * self.rows * self.columns


@dataclass(frozen=True)
class _Plan:
    """An all-gather matmul on one device: the GEMM over all rows, and how rows come."""

    gemm: Gemm
    push: Push
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
        return self.gemm.steps // self.push.chunks

    @property
    def chunk_pieces(self) -> int:
        """Pieces that one counter counts."""
        push = self.push
        return self.gemm.tiles.tile_m * (self.gemm.k // push.chunks) // (push.rows * push.columns)

    @property
    def pieces(self) -> int:
        return self.row_tiles * self.push.chunks * self.chunk_pieces

    @property
    def copiers(self) -> int:
        blocks = self.gemm.clusters * self.gemm.cluster
        return min(self.push.copiers or blocks, blocks)

    def refusal(self) -> str | None:
        gemm, push = self.gemm, self.push
        if self.devices < 2:
            return "an axis of one device has nothing to gather"
        if gemm.m % self.devices or self.rows % gemm.cluster_rows:
            return f"{self.rows} rows on each device are no multiple of {gemm.cluster_rows}"
        if gemm.steps % push.chunks or (gemm.k // push.chunks) % push.columns or gemm.tiles.tile_m % push.rows:
            return f"pieces of {push.rows} x {push.columns} do not fill {push.chunks} chunks of k = {gemm.k}"
        return gemm.refusal(push.shared_bytes)

    def order(self, me: jax.Array) -> hopper_gemm.Order:
        """Own tiles first, then those of the others: row tile by row tile, one of each device in turn."""
        own_rows = self.rows // self.gemm.cluster_rows
        columns, band, peers = self.gemm.column_tiles, self.gemm.tiles.group, self.devices - 1
        own_place = hopper_gemm.banded(own_rows, columns, band)
        other_place = hopper_gemm.banded(own_rows * peers, columns, band)

        def order(number: jax.Array) -> Tile:
            own_row, own_column = own_place(number)
            other, other_column = other_place(number - own_rows * columns)
            own = number < own_rows * columns
            step = jnp.where(own, 0, lax.rem(other, jnp.int32(peers)) + 1)
            row = jnp.where(own, own_row, lax.div(other, jnp.int32(peers)))
            source = lax.rem(me + step, jnp.int32(self.devices))
            return Tile(source * own_rows + row, jnp.where(own, own_column, other_column))

        return order

    def piece(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(row tile, chunk, first row, first column) of a piece.

        Window by window, in it chunk by chunk, in that row tile by row tile, in that along k first.
        """
        push, tile_m = self.push, self.gemm.tiles.tile_m
        window = math.gcd(push.window, self.row_tiles)
        unit, inside = lax.div(number, jnp.int32(self.chunk_pieces)), lax.rem(number, jnp.int32(self.chunk_pieces))
        first, rest = lax.div(unit, jnp.int32(window * push.chunks)), lax.rem(unit, jnp.int32(window * push.chunks))
        row_tile = first * window + lax.rem(rest, jnp.int32(window))
        chunk = lax.div(rest, jnp.int32(window))
        across = jnp.int32(self.gemm.k // push.chunks // push.columns)
        row = row_tile * tile_m + lax.div(inside, across) * push.rows
        column = chunk * (self.gemm.k // push.chunks) + lax.rem(inside, across) * push.columns
        return row_tile, chunk, row, column


def supported(site: Site, tiles: Tiles | None = None, push: Push | None = None) -> str | None:
    """Why this kernel cannot serve a site of kind "all_gather_matmul", None if it can."""
    if site.kind != "all_gather_matmul":
        return f"{site.kind} is no all_gather_matmul"
    return _plan(
        site.rows, site.columns, site.contraction, site.dtype, site.axis_size, tiles or DEFAULT_TILES, push or Push()
    ).refusal()


def all_gather_matmul_kernel(
    x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None, push: Push | None = None
) -> tuple[jax.Array, jax.Array]:
    """all_gather(x) @ w, inside `shard_map`.

    Args:
      x: [m, k], this device's rows.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh, the rows' order.
      tiles: of the GEMM; None is DEFAULT_TILES.
      push: how rows are sent; None is a default for all sizes.

    Returns:
      ([devices * m, n] in x's dtype, accumulated in float32; [devices * m, k], the gathered x).

    Raises:
      DhelixError: sizes, dtype or tiles that `supported` refuses.
    """
    devices = lax.axis_size(axis_name)
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"all_gather_matmul: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = _plan(devices * m, n, k, x.dtype.name, devices, tiles or DEFAULT_TILES, push or Push())
    if refusal := plan.refusal():
        raise DhelixError(f"all_gather_matmul has no Mosaic kernel here: {refusal}: take another form or other tiles")

    return _run(plan, axis_name, x, w)


def _run(plan: _Plan, axis: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    def all_gather_matmul(*refs: Any, **scratch: Any) -> None:  # the kernel's name in profiles
        _kernel(plan, axis, *refs, **scratch)

    m, n, k = plan.gemm.m, plan.gemm.n, plan.gemm.k
    out, gathered = plgpu.kernel(
        all_gather_matmul,
        out_type=(jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct((m, k), x.dtype)),
        scratch_types=dict(
            buffers=plan.gemm.buffers(),
            staged=plgpu.SMEM((plan.push.stages, plan.push.rows, plan.push.columns), x.dtype),
            loaded=plgpu.Barrier(num_barriers=plan.push.stages),
        ),
        **plan.gemm.launch(),
    )(x, w)
    return out, gathered


def _plan(m: int, n: int, k: int, dtype: str, devices: int, tiles: Tiles, push: Push) -> _Plan:
    """Pieces of the result are as wide as shared memory allows beside the ring and the staged pieces."""
    for store_columns in (64, 32):
        plan = _Plan(Gemm(m, n, k, dtype, tiles, store_columns=store_columns), push, devices)
        if plan.refusal() is None:
            break
    return plan


def _kernel(
    plan: _Plan, axis: str, x: Any, w: Any, out: Any, gathered: Any, buffers: Any, staged: Any, loaded: Any
) -> None:
    gemm, group = plan.gemm, lax.axis_index(GROUP)
    tile_m, tile_k = gemm.tiles.tile_m, gemm.tiles.tile_k
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.devices, plan.row_tiles, plan.push.chunks)))

    def load() -> None:
        me = lax.axis_index(axis)

        def source_and_row(tile: Tile) -> tuple[jax.Array, jax.Array]:
            return lax.div(tile.row, jnp.int32(plan.row_tiles)), lax.rem(tile.row, jnp.int32(plan.row_tiles))

        def wait(tile: Tile, step: jax.Array) -> None:
            source, row = source_and_row(tile)

            @pl.when((source != me) & (lax.rem(step, jnp.int32(plan.chunk_steps)) == 0))
            def _() -> None:
                counter = arrived.at[source, row, lax.div(step, jnp.int32(plan.chunk_steps))]
                plgpu.semaphore_wait(counter, plan.chunk_pieces, decrement=False)
                _fence_proxies()

        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            source, row = source_and_row(tile)

            def copy_from(rows: Any, tile_row: jax.Array) -> None:
                part = rows.at[pl.ds(tile_row * tile_m, tile_m), pl.ds(step * tile_k, tile_k)]
                plgpu.copy_gmem_to_smem(part, destination, barrier)

            pl.when(source == me)(lambda: copy_from(x, row))
            pl.when(source != me)(lambda: copy_from(gathered, tile.row))

        hopper_gemm.load_tiles(gemm, buffers, plan.order(me), load_rows, w, wait)

    def store(piece: Any, row: jax.Array, column: jax.Array) -> None:
        plgpu.copy_smem_to_gmem(piece, out.at[pl.ds(row, piece.shape[0]), pl.ds(column, piece.shape[1])])

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(hopper_gemm.MEMORY_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == _LOAD_WARP)(load)
            pl.when(warp == _PUSH_WARP)(lambda: _push(plan, axis, x, gathered, arrived, staged, loaded))

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(hopper_gemm.COMPUTE_REGISTERS, action="increase")
        hopper_gemm.multiply_tiles(gemm, buffers, plan.order(lax.axis_index(axis)), store)


def _push(plan: _Plan, axis: str, x: Any, gathered: Any, arrived: Any, staged: Any, loaded: Any) -> None:
    """Sends this block's share of the pieces, to all peers and into this device's own `gathered`.

    The load of the next piece runs while this one is sent, and while earlier ones are on their way.
    """
    push = plan.push
    me = lax.axis_index(axis)
    peers: list[Any] = [{axis: lax.rem(me + step, jnp.int32(plan.devices))} for step in range(1, plan.devices)]
    block = lax.axis_index(CLUSTERS) * plan.gemm.cluster + lax.axis_index(RANK)
    mine = lax.div(plan.pieces - block + (plan.copiers - 1), jnp.int32(plan.copiers))
    mine = jnp.where(block < plan.copiers, mine, 0)
    in_flight = push.stages - 1

    def load(number: jax.Array) -> None:
        _, _, row, column = plan.piece(block + number * plan.copiers)
        slot = lax.rem(number, jnp.int32(push.stages))
        plgpu.copy_gmem_to_smem(
            x.at[pl.ds(row, push.rows), pl.ds(column, push.columns)], staged.at[slot], loaded.at[slot]
        )

    def send(number: jax.Array) -> None:
        _, _, row, column = plan.piece(block + number * plan.copiers)
        slot = lax.rem(number, jnp.int32(push.stages))
        place = pl.ds(me * plan.rows + row, push.rows), pl.ds(column, push.columns)
        plgpu.barrier_wait(loaded.at[slot])
        for peer in peers:
            there = plgpu.remote_ref(gathered, peer)
            plgpu.copy_smem_to_gmem(staged.at[slot], there.at[place], commit_group=False)
        plgpu.copy_smem_to_gmem(staged.at[slot], gathered.at[place])

    def tell(number: jax.Array) -> None:
        row_tile, chunk, _, _ = plan.piece(block + number * plan.copiers)
        for peer in peers:
            plgpu.semaphore_signal(arrived.at[me, row_tile, chunk], device_id=peer)

    pl.when(mine > 0)(lambda: load(jnp.int32(0)))

    @pl.loop(0, mine)
    def _(number: jax.Array) -> None:
        @pl.when(number + 1 < mine)
        def _() -> None:
            plgpu.wait_smem_to_gmem(push.stages - 2, wait_read_only=True)  # the next slot has been read
            load(number + 1)

        send(number)

        @pl.when(number >= in_flight)
        def _() -> None:
            plgpu.wait_smem_to_gmem(in_flight)
            tell(number - in_flight)

    plgpu.wait_smem_to_gmem(0)
    for back in range(in_flight, 0, -1):
        pl.when(mine >= back)(lambda back=back: tell(mine - back))


def _fence_proxies() -> None:
    """Orders an acquire (generic proxy) before the TMA loads of this thread that follow (asynchronous proxy)."""

    @plgpu.inline_mgpu()
    def fence(*_: Any) -> None:
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    fence()
