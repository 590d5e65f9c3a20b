"""A GEMM and the sum of its results over devices, in one Mosaic-GPU kernel for Hopper.

    matmul_reduce_scatter   out = this device's rows of  sum over devices of  x @ w
    matmul_all_reduce       out = all of it

Every tile of the product has an owner: the device that sums it. With `shots = 2`, tiles go to their owners (DistFuse,
section 3, calls this immediate communication):

    device 0                                            device 1
      tiles of 1  -> staged on 1  ----------------->      tiles of 1, later:  own part + staged -> out
      tiles of 0, later:  own part + staged -> out <--    tiles of 0  -> staged on 0
                                       |
                                       +-- all-reduce: the same TMA store goes to the other devices' out, too

A device computes tiles of other owners first and its own tiles later (`SummedGemm.job`). By then the other devices'
partial sums of its own tiles lie in `staged`. A tile is processed piece by piece while the next tile is multiplied
(`held_parts`). A part of another owner's tile is sent to that owner. A part of an own tile is added to the staged parts
in float32. So the owner's partial sums stay in registers, and multiplying continues.

`shots = 1` is for results of one wave of tiles, which are bound by latency. Every device sends its partial sums to all
devices, and each device adds all partial sums. Several blocks may share a contraction (`split_sums`).

All writes to other devices are TMA stores out of shared memory. Counters `arrived[tile, warpgroup]` are on the
receiver. The sender adds 1 after its stores have completed (`wait_smem_to_gmem`, then a release at system scope). This
is at least one turn (`held_parts`) after the last piece. The owner acquires, and fences the memory proxies before its
TMA loads.

Legality: the kernel works along one mesh axis of at most `MOST_DEVICES` devices. They need NVLink or other peer access,
but not NVSHMEM. No NCCL collective may be in flight on these devices: kernel and collective could each wait for SMs
that the other holds. The kernel's own blocks cannot deadlock. A tile waits only for tiles that all devices compute
earlier in the same order. Before a block waits, it signals everything that it has sent. Results are bitwise
deterministic. All parts are rounded, and an owner adds them in float32: first its own part, then other devices' parts
in the order of their distance. With one shot, each device adds all parts in the order of the devices. After an
all-reduce, all devices have the same bits.

Cost: max(GEMM, bytes over the link) plus the time to send the last wave. With n devices, a device sends (n - 1) / n of
the product for a reduce-scatter, and twice as many bytes for an all-reduce. With one shot, it sends n - 1 times the
product. Staging memory takes (n - 1) / n of the product with two shots, and n times the product with one shot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.collective_matmul.kernels import device_barrier, hopper_gemm, opaque, split_sums
from dhelix.runtime.collective_matmul.kernels.device_barrier import Meeting
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import CLUSTERS, GROUP, MEMORY_GROUP, RANK, Place, Tile
from dhelix.runtime.collective_matmul.kernels.held_parts import Adding, Held, Storing
from dhelix.runtime.collective_matmul.kernels.owned_tiles import Job, SummedGemm


def summed_matmul(plan: SummedGemm, axis: str, x: jax.Array, w: jax.Array, name: str) -> jax.Array:
    """Computes the sum over the devices of `axis` of x @ w, inside `shard_map`. Profiles show the kernel as `name`."""

    def kernel(*refs: Any, **scratch: Any) -> None:
        _kernel(plan, axis, *refs, **scratch)

    kernel.__name__ = name
    out, *_ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(plan.out_shape, x.dtype),
            jax.ShapeDtypeStruct(plan.staged_shape, x.dtype),
            device_barrier.words(plan.devices),
            *split_sums.outputs(plan.gemm),
        ),
        scratch_types=dict(
            buffers=plan.gemm.buffers(), loaded=plgpu.Barrier(num_arrivals=plan.devices - 1, num_barriers=2)
        ),
        **plan.gemm.launch(),
        compiler_params=device_barrier.PARAMS,
    )(x, w)
    return out


def _kernel(
    plan: SummedGemm,
    axis: str,
    x: Any,
    w: Any,
    out: Any,
    staged: Any,
    words: Any,
    *partials: Any,
    buffers: Any,
    loaded: Any,
) -> None:
    gemm, group = plan.gemm, lax.axis_index(GROUP)
    tile_m, tile_k = gemm.tiles.tile_m, gemm.tiles.tile_k
    loading, multiplying = plan.registers
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR(plan.staged_shape[1:3]))
    finished = None if plan.scatter or plan.shots == 1 else pl.get_global(plgpu.SemaphoreType.REGULAR)
    sums = split_sums.of_kernel(gemm, partials)
    all_devices = Meeting(axis, words, pl.get_global(plgpu.SemaphoreType.REGULAR))

    def load() -> None:
        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            rows = x.at[pl.ds(tile.row * tile_m, tile_m), pl.ds(step * tile_k, tile_k)]
            plgpu.copy_gmem_to_smem(rows, destination, barrier)

        hopper_gemm.load_tiles(gemm, buffers, plan.order(lax.axis_index(axis)), load_rows, w)

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(loading, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(load)
            first_block = (lax.axis_index(CLUSTERS) == 0) & (lax.axis_index(RANK) == 0)
            pl.when((warp == device_barrier.WARP) & first_block)(all_devices.meet)

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(multiplying, action="increase")
        me = lax.axis_index(axis)
        peers: list[Any] = [{axis: lax.rem(me + step, jnp.int32(plan.devices))} for step in range(1, plan.devices)]
        slots = buffers["out"].at[group]
        links = _Links(plan, axis, me, peers, out, staged, slots, loaded.at[group], arrived, finished, all_devices)
        hopper_gemm.multiply_tiles(gemm, buffers, plan.order(me), links.behind, links.finish, sums.complete)
        links.leave()


@dataclass(frozen=True)
class _Links:
    """Sends and sums results. Each compute warpgroup has its own instance.

    Attributes:
      plan: the GEMM and its sum.
      axis: the mesh axis.
      me: this device.
      peers: the other devices by `Job.turn`. For TMA, a peer's index must be computed only from constants and this
        device's index. Indices are computed once, because each computed index gets TMA descriptors of its own.
      out, staged: results and staging memory, in global memory of every device.
      slots: this warpgroup's slots in shared memory, [store_slots, 64, store_columns].
      loaded: this warpgroup's barrier for loads of the other devices' parts.
      arrived: counters of the parts in `staged`.
      finished: counter of the other devices' warpgroups that have stored everything for this device's `out`; None if
        other devices store nothing there.
      all_devices: the rendezvous of the devices. It must be over before anything is sent.
    """

    plan: SummedGemm
    axis: str
    me: jax.Array
    peers: list[Any]
    out: Any
    staged: Any
    slots: Any
    loaded: Any
    arrived: Any
    finished: Any
    all_devices: Meeting

    def behind(self, held: Held, turn: int) -> None:
        """Does one turn of the held part: sends a piece to its owner, or adds other devices' pieces to an own part."""
        if self.plan.shots == 1:  # needs no `is_complete`: with splits there is one wave, so `behind` never runs
            return self._exchange(held) if turn == 0 else None
        job = opaque.scalars(self.job(held.place))  # so that LLVM computes addresses at each turn, not earlier
        held, pieces = Held(held.part, opaque.scalars(held.place)), len(self.plan.pieces)

        @pl.when(self.is_others(job))
        def _() -> None:
            if turn == 0:
                self._await_all(held)
            self._sending(job).behind(held, turn)
            if turn == pieces + 1:
                self._tell(job)

        @pl.when(~self.is_others(job))
        def _() -> None:
            if turn == 0:
                self._wait(job)
            self._adding(job, self.plan.devices - 1).behind(held, turn)

    def finish(self, held: Held) -> None:
        """Does all turns of `behind` at once, for the last part."""
        if self.plan.shots == 1:
            pl.when(self.is_complete(held.place))(lambda: self._exchange(held))
            return
        job = self.job(held.place)

        @pl.when(self.is_others(job))
        def _() -> None:
            self._await_all(held)
            self._sending(job).finish(held)
            self._tell(job)

        @pl.when(~self.is_others(job))
        def _() -> None:
            self._wait(job)
            self._adding(job, self.plan.devices - 1).finish(held)

    def leave(self) -> None:
        """Waits until the other devices have stored everything for this device's `out`."""
        gemm, plan = self.plan.gemm, self.plan
        if self.finished is None:
            return
        pl.when(lax.axis_index(CLUSTERS) >= gemm.cluster_tiles)(self.all_devices.wait)  # in blocks without a tile
        for peer in self.peers:
            pl.semaphore_signal(self.finished, device_id=peer)
        first = (lax.axis_index(CLUSTERS) == 0) & (lax.axis_index(RANK) == 0) & (lax.axis_index(GROUP) == 0)
        everybody = (plan.devices - 1) * gemm.clusters * gemm.cluster * 2
        pl.when(first)(lambda: pl.semaphore_wait(self.finished, everybody, decrement=False))

    def job(self, place: Place) -> Job:
        return self.plan.job(self.me, place.number)

    def is_complete(self, place: Place) -> jax.Array | bool:
        """Whether this block's part is the sum of all splits."""
        return self.plan.gemm.tile_and_split(place.number)[1] == 0

    def is_others(self, job: Job) -> jax.Array:
        """Whether another device owns the part."""
        return job.turn < self.plan.devices - 1

    def where(self, job: Job) -> tuple[jax.Array, jax.Array]:
        """Index of this warpgroup's part in `arrived`. In `staged`, this index follows the index of the source."""
        return job.tile * self.plan.gemm.cluster + lax.axis_index(RANK), lax.axis_index(GROUP)

    def _sending(self, job: Job) -> Storing:
        """The `Storing` that sends a part to its owner, which is another device."""

        def send(_: Place, slot: Any, number: int) -> None:
            for turn, peer in enumerate(self.peers):

                @pl.when(job.turn == turn)
                def _(turn: int = turn, peer: Any = peer) -> None:
                    there = plgpu.remote_ref(self.staged, peer).at[(turn, *self.where(job), number)]
                    plgpu.copy_smem_to_gmem(slot, there)

        return Storing(self.plan.gemm, self.slots, send)

    def _await_all(self, held: Held) -> None:
        """Waits until all devices have begun, if this may be the first part that the block sends.

        If a block's first part belongs to this device, the block does not send it. Before the block sends its next
        part, it has received the other devices' parts of the first one, so all devices have begun.
        """

        @pl.when(held.place.number < self.plan.gemm.clusters)
        def _() -> None:
            self.all_devices.wait()
            hopper_gemm.fence_proxies()

    def _tell(self, job: Job) -> None:
        """Waits until all of a part has arrived at its owner, and then signals the owner."""
        owner = lax.rem(self.me + 1 + job.turn, jnp.int32(self.plan.devices))
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(self.arrived.at[self.where(job)], device_id={self.axis: owner})

    def _wait(self, job: Job) -> None:
        """Waits until all other devices' parts of an own tile have arrived. Loads of any kind may then read them."""
        pl.semaphore_wait(self.arrived.at[self.where(job)], self.plan.devices - 1, decrement=False)
        hopper_gemm.fence_proxies()

    def _adding(self, job: Job, sources: int) -> Adding:
        """The `Adding` that adds the staged parts of `sources` devices to an own part."""

        def staged(source: int, number: int) -> Any:
            return self.staged.at[(source, *self.where(job), number)]

        return Adding(self.plan.gemm, self.slots, self._store_out, self.loaded, staged, sources)

    def _exchange(self, held: Held) -> None:
        """Sends this device's part to all devices (also to itself), and adds all parts in the order of the devices."""
        self._await_all(held)
        job = self.job(held.place)
        where = self.where(job)

        def store(_: Place, slot: Any, number: int) -> None:
            for peer in self.peers:
                there = plgpu.remote_ref(self.staged, peer).at[(self.me, *where, number)]
                plgpu.copy_smem_to_gmem(slot, there, commit_group=False)
            plgpu.copy_smem_to_gmem(slot, self.staged.at[(self.me, *where, number)])

        Storing(self.plan.gemm, self.slots, store).finish(held)
        plgpu.wait_smem_to_gmem(0)
        counter = self.arrived.at[where]
        for peer in [*self.peers, {self.axis: self.me}]:
            pl.semaphore_signal(counter, device_id=peer)
        pl.semaphore_wait(counter, self.plan.devices, decrement=False)
        self._adding(job, self.plan.devices).finish(Held(jnp.zeros_like(held.part), held.place))

    def _store_out(self, place: Place, slot: Any, _: int) -> None:
        """Stores a piece of the result on this device. An all-reduce with two shots stores it on all devices."""
        plan, (rows, columns) = self.plan, slot.shape
        row = place.row - self.me * plan.out_shape[0] if plan.scatter else place.row
        there = pl.ds(row, rows), pl.ds(place.column, columns)
        if plan.shots == 2 and not plan.scatter:
            for peer in self.peers:
                plgpu.copy_smem_to_gmem(slot, plgpu.remote_ref(self.out, peer).at[there], commit_group=False)
        plgpu.copy_smem_to_gmem(slot, self.out.at[there])
