"""All-reduce tile by tile through peer memory, without a GEMM: one Mosaic-GPU kernel for NVLink.

    shots = 1                                       shots = 2
      every device reads every device's x             owner o reads all devices' tiles of shard o, sums them -> out
      and sums them all -> out                        the others read o's sums, tile by tile -> out

Contract: the result is the sum of all devices' x in float32, in the order of the devices, rounded to x's dtype. It has
the same bits on all devices and in every run.

Legality: one axis of the mesh, with peer access between its devices. While the kernel waits for its peers, it occupies
its SMs, so no NCCL collective may be in flight at the same time. A device leaves the kernel after all others have read
what they need from it.

Cost: with one shot, each device reads (n - 1) times x over the link; with two, 2 (n - 1) / n times x. For 2 devices
both are equal, and one shot needs no signals in between.

Tiles are runs of whole cache lines (DistFuse, section 3.1: widths that are multiples of 128 bytes). Over the link, the
kernel only reads, with 16-byte loads, because such loads reach a much higher bandwidth than stores to a peer (measured
on H200s). With two shots there is no barrier between the halves: a device's worker i (a warpgroup of a block) waits
only for worker i of each owner.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.errors import DhelixError

_VECTOR = 8  # elements that a thread loads at once: 16 bytes
_COLUMNS = 256  # row length of the 2D view of x
_BLOCK, _GROUP = "all_reduce_block", "all_reduce_group"
_ONE_SHOT_BYTES = 1 << 20  # up to this size of x, a second step costs more than reading everything


def shots_for(size: int, itemsize: int, devices: int) -> int:
    """1 if reading all of x from every device costs no more than two shots, else 2."""
    return 1 if devices == 2 or size * itemsize <= _ONE_SHOT_BYTES else 2


def _check(x: jax.Array, devices: int, multiple: int) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float16) or x.size % multiple or not x.size:
        raise DhelixError(
            f"tile_all_reduce of {x.dtype}{x.shape} over {devices} devices: take bfloat16 or float16 and a multiple of "
            f"{multiple} elements, or jax.lax.psum"
        )


def tile_all_reduce(
    x: jax.Array, axis_name: str, *, shots: int | None = None, tile_rows: int = 8, sms: int = 132, warpgroups: int = 4
) -> jax.Array:
    """The sum of all devices' x, inside `shard_map`.

    Args:
      x: bfloat16 or float16, any shape; a multiple of `tile_rows` * 256 elements (times the devices with two shots).
      axis_name: one axis of the mesh.
      shots: 1 or 2; None takes `shots_for`.
      tile_rows: rows of 256 elements that a worker sums at once.
      sms: largest number of blocks, one for each SM.
      warpgroups: warpgroups in each block.

    Raises:
      DhelixError: the kernel does not support the dtype or size.
    """
    n = lax.axis_size(axis_name)
    shots = shots or shots_for(x.size, x.dtype.itemsize, n)
    shards = n if shots == 2 else 1
    _check(x, n, tile_rows * _COLUMNS * shards)
    tiles = x.size // (tile_rows * _COLUMNS) // shards
    blocks = min(sms, math.ceil(tiles / warpgroups))
    workers = blocks * warpgroups
    layout = plgpu.Layout.WG_STRIDED((tile_rows, _COLUMNS), vec_size=_VECTOR)

    def tile_all_reduce(x_ref, out_ref):
        summed = pl.get_global(plgpu.SemaphoreType.REGULAR((n, workers)))
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me = lax.axis_index(axis_name)
        worker = lax.axis_index(_GROUP) * blocks + lax.axis_index(_BLOCK)

        def peer(distance) -> Any:
            return {axis_name: lax.rem(me + distance, jnp.int32(n))}

        def load(ref, device):
            return plgpu.load(plgpu.remote_ref(ref, device), layout=layout, optimized=False)

        def each_tile(shard, visit):
            """Calls `visit` with the rows of each tile of `shard` that this worker has."""

            @pl.loop(0, lax.div(tiles - worker + (workers - 1), jnp.int32(workers)))
            def _(count):
                visit(pl.ds((shard * tiles + worker + count * workers) * tile_rows, tile_rows))

        def add_up(rows):
            values = [load(x_ref.at[rows], {axis_name: jnp.int32(device)}) for device in range(n)]
            total = sum((value.astype(jnp.float32) for value in values[1:]), values[0].astype(jnp.float32))
            out_ref.at[rows][...] = total.astype(x.dtype)

        each_tile(me if shots == 2 else jnp.int32(0), add_up)
        if shots == 2:
            for distance in range(1, n):
                pl.semaphore_signal(summed.at[me, worker], device_id=peer(distance))
            for distance in range(1, n):
                owner = peer(distance)
                shard = owner[axis_name]
                pl.semaphore_wait(summed.at[shard, worker], 1, decrement=False)

                def copy(rows, owner=owner):
                    out_ref.at[rows][...] = load(out_ref.at[rows], owner)

                each_tile(shard, copy)

        for distance in range(1, n):
            pl.semaphore_signal(finished, device_id=peer(distance))
        pl.when(worker == 0)(lambda: pl.semaphore_wait(finished, (n - 1) * workers, decrement=False))

    return plgpu.kernel(
        tile_all_reduce,
        out_type=jax.ShapeDtypeStruct((x.size // _COLUMNS, _COLUMNS), x.dtype),
        grid=(blocks,),
        grid_names=(_BLOCK,),
        num_threads=warpgroups,
        thread_name=_GROUP,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x.reshape(-1, _COLUMNS)).reshape(x.shape)
