"""All-gather and GEMM in one Mosaic-GPU kernel for Hopper: it pulls the peers' rows while it multiplies its own rows.

    out = all_gather(x) @ w       x [m, k] this device's rows, w [k, n], out [devices * m, n] in global row order

    device 0                                                device 1
      warpgroups 0, 1    own tiles  x0 @ w        |           ...
      warp 1             gathered[1]  <----------------------- x1           (TMA: peer -> shared memory -> gathered)
      warpgroups 0, 1    others' tiles  gathered[1] @ w, as soon as the counter of these rows is full

One persistent grid (`hopper_gemm`) walks all tiles of the result: first tiles of own rows, then tiles of other devices'
rows in the order of arrival. There is no pause between the rows of two devices. Warp 0 of a block's memory warpgroup
loads tiles. Before it loads rows of another device, it waits for the counter of these rows. Warp 1 pulls rows directly
from their owner, piece by piece (a piece is what one TMA copy moves). There is no ring, so no device waits for a step
of another device.

The counter `arrived[source, tile of rows, chunk of k]` counts batches of pieces in this device's `gathered`. The writer
of a batch adds 1 after its writes have completed (`wait_smem_to_gmem`, then a release). The reader acquires, and fences
the memory proxies before its TMA load. Writer and reader are blocks of the same device, so only the rows themselves
cross the link.

Between devices:
    start    A peer's `x` is valid only while the peer's kernel runs. Before that, another operation may use the memory.
             XLA zeroes the counters, and then launches the kernel. While each device multiplies its own tiles, it waits
             until all peers have begun (`device_barrier.Meeting`).
    end      A device may reuse the memory of its `x` once its kernel ends. So each block that has read its share adds 1
             to the counter `left` of every peer, and block 0 waits for all blocks of all peers. So `x` outlives all
             its readers. Updates of these counters are the only writes to a peer's memory. All updates arrive before
             the peer's kernel ends.

Legality: the kernel works along one mesh axis. Its devices need NVLink or other peer access, but not NVSHMEM. The
kernel holds its SMs until all peers have read its rows. So no NCCL collective may be in flight on these devices: kernel
and collective could each wait for SMs that the other holds. Results are bitwise deterministic, because one block sums
each element, in the order of k.

Cost: max(GEMM over all rows, (devices - 1) * bytes of x over the link), plus zeroing the counters. This is faster than
NCCL's gather followed by cuBLAS's GEMM (docs/research_log.md). A kernel that pushed its rows to its peers was slower.
Each update of a counter on a peer was a release at system scope, which stalls the copying warp.
DistFuse (section 3) uses the name "immediate communication" for communication inside the GEMM's kernel. Here, it comes
before the GEMM of a tile, not after it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import device_barrier, gemm_tiles, hopper_gemm
from dhelix.runtime.collective_matmul.kernels.device_barrier import Meeting
from dhelix.runtime.collective_matmul.kernels.gathered_rows import GatheredGemm, Transfer, divided
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import CLUSTERS, GROUP, MEMORY_GROUP, RANK, Gemm, Place, Tile
from dhelix.runtime.collective_matmul.kernels.held_parts import Storing

_LOAD_WARP, _COPY_WARP = 0, 1


def supported(site: Site, tiles: Tiles | None = None) -> str | None:
    """Returns why this kernel cannot serve a site of kind "all_gather_matmul"; None if it can."""
    if site.kind != "all_gather_matmul":
        return f"{site.kind} is not all_gather_matmul"
    return _plan(site, tiles).refusal()


_LARGE, _SMALL = Tiles(128, 256, 64, 4, "M", 8), Tiles(128, 192, 64, 4, "M", 8)
_SMALL_TIME = 0.77  # measured time of a small tile relative to a large tile; a small tile has 0.75 of the work


def default_tiles(site: Site) -> Tiles:
    """Returns the tiles that take the least time (`Gemm.rounds` times the time of a tile), with a number of chunks.

    The rows of a tile arrive in `chunks` parts along k, and its GEMM begins when the first has arrived. A round is
    one tile on each cluster. If a device has more rounds of own tiles, other devices' rows have more time to arrive.
    Then fewer chunks, and so fewer counters, are enough. The thresholds in `_with_chunks` were chosen by measurement.
    """
    costs = [(tiles, cost, _gemm(site, tiles)) for tiles, cost in ((_LARGE, 1.0), (_SMALL, _SMALL_TIME))]
    times = {tiles: gemm.rounds * cost for tiles, cost, gemm in costs if gemm.refusal() is None}
    return _with_chunks(site, min(times, key=times.__getitem__, default=_LARGE))


def _with_chunks(site: Site, tiles: Tiles) -> Tiles:
    """`tiles` with a number of chunks. If `tiles` has none, the number suits the site, as `default_tiles` explains."""
    if tiles.chunks is not None:
        return tiles
    gemm = _gemm(site, tiles)
    own_rounds = gemm.cluster_tiles / site.axis_size / gemm.clusters
    most = 1 if own_rounds >= 2 else 4 if own_rounds >= 1 else 8
    return replace(tiles, chunks=math.gcd(most, site.contraction // Transfer.columns))


def all_gather_matmul_kernel(
    x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes all_gather(x) @ w, inside `shard_map`.

    Args:
      x: [m, k], this device's rows.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh. The result has the devices' rows in the order of this axis.
      tiles: tiles of the GEMM; None: `default_tiles`.

    Returns:
      The product, [devices * m, n] in x's dtype, accumulated in float32; and the gathered x, [devices * m, k].

    Raises:
      DhelixError: `supported` refuses the sizes, dtype or tiles.
    """
    devices = lax.axis_size(axis_name)
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"all_gather_matmul: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = _plan(Site("all_gather_matmul", devices * m, k, n, x.dtype.name, devices), tiles)
    if refusal := plan.refusal():
        raise DhelixError(f"all_gather_matmul has no Mosaic kernel here: {refusal}: use another form or other tiles")

    return _run(plan, axis_name, x, w)


def _run(plan: GatheredGemm, axis: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    def all_gather_matmul(*refs: Any, **scratch: Any) -> None:  # the kernel's name in profiles
        _kernel(plan, axis, *refs, **scratch)

    m, n, k = plan.gemm.m, plan.gemm.n, plan.gemm.k
    transfer = plan.transfer
    out, gathered, _ = plgpu.kernel(
        all_gather_matmul,
        out_type=(
            jax.ShapeDtypeStruct((m, n), x.dtype),
            jax.ShapeDtypeStruct((m, k), x.dtype),
            device_barrier.words(plan.devices),
        ),
        scratch_types=dict(
            buffers=plan.gemm.buffers(),
            staged=plgpu.SMEM((transfer.stages, transfer.rows, transfer.columns), x.dtype),
            loaded=plgpu.Barrier(num_barriers=transfer.stages),
        ),
        **plan.gemm.launch(),
        compiler_params=device_barrier.PARAMS,
    )(x, w)
    return out, gathered


def _gemm(site: Site, tiles: Tiles, store_columns: int = 32) -> Gemm:
    return Gemm(site.rows, site.columns, site.contraction, site.dtype, tiles, store_columns=store_columns)


def _plan(site: Site, tiles: Tiles | None) -> GatheredGemm:
    """The plan for `site`. Pieces of the result are as wide as possible while all buffers fit into shared memory."""
    tiles = default_tiles(site) if tiles is None else _with_chunks(site, tiles)
    transfer = Transfer(tiles.chunks or 1)
    for store_columns in (64, 32):
        plan = GatheredGemm(_gemm(site, tiles, store_columns), transfer, site.axis_size)
        if plan.refusal() is None:
            break
    return plan


def _kernel(
    plan: GatheredGemm,
    axis: str,
    x: Any,
    w: Any,
    out: Any,
    gathered: Any,
    words: Any,
    buffers: Any,
    staged: Any,
    loaded: Any,
) -> None:
    gemm, group = plan.gemm, lax.axis_index(GROUP)
    tile_m, tile_k = gemm.tiles.tile_m, gemm.tiles.tile_k
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.devices, plan.row_tiles, plan.transfer.chunks)))
    left = pl.get_global(plgpu.SemaphoreType.REGULAR)
    all_devices = Meeting(axis, words, pl.get_global(plgpu.SemaphoreType.REGULAR))
    block = lax.axis_index(CLUSTERS) * gemm.cluster + lax.axis_index(RANK)

    def copy() -> None:
        all_devices.wait()
        hopper_gemm.fence_proxies()
        _copy(plan, axis, block, x, gathered, arrived, left, staged, loaded)

    def load() -> None:
        me = lax.axis_index(axis)

        def wait(tile: Tile, step: jax.Array) -> None:
            source, row = divided(tile.row, plan.row_tiles)
            chunk, inside = divided(step, plan.chunk_steps)
            pl.when((source != me) & (inside == 0))(lambda: _wait(plan, arrived.at[source, row, chunk]))

        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            source, row = divided(tile.row, plan.row_tiles)

            def copy_from(rows: Any, tile_row: jax.Array) -> None:
                part = rows.at[
                    pl.ds(tile_row * tile_m + tile.first, destination.shape[0]), pl.ds(step * tile_k, tile_k)
                ]
                plgpu.copy_gmem_to_smem(part, destination, barrier)

            pl.when(source == me)(lambda: copy_from(x, row))
            pl.when(source != me)(lambda: copy_from(gathered, tile.row))

        hopper_gemm.load_tiles(gemm, buffers, plan.order(me), load_rows, w, wait)

    def store(place: Place, slot: Any, _: int) -> None:
        rows, columns = slot.shape
        plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(place.row, rows), pl.ds(place.column, columns)])

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.MEMORY_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == _LOAD_WARP)(load)
            pl.when(warp == _COPY_WARP)(copy)
            pl.when((warp == device_barrier.WARP) & (block == 0))(all_devices.meet)

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.COMPUTE_REGISTERS, action="increase")
        storing = Storing(gemm, buffers["out"].at[group], store)
        hopper_gemm.multiply_tiles(gemm, buffers, plan.order(lax.axis_index(axis)), storing.behind, storing.finish)


def _wait(plan: GatheredGemm, counter: Any) -> None:
    """Waits until the rows that `counter` counts are in `gathered`. TMA loads of this thread may then read them."""
    plgpu.semaphore_wait(counter, plan.chunk_batches, decrement=False, memory_scope="gpu")
    hopper_gemm.fence_proxies()


def _copy(
    plan: GatheredGemm,
    axis: str,
    block: jax.Array,
    x: Any,
    gathered: Any,
    arrived: Any,
    left: Any,
    staged: Any,
    loaded: Any,
) -> None:
    """Copies this block's share of the pieces into this device's `gathered`: first the peers' rows, then own rows."""
    transfer = plan.transfer
    me = lax.axis_index(axis)
    peers: list[Any] = [{axis: lax.rem(me + step, jnp.int32(plan.devices))} for step in range(1, plan.devices)]
    mine = lax.div(plan.batches - block + (plan.blocks - 1), jnp.int32(plan.blocks)) * transfer.batch
    ahead = transfer.stages - 1

    def place(number: jax.Array) -> tuple[jax.Array, ...]:
        batch, inside = divided(number, transfer.batch)
        return plan.piece((block + batch * plan.blocks) * transfer.batch + inside)

    def owner(source: jax.Array) -> jax.Array:
        return lax.rem(me + 1 + source, jnp.int32(plan.devices))

    def load(number: jax.Array) -> None:
        source, _, _, row, column = place(number)
        slot = lax.rem(number, jnp.int32(transfer.stages))

        def from_(rows: Any) -> None:
            part = rows.at[pl.ds(row, transfer.rows), pl.ds(column, transfer.columns)]
            plgpu.copy_gmem_to_smem(part, staged.at[slot], loaded.at[slot])

        for i, peer in enumerate(peers):
            pl.when(source == i)(lambda peer=peer: from_(plgpu.remote_ref(x, peer)))
        pl.when(source == plan.devices - 1)(lambda: from_(x))

    def store(number: jax.Array) -> None:
        source, _, _, row, column = place(number)
        slot = lax.rem(number, jnp.int32(transfer.stages))
        part = pl.ds(owner(source) * plan.rows + row, transfer.rows), pl.ds(column, transfer.columns)
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.copy_smem_to_gmem(staged.at[slot], gathered.at[part])

    def tell(number: jax.Array) -> None:
        source, row_tile, chunk, _, _ = place(number)
        plgpu.semaphore_signal(arrived.at[owner(source), row_tile, chunk], memory_scope="gpu")

    for number in range(ahead):
        pl.when(mine > number)(lambda number=number: load(jnp.int32(number)))

    @pl.loop(0, mine)
    def _(number: jax.Array) -> None:
        store(number)

        @pl.when(number + ahead < mine)
        def _() -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # until the store has read the slot of the next load
            load(number + ahead)

        @pl.when((number >= 1) & (lax.rem(number - 1, jnp.int32(transfer.batch)) == transfer.batch - 1))
        def _() -> None:
            plgpu.wait_smem_to_gmem(1)
            tell(number - 1)

    plgpu.wait_smem_to_gmem(0)
    pl.when(mine > 0)(lambda: tell(mine - 1))
    for peer in peers:
        plgpu.semaphore_signal(left, device_id=peer)
    pl.when(block == 0)(lambda: plgpu.semaphore_wait(left, plan.blocks * len(peers), decrement=False))
