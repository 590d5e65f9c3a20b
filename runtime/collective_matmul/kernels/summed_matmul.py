"""GEMM whose results are summed over devices, in one Mosaic-GPU kernel for Hopper: tiles leave when they are computed.

    matmul_reduce_scatter   out = this device's rows of  sum over devices of  x @ w
    matmul_all_reduce       out = all of it

Every tile of the product has an owner. `shots = 2` (DistFuse's immediate communication, section 3):

    device 0                                            device 1
      tiles of 1:  acc -> staged on 1  ------------->      tiles of 1, later:  acc + staged -> out
      tiles of 0, later:  acc + staged -> out  <-------    tiles of 0:  acc -> staged on 0
                                       |
                                       +-- all-reduce: the same TMA store goes to the other devices' out, too

A device computes tiles of the others first and its own ones behind (`Plan.job`): when one of its own is multiplied, the
others' partial sums of it lie in `staged` and are added to the float32 accumulators, so nothing is summed twice, no
partial sum of an owner goes through memory and communication is hidden behind the other tiles. `shots = 1`, for results
that are one wave of tiles and latency: every device sends its partial sums to all, and each adds all of them up.

All writes to other devices are TMA stores out of shared memory. Partial sums leave piece by piece while the next tile
is multiplied (`hopper_gemm`); own tiles are summed and stored at once, from float32, and so is all of one shot.
Counters `arrived[tile, warpgroup]` lie on the receiver: the sender adds 1 after its stores have completed
(`wait_smem_to_gmem`, then a release at system scope), some steps behind the last piece.

Legality: one axis of the mesh, NVLink or other peer access between its devices, no NVSHMEM. No collective of NCCL may
be in flight beside it on any of these devices, or each may wait for SMs that the other holds. No deadlock among its own
blocks: a tile waits only for tiles that all devices compute earlier in the same order, and before a block waits it has
told everybody of what it sent. Bitwise deterministic: an owner adds the others' rounded parts to its float32 sums in
the order of their distance; of an all-reduce all devices get the same bits.

Cost: max(GEMM, bytes over the link) + what the last wave sends; (n - 1) / n of the result per device over the link for
a reduce-scatter, twice that for an all-reduce (n - 1 times the result with one shot), and as much staging memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.profiles.collective_matmul import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import gemm_tiles, hopper_gemm
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import (
    CLUSTERS,
    GROUP,
    MEMORY_GROUP,
    RANK,
    Gemm,
    Place,
    Store,
    Tile,
)

_LOADS_AHEAD = 3  # pieces of staged parts, 16 registers each


class Job(NamedTuple):
    """A tile of a cluster and whose it is.

    Attributes:
      turn: the owner is the device `turn + 1` places further on; devices - 1 is this one.
      tile: its number among those of its owner.
      row, column: where it lies in the whole product, in tiles of a cluster.
    """

    turn: jax.Array
    tile: jax.Array
    row: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class Plan:
    """A GEMM with its sum over devices.

    Attributes:
      gemm: the local product.
      devices: on the axis.
      scatter: each device keeps its rows only.
      shots: 2, by way of owners; 1, everybody to everybody (all-reduce alone).
      lead: tiles of each other device that come before the first own one, and own ones after the last other one; 1 or
        more, else owners wait for each other. None is as many as all clusters compute at once, so that parts have
        arrived when they are wanted.
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
        """Owners' blocks lie one above the other, else side by side."""
        return self.scatter or self.gemm.m % (self.owners * self.gemm.cluster_rows) == 0

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one owner's block, in tiles of a cluster."""
        rows, columns = self.gemm.m // self.gemm.cluster_rows, self.gemm.column_tiles
        return (rows // self.owners, columns) if self.by_rows else (rows, columns // self.owners)

    @property
    def tiles(self) -> int:
        """Tiles of a cluster that one device owns."""
        return self.block[0] * self.block[1]

    @property
    def own_behind(self) -> int:
        """`lead`, where there are so many."""
        return min(self.tiles, self.gemm.clusters if self.lead is None else self.lead)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First row and column of the pieces that a warpgroup's part of a tile is sent in."""
        return self.gemm.pieces(self.gemm.part)

    @property
    def staged_shape(self) -> tuple[int, ...]:
        """[source, block's tile, warpgroup, piece, row, column]: what others send, every piece contiguous."""
        sources = self.devices if self.shots == 1 else self.devices - 1
        tiles = self.tiles * self.gemm.cluster
        return sources, tiles, 2, len(self.pieces), gemm_tiles.PIECE_ROWS, self.gemm.store_columns

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.gemm.m // self.devices if self.scatter else self.gemm.m, self.gemm.n

    def refusal(self) -> str | None:
        """Why this plan cannot be had, None if it can."""
        gemm, n = self.gemm, self.devices
        if n < 2:
            return "an axis of one device has nothing to sum"
        if self.lead is not None and self.lead < 1:
            return f"a lead of {self.lead} puts own tiles before those of others that they wait for"
        if self.scatter and gemm.m % (n * gemm.cluster_rows):
            return f"{gemm.m} rows over {n} devices are no multiple of {gemm.cluster_rows} each"
        if not self.by_rows and (gemm.m % gemm.cluster_rows or gemm.n % (n * gemm.tiles.tile_n)):
            return f"{gemm.m} x {gemm.n} do not divide over {n} devices into {gemm.cluster_rows} x {gemm.tiles.tile_n}"
        return gemm.refusal()

    def order(self, me: jax.Array) -> gemm_tiles.Order:
        """Of tiles, for `hopper_gemm`."""

        def order(number: jax.Array) -> Tile:
            job = self.job(me, number)
            return Tile(job.row, job.column)

        return order

    def job(self, me: jax.Array, number: jax.Array) -> Job:
        """What comes when, the same on all devices but for `me`.

        First `own_behind` tiles of each other device, device by device in turn; then one own tile for each tile of
        every other device; at last as many own tiles as are left. Which of these is the own one moves on with every
        wave, so that no block gets but own ones.

            3 devices, 4 tiles each, own_behind = 2      1.0 2.0 1.1 2.1 | 0.0 1.2 2.2 | 0.1 1.3 2.3 | 0.2 0.3
        """
        i32 = jnp.int32
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


def gemm_for(site: Site, tiles: Tiles) -> Gemm:
    """The local product of `site`.

    In single blocks unless the tiles say else: in a cluster an epilogue that waits for the link stalls all blocks. With
    slots for all that a warpgroup stores of a tile if shared memory has room for them beside the operands, else with
    two.
    """
    gemm = Gemm(site.rows, site.columns, site.contraction, site.dtype, tiles, tiles.cluster or 1, halves=False)
    rows, columns = gemm.part
    roomy = replace(gemm, store_slots=max(2, rows // gemm_tiles.PIECE_ROWS * (columns // gemm.store_columns)))
    return roomy if roomy.refusal() is None else gemm


def summed_matmul(plan: Plan, axis: str, x: jax.Array, w: jax.Array, name: str) -> jax.Array:
    """x @ w summed over the devices of `axis`, inside `shard_map`; `name` is the kernel's in profiles."""

    def kernel(*refs: Any, **scratch: Any) -> None:
        _kernel(plan, axis, *refs, **scratch)

    kernel.__name__ = name
    out, _ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(plan.out_shape, x.dtype),
            jax.ShapeDtypeStruct(plan.staged_shape, x.dtype),
        ),
        scratch_types=dict(buffers=plan.gemm.buffers()),
        **plan.gemm.launch(),
    )(x, w)
    return out


def _kernel(plan: Plan, axis: str, x: Any, w: Any, out: Any, staged: Any, buffers: Any) -> None:
    gemm, group = plan.gemm, lax.axis_index(GROUP)
    tile_m, tile_k = gemm.tiles.tile_m, gemm.tiles.tile_k
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR(plan.staged_shape[1:3]))
    finished = None if plan.scatter or plan.shots == 1 else pl.get_global(plgpu.SemaphoreType.REGULAR)

    def load() -> None:
        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            rows = x.at[pl.ds(tile.row * tile_m, tile_m), pl.ds(step * tile_k, tile_k)]
            plgpu.copy_gmem_to_smem(rows, destination, barrier)

        hopper_gemm.load_tiles(gemm, buffers, plan.order(lax.axis_index(axis)), load_rows, w)

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.MEMORY_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(load)

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.COMPUTE_REGISTERS, action="increase")
        me = lax.axis_index(axis)
        peers: list[Any] = [{axis: lax.rem(me + step, jnp.int32(plan.devices))} for step in range(1, plan.devices)]
        links = _Links(plan, axis, me, peers, out, staged, buffers["out"].at[group], arrived, finished)
        order = plan.order(me)
        hopper_gemm.multiply_tiles(gemm, buffers, order, links.send, links.tell, links.at_once, links.is_others)
        links.finish()


@dataclass(frozen=True)
class _Links:
    """Where results go; one for each warpgroup that multiplies.

    Attributes:
      me: this device.
      peers: the others by turn. TMA to a peer wants a number made of constants and this device's own alone; computed
        once, as each has descriptors of its own.
      out, staged: in global memory, of all devices.
      slots: [store_slots, 64, store_columns] in shared memory, of this warpgroup.
      arrived: counters beside `staged`.
      finished: counter of warpgroups of other devices that have stored all that they have for this one's `out`; None
        if they have nothing.
    """

    plan: Plan
    axis: str
    me: jax.Array
    peers: list[Any]
    out: Any
    staged: Any
    slots: Any
    arrived: Any
    finished: Any

    def job(self, place: Place) -> Job:
        return self.plan.job(self.me, place.number)

    def where(self, job: Job) -> tuple[jax.Array, jax.Array]:
        """Index of this warpgroup's part in `arrived`, and behind the source in `staged`."""
        return job.tile * self.plan.gemm.cluster + lax.axis_index(RANK), lax.axis_index(GROUP)

    def is_others(self, place: Place) -> jax.Array:
        """Whether a part is another device's; with one shot all are everybody's own."""
        return self.job(place).turn < self.plan.devices - 1

    def send(self, place: Place, slot: Any, number: int) -> None:
        """Sends a piece of another device's part to it."""
        job = self.job(place)
        for turn, peer in enumerate(self.peers):

            @pl.when(job.turn == turn)
            def _(turn: int = turn, peer: Any = peer) -> None:
                there = plgpu.remote_ref(self.staged, peer).at[(turn, *self.where(job), number)]
                plgpu.copy_smem_to_gmem(slot, there)

    def tell(self, place: Place) -> None:
        """Tells the owner of a part that all of it has been sent, when it is there."""

        @pl.when(self.is_others(place))
        def _() -> None:
            job = self.job(place)
            owner = lax.rem(self.me + 1 + job.turn, jnp.int32(self.plan.devices))
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self.arrived.at[self.where(job)], device_id={self.axis: owner})

    def at_once(self, place: Place, sums: jax.Array) -> None:
        """Adds what came in to an own part, in float32; others' can wait."""
        if self.plan.shots == 1:
            self._exchange(place, sums)
        else:
            pl.when(~self.is_others(place))(lambda: self._finish_own(place, sums))

    def finish(self) -> None:
        """Returns when all is stored elsewhere, too."""
        gemm, plan = self.plan.gemm, self.plan
        if self.finished is None:
            return
        for peer in self.peers:
            pl.semaphore_signal(self.finished, device_id=peer)
        first = (lax.axis_index(CLUSTERS) == 0) & (lax.axis_index(RANK) == 0) & (lax.axis_index(GROUP) == 0)
        everybody = (plan.devices - 1) * gemm.clusters * gemm.cluster * 2
        pl.when(first)(lambda: pl.semaphore_wait(self.finished, everybody, decrement=False))

    def _finish_own(self, place: Place, sums: jax.Array) -> None:
        job = self.job(place)
        pl.semaphore_wait(self.arrived.at[self.where(job)], self.plan.devices - 1, decrement=False)
        self._store_pieces(place, self._added(job, self._parts(sums)), self._store_out)

    def _exchange(self, place: Place, sums: jax.Array) -> None:
        """Own part to everybody, this device included, and everybody's added up in the order of the devices."""
        job = self.job(place)

        def store(_: Place, slot: Any, number: int) -> None:
            there = (self.me, *self.where(job), number)
            for peer in self.peers:
                plgpu.copy_smem_to_gmem(slot, plgpu.remote_ref(self.staged, peer).at[there], commit_group=False)
            plgpu.copy_smem_to_gmem(slot, self.staged.at[there])

        self._store_pieces(place, self._parts(sums), store)
        plgpu.wait_smem_to_gmem(0)
        counter = self.arrived.at[self.where(job)]
        for peer in [*self.peers, {self.axis: self.me}]:
            pl.semaphore_signal(counter, device_id=peer)
        pl.semaphore_wait(counter, self.plan.devices, decrement=False)
        nothing = (jnp.float32(0) for _ in self.plan.pieces)
        self._store_pieces(place, self._added(job, nothing), self._store_out)

    def _parts(self, sums: jax.Array) -> Iterator[jax.Array]:
        return (hopper_gemm.piece_of(self.plan.gemm, sums, number) for number, _ in enumerate(self.plan.pieces))

    def _added(self, job: Job, parts: Iterator[jax.Array]) -> Iterator[jax.Array]:
        """Piece by piece: of `parts`, and of what all sources have staged. Loads run ahead of the pieces' stores."""
        sources = range(self.plan.staged_shape[0])
        places = [(source, piece) for piece in range(len(self.plan.pieces)) for source in sources]

        def load(source: int, piece: int) -> jax.Array:
            there = self.staged.at[(source, *self.where(job), piece)]
            return plgpu.load(there, layout=plgpu.Layout.WGMMA, optimized=False)

        loaded = [load(*place) for place in places[:_LOADS_AHEAD]]
        later = iter(places[_LOADS_AHEAD:])
        for total in parts:
            for _ in sources:
                total += loaded.pop(0).astype(jnp.float32)
                loaded.extend(load(*place) for place in itertools.islice(later, 1))
            yield total

    def _store_out(self, place: Place, slot: Any, _: int) -> None:
        """A piece of the result: of a reduce-scatter to this device's, else to all."""
        plan, (rows, columns) = self.plan, slot.shape
        row = place.row - self.me * plan.out_shape[0] if plan.scatter else place.row
        there = pl.ds(row, rows), pl.ds(place.column, columns)
        if plan.shots == 2 and not plan.scatter:
            for peer in self.peers:
                plgpu.copy_smem_to_gmem(slot, plgpu.remote_ref(self.out, peer).at[there], commit_group=False)
        plgpu.copy_smem_to_gmem(slot, self.out.at[there])

    def _store_pieces(self, place: Place, pieces: Iterator[jax.Array], store: Store) -> None:
        gemm = self.plan.gemm
        for number, piece in enumerate(pieces):
            hopper_gemm.store_piece(gemm, self.slots, piece, number, gemm.part, store, place)
