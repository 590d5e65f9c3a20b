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

All writes to other devices are TMA stores out of shared memory, straight from the epilogue; they run on while the next
tile is multiplied. Counters `arrived[tile, warpgroup]` lie on the receiver: the sender adds 1 after its stores have
completed (`wait_smem_to_gmem`, then a release at system scope), a few steps into its next tile.

Legality: one axis of the mesh, NVLink or other peer access between its devices, no NVSHMEM. No collective of NCCL may
be in flight beside it on any of these devices, or each may wait for SMs that the other holds. No deadlock among its own
blocks: a tile waits only for tiles that all devices compute earlier in the same order, and before a block waits it has
told everybody of what it sent. Bitwise deterministic: an owner adds the others' rounded parts to its float32 sums in
the order of their distance; of an all-reduce all devices get the same bits.

Cost: max(GEMM, bytes over the link) + what the last wave sends; (n - 1) / n of the result per device over the link for
a reduce-scatter, twice that for an all-reduce (n - 1 times the result with one shot), and as much staging memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.profiles.collective_matmul import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import hopper_gemm
from dhelix.runtime.collective_matmul.kernels.hopper_gemm import CLUSTERS, GROUP, MEMORY_GROUP, RANK, Gemm, Tile

_PIECE_ROWS = 64  # what one wgmma gives
_TELL_STEP = 8  # of the next tile, when the stores of the last one have long completed
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
        rows, columns = self.gemm.part
        return [(i, j) for i in range(0, rows, _PIECE_ROWS) for j in range(0, columns, self.gemm.store_columns)]

    @property
    def staged_shape(self) -> tuple[int, ...]:
        """[source, block's tile, warpgroup, piece, row, column]: what others send, every piece contiguous."""
        sources = self.devices if self.shots == 1 else self.devices - 1
        tiles = self.tiles * self.gemm.cluster
        return sources, tiles, 2, len(self.pieces), _PIECE_ROWS, self.gemm.store_columns

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
        row, column = hopper_gemm.banded(*self.block, self.gemm.tiles.group)(tile)
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
    roomy = replace(gemm, store_slots=max(2, rows // _PIECE_ROWS * (columns // gemm.store_columns)))
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
        me = lax.axis_index(axis)

        def order(number: jax.Array) -> Tile:
            job = plan.job(me, number)
            return Tile(job.row, job.column)

        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            rows = x.at[pl.ds(tile.row * tile_m, tile_m), pl.ds(step * tile_k, tile_k)]
            plgpu.copy_gmem_to_smem(rows, destination, barrier)

        hopper_gemm.load_tiles(gemm, buffers, order, load_rows, w)

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(hopper_gemm.MEMORY_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(load)

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(hopper_gemm.COMPUTE_REGISTERS, action="increase")
        me = lax.axis_index(axis)
        peers: list[Any] = [{axis: lax.rem(me + step, jnp.int32(plan.devices))} for step in range(1, plan.devices)]
        links = _Links(plan, axis, me, peers, out, staged, buffers["out"].at[group], arrived, finished)
        _multiply(gemm, buffers, links)


def _multiply(gemm: Gemm, buffers: Any, links: _Links) -> None:
    """Multiplies what `load_tiles` loads and hands it on; for both compute warpgroups.

    As `hopper_gemm.multiply_tiles`, but that the last tile's receiver is told in the midst of the next one.
    """
    group = lax.axis_index(GROUP)
    rows, columns = gemm.part
    row, column = (group * rows, 0) if gemm.tiles.wide == "M" else (0, group * columns)
    cluster = lax.axis_index(CLUSTERS)
    mine = lax.div(gemm.cluster_tiles - cluster + (gemm.clusters - 1), jnp.int32(gemm.clusters))

    def job_of(number: jax.Array) -> Job:
        return links.plan.job(links.me, cluster + number * gemm.clusters)

    @pl.loop(0, mine)
    def _(number: jax.Array) -> None:
        def tell(step: jax.Array) -> None:
            now = (number > 0) & (step == min(_TELL_STEP, gemm.steps - 1))
            pl.when(now)(lambda: links.tell(job_of(number - 1)))

        result = hopper_gemm.product(gemm, buffers, number, (row, column), gemm.part, tell)
        job = job_of(number)
        first = job.row * gemm.cluster + lax.axis_index(RANK), job.column
        links.hand_on(job, result, first[0] * gemm.tiles.tile_m + row, first[1] * gemm.tiles.tile_n + column)

    pl.when(mine > 0)(lambda: links.tell(job_of(mine - 1)))
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

    def where(self, job: Job) -> tuple[jax.Array, jax.Array]:
        """Index of this warpgroup's part in `arrived`, and behind the source in `staged`."""
        return job.tile * self.plan.gemm.cluster + lax.axis_index(RANK), lax.axis_index(GROUP)

    def hand_on(self, job: Job, result: jax.Array, row: jax.Array, column: jax.Array) -> None:
        """Sends or finishes a part of a tile, whose first element in the whole product is (row, column)."""
        if self.plan.shots == 1:
            return self._exchange(job, result, row, column)
        pl.when(job.turn < self.plan.devices - 1)(lambda: self._send(job, result))
        pl.when(job.turn == self.plan.devices - 1)(lambda: self._finish_own(job, result, row, column))

    def tell(self, job: Job) -> None:
        """Tells the owner of what `hand_on` has sent, when it is there."""
        if self.plan.shots == 2:

            @pl.when(job.turn < self.plan.devices - 1)
            def _() -> None:
                owner = lax.rem(self.me + 1 + job.turn, jnp.int32(self.plan.devices))
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(self.arrived.at[self.where(job)], device_id={self.axis: owner})

    def finish(self) -> None:
        """Returns when all is stored here and elsewhere."""
        plgpu.wait_smem_to_gmem(0)
        gemm, plan = self.plan.gemm, self.plan
        if self.finished is None:
            return
        for peer in self.peers:
            pl.semaphore_signal(self.finished, device_id=peer)
        first = (lax.axis_index(CLUSTERS) == 0) & (lax.axis_index(RANK) == 0) & (lax.axis_index(GROUP) == 0)
        everybody = (plan.devices - 1) * gemm.clusters * gemm.cluster * 2
        pl.when(first)(lambda: pl.semaphore_wait(self.finished, everybody, decrement=False))

    def _send(self, job: Job, result: jax.Array) -> None:
        def store(slot: Any, piece: int) -> None:
            for turn, peer in enumerate(self.peers):

                @pl.when(job.turn == turn)
                def _(turn: int = turn, peer: Any = peer) -> None:
                    there = plgpu.remote_ref(self.staged, peer).at[(turn, *self.where(job), piece)]
                    plgpu.copy_smem_to_gmem(slot, there)

        self._store_pieces(self._parts(result), store)

    def _finish_own(self, job: Job, result: jax.Array, row: jax.Array, column: jax.Array) -> None:
        plan = self.plan
        pl.semaphore_wait(self.arrived.at[self.where(job)], plan.devices - 1, decrement=False)
        if plan.scatter:
            row -= self.me * plan.out_shape[0]
        store = functools.partial(self._store_out, row, column, [] if plan.scatter else self.peers)
        self._store_pieces(self._sums(job, self._parts(result)), store)

    def _exchange(self, job: Job, result: jax.Array, row: jax.Array, column: jax.Array) -> None:
        """Own part to everybody, this device included, and everybody's added up in the order of the devices."""

        def store(slot: Any, piece: int) -> None:
            place = (self.me, *self.where(job), piece)
            for peer in self.peers:
                plgpu.copy_smem_to_gmem(slot, plgpu.remote_ref(self.staged, peer).at[place], commit_group=False)
            plgpu.copy_smem_to_gmem(slot, self.staged.at[place])

        self._store_pieces(self._parts(result), store)
        plgpu.wait_smem_to_gmem(0)
        counter = self.arrived.at[self.where(job)]
        for peer in [*self.peers, {self.axis: self.me}]:
            pl.semaphore_signal(counter, device_id=peer)
        pl.semaphore_wait(counter, self.plan.devices, decrement=False)
        nothing = (jnp.float32(0) for _ in self.plan.pieces)
        self._store_pieces(self._sums(job, nothing), functools.partial(self._store_out, row, column, []))

    def _parts(self, result: jax.Array) -> Iterator[jax.Array]:
        for i, j in self.plan.pieces:
            yield result[i : i + _PIECE_ROWS, j : j + self.plan.gemm.store_columns]

    def _sums(self, job: Job, parts: Iterator[jax.Array]) -> Iterator[jax.Array]:
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

    def _store_out(self, row: jax.Array, column: jax.Array, peers: list[Any], slot: Any, piece: int) -> None:
        i, j = self.plan.pieces[piece]
        place = pl.ds(row + i, _PIECE_ROWS), pl.ds(column + j, self.plan.gemm.store_columns)
        for peer in peers:
            plgpu.copy_smem_to_gmem(slot, plgpu.remote_ref(self.out, peer).at[place], commit_group=False)
        plgpu.copy_smem_to_gmem(slot, self.out.at[place])

    def _store_pieces(self, pieces: Iterator[jax.Array], store: Callable[[Any, int], None]) -> None:
        """Piece by piece through shared memory; `store(slot, number)` starts the copies of one, as one group."""
        gemm = self.plan.gemm
        if len(self.plan.pieces) % gemm.store_slots:  # the slots do not go round: begin anew
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, piece in enumerate(pieces):
            slot = self.slots.at[number % gemm.store_slots]
            plgpu.wait_smem_to_gmem(gemm.store_slots - 1, wait_read_only=True)
            slot[...] = piece.astype(gemm.dtype)
            plgpu.commit_smem()
            store(slot, number)
